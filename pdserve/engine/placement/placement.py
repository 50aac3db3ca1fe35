"""Decides for each prompt whether this node computes it or the prefill node that the proxy has named."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from pdserve.config import Disaggregation, SchedulerConfig, TransferConfig
from pdserve.engine.placement.prefill_cost import LocalMeasures, PromptSize, local_cost, remote_cost
from pdserve.engine.placement.prefill_node import PrefillNode
from pdserve.engine.placement.prefill_rate import PrefillRate
from pdserve.wire.engine import PrefillDecisions, PrefillNodeStats, PrefillReason, PrefillSource, PrefillStats
from pdserve.wire.ids import BootId
from pdserve.wire.ticket import PrefillTarget
from pdserve.wire.transfer import PrefillLoad

STALE_S = 60.0
"""A rate that was measured here longer ago is not held against this node."""

_MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Where a prompt is computed, and why."""

    source: PrefillSource
    reason: PrefillReason

    @property
    def remote(self) -> bool:
        return self.source is PrefillSource.REMOTE


class Placement:
    """Keeps what was measured of this node and of each prefill node. The same calls make the same choices."""

    def __init__(
        self,
        rate: PrefillRate,
        transfer: TransferConfig,
        scheduler: SchedulerConfig,
        block_size: int,
        bytes_per_token: float,
    ) -> None:
        self._rate = rate
        self._mode = transfer.disaggregation
        self._stall_weight = transfer.stall_weight
        self._max_step_tokens = scheduler.max_step_tokens
        self._block_size = block_size
        self._bytes_per_token = bytes_per_token
        self._nodes: dict[BootId, PrefillNode] = {}
        self._decisions: Counter[PlacementDecision] = Counter()
        self._local_s = 0.0
        self._remote_s = 0.0

    def choose(self, prompt: PromptSize, target: PrefillTarget, now: float) -> PlacementDecision:
        """Where to compute a prompt. Nothing changes by asking but the two costs that ``stats`` shows."""
        if self._mode is Disaggregation.NEVER:
            return PlacementDecision(PrefillSource.LOCAL, PrefillReason.SETTING)
        if prompt.missing_tokens <= self._block_size:
            return PlacementDecision(PrefillSource.LOCAL, PrefillReason.SHORT)
        node = self._nodes.get(target.boot_id)
        if node is not None and 0 < node.max_prompt_tokens < prompt.missing_tokens + prompt.cached_tokens:
            return PlacementDecision(PrefillSource.LOCAL, PrefillReason.UNFIT)
        if self._mode is Disaggregation.ALWAYS:
            return PlacementDecision(PrefillSource.REMOTE, PrefillReason.SETTING)
        if node is None or node.due(now):
            return PlacementDecision(PrefillSource.REMOTE, PrefillReason.PROBE)
        if node.failing:
            return PlacementDecision(PrefillSource.LOCAL, PrefillReason.FAILED)
        here = LocalMeasures(self._own_rate(prompt, node, now), self._rate.decode_step_s, self._max_step_tokens)
        self._local_s = local_cost(prompt, here, self._stall_weight)
        there = node.seen(now, self._bytes_per_token, here.tokens_per_s)
        self._remote_s = remote_cost(prompt, there, self._max_step_tokens)
        # Of two that cost the same, the one without a transfer.
        source = PrefillSource.REMOTE if self._remote_s < self._local_s else PrefillSource.LOCAL
        return PlacementDecision(source, PrefillReason.CHEAPER)

    def _own_rate(self, prompt: PromptSize, node: PrefillNode, now: float) -> float:
        """Measured; but a node of which nothing is known, or nothing new, is taken to be like the other one.

        An old measurement is set aside for prompts of one chunk only, which do little harm if it was right.
        """
        other = node.tokens_per_s or self._rate.tokens_per_s
        if not self._rate.known:
            return other
        if now - self._rate.measured_at > STALE_S and prompt.missing_tokens <= self._max_step_tokens:
            return max(other, self._rate.tokens_per_s)
        return self._rate.tokens_per_s

    def decided(self, decision: PlacementDecision) -> None:
        """A prompt goes where it was decided: counted."""
        self._decisions[decision] += 1

    def ordered(
        self, target: PrefillTarget, order: Hashable, tokens: int, cached_tokens: int, now: float
    ) -> PrefillNode:
        """The missing ``tokens`` of a prompt were ordered. Returns who wants to know what becomes of it."""
        node = self._nodes.get(target.boot_id)
        if node is None:
            self._forget_idle()
            node = self._nodes[target.boot_id] = PrefillNode(target.name)
        there = node.seen(now, self._bytes_per_token, self._rate.tokens_per_s)
        expected_s = remote_cost(PromptSize(tokens, cached_tokens, 0, 0), there, self._max_step_tokens)
        node.ordered(order, tokens, cached_tokens, expected_s, tokens / self._rate.tokens_per_s, now)
        return node

    def needed_s(self, target: PrefillTarget, tokens: int, cached_tokens: int, now: float) -> float:
        """How long the prefill node may take for such a prompt if it is as measured, or like this one if it is not.

        With what is queued there, and with nothing of the prompt in its prefix cache.
        """
        node = self._nodes.get(target.boot_id) or PrefillNode(target.name)
        there = node.seen(now, self._bytes_per_token, self._rate.tokens_per_s)
        # That it is late is no reason to wait longer.
        there = dataclasses.replace(there, late_s=0.0, cached_share=0.0)
        return remote_cost(PromptSize(tokens, cached_tokens, 0, 0), there, self._max_step_tokens)

    def met(self, boot_id: BootId, max_prompt_tokens: int) -> None:
        """A prefill node has said which prompts it takes."""
        node = self._nodes.get(boot_id)
        if node is not None:
            node.max_prompt_tokens = max_prompt_tokens

    def heard(self, boot_id: BootId, load: PrefillLoad, now: float) -> None:
        """A prefill node has said how it is."""
        node = self._nodes.get(boot_id)
        if node is not None:
            node.heard(load, now)

    def _forget_idle(self) -> None:
        """A node that restarts is another one; the oldest are not kept for ever."""
        idle = [boot_id for boot_id, node in self._nodes.items() if node.idle]
        for boot_id in idle[:-_MAX_NODES]:
            del self._nodes[boot_id]

    # ------------------------------------------------------------ what is shown

    def stats(self, now: float) -> PrefillStats:
        # Of two boots under one name, the newer one.
        nodes = {
            node.name: PrefillNodeStats(
                node.name,
                node.tokens_per_s or 0.0,
                round(node.queued_tokens(now)),
                node.overhead_s,
                node.bytes_per_s,
            )
            for node in self._nodes.values()
        }
        decisions = sorted(self._decisions.items(), key=lambda item: (item[0].source.value, item[0].reason.value))
        return PrefillStats(
            decisions=tuple(PrefillDecisions(made.source, made.reason, count) for made, count in decisions),
            nodes=tuple(nodes.values()),
            tokens_per_s=self._rate.tokens_per_s if self._rate.known else 0.0,
            decode_step_s=self._rate.decode_step_s,
            last_local_s=self._local_s,
            last_remote_s=self._remote_s,
        )
