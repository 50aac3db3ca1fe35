"""Decides for each prompt whether this node computes it or the prefill node that the proxy has named."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable

from pdserve.config import Disaggregation, SchedulerConfig, TransferConfig
from pdserve.engine.placement.latency_targets import LEAST_PROMPT_TOKENS, TTFT_FACTOR, LatencyTargets, OwnItl
from pdserve.engine.placement.placement_rule import (
    Estimate,
    LocalMeasures,
    PlacementDecision,
    PromptSize,
    estimate,
    place,
    remote_time,
)
from pdserve.engine.placement.prefill_node import PrefillNode
from pdserve.engine.placement.step_cost import StepCost
from pdserve.wire.engine import PrefillDecisions, PrefillNodeStats, PrefillReason, PrefillSource, PrefillStats
from pdserve.wire.ids import BootId
from pdserve.wire.terms import PrefillTarget, RequestTargets
from pdserve.wire.transfer import PrefillLoad

STALE_S = 60.0
"""A slow rate that was measured on this node longer ago does not count."""

_MAX_NODES = 64


class Placement:
    """Keeps what was measured of this node and of each prefill node. The same calls give the same decisions."""

    def __init__(
        self,
        step_cost: StepCost,
        transfer: TransferConfig,
        scheduler: SchedulerConfig,
        block_size: int,
        bytes_per_token: float,
        targets: LatencyTargets,
        bytes_per_prompt: float = 0.0,
    ) -> None:
        self.step_cost = step_cost
        self.targets = targets
        self._mode = transfer.disaggregation
        self._max_num_batched_tokens = scheduler.max_num_batched_tokens
        self._block_size = block_size
        self.bytes_per_token, self.bytes_per_prompt = bytes_per_token, bytes_per_prompt
        self._nodes: dict[BootId, PrefillNode] = {}
        self._longest: dict[BootId, int] = {}
        """The longest prompts of nodes that were met and had no order so far."""
        self._decisions: Counter[tuple[PrefillSource, PrefillReason]] = Counter()
        self._times = Estimate(0.0, 0.0, 0.0)

    def decide(self, prompt: PromptSize, target: PrefillTarget, now: float) -> PlacementDecision:
        """Decides where to compute a prompt. Asking changes nothing but the two estimates that ``stats`` shows."""
        if self._mode is Disaggregation.NEVER:
            return PlacementDecision(PrefillSource.LOCAL, PrefillReason.SETTING)
        if prompt.missing_tokens <= self._block_size:
            return PlacementDecision(PrefillSource.LOCAL, PrefillReason.SHORT)
        node = self._nodes.get(target.boot_id)
        longest = self._longest.get(target.boot_id, 0) if node is None else node.max_prompt_tokens
        if 0 < longest < prompt.missing_tokens + prompt.cached_tokens:
            return PlacementDecision(PrefillSource.LOCAL, PrefillReason.UNFIT)
        if self._mode is Disaggregation.ALWAYS:
            return PlacementDecision(PrefillSource.REMOTE, PrefillReason.SETTING)
        # One prompt is enough to see what the node can do. Those that come with it are placed by what is known.
        if (node is None or node.due(now)) and not prompt.leaving_tokens:
            return PlacementDecision(PrefillSource.REMOTE, PrefillReason.PROBE)
        node = node or PrefillNode(target.name)
        if node.failing:
            return PlacementDecision(PrefillSource.LOCAL, PrefillReason.FAILED)
        here = self._here(prompt, node, now)
        there = node.measures(now, self.bytes_per_token, here.tokens_per_s, self.bytes_per_prompt)
        self._times = estimate(prompt, here, there, self._max_num_batched_tokens)
        alone_s = here.alone_s(prompt.missing_tokens)
        ttft = self.targets.ttft_aim(alone_s, prompt.own_ttft_ms, *self._held_up(prompt))
        # A short prompt that waits does not let the prefill node run dry before long ones.
        most_queued_s = max(
            self.targets.ttft_s(alone_s), TTFT_FACTOR * self._max_num_batched_tokens / here.tokens_per_s
        )
        return place(prompt, self._times, ttft, most_queued_s, there.streams)

    def _held_up(self, prompt: PromptSize) -> tuple[int, int, OwnItl]:
        """Returns the streams that a prompt would hold up here, the tokens of their contexts, and their ITL targets.

        Where nobody decodes, a prompt of one step holds nobody up. While a longer one is computed, one of the requests
        that have a place may begin to decode. It is taken to have this prompt's length and ITL target.
        """
        if prompt.rows or prompt.missing_tokens <= self._max_num_batched_tokens:
            return prompt.rows, prompt.context_tokens, prompt.own_itl
        own = OwnItl.of([RequestTargets(itl_ms=prompt.own_itl_ms)])
        return 1, prompt.missing_tokens + prompt.cached_tokens, own

    def _chunk_tokens(self, rows: int, context_tokens: int, own_itl: OwnItl, prompt_context: int = 0) -> int:
        """Returns how many tokens of prompts a step takes beside ``rows`` requests that decode."""
        aim_s = self.targets.aim_s(rows, context_tokens, own_itl) if rows else None
        if aim_s is None:
            return self._max_num_batched_tokens
        within = self.step_cost.prompt_tokens_within(aim_s, rows, context_tokens, prompt_context=prompt_context)
        return min(self._max_num_batched_tokens, max(LEAST_PROMPT_TOKENS, within))

    def _here(self, prompt: PromptSize, node: PrefillNode, now: float) -> LocalMeasures:
        """Returns what was measured of this node, to be compared with ``node``."""
        cost, rate = self.step_cost, self._own_rate(prompt, node, now)
        chunk_tokens = self._chunk_tokens(prompt.rows, prompt.context_tokens, prompt.own_itl, prompt.cached_tokens)
        if not cost.rate_known or rate != cost.tokens_per_s:
            return LocalMeasures(rate, cost.decode_step_s, chunk_tokens)
        return LocalMeasures(rate, cost.decode_step_s, chunk_tokens, cost.estimate_s(0, 0, 1), cost.prompt_s(1))

    def _own_rate(self, prompt: PromptSize, node: PrefillNode, now: float) -> float:
        """Returns the prompt tokens a second of this node, as measured.

        A node of which nothing is known, or nothing new, is taken to be like the other one. An old measurement is set
        aside for prompts of one chunk only, which do little harm if it was right.
        """
        other = node.tokens_per_s or self.step_cost.tokens_per_s
        if not self.step_cost.rate_known:
            return other
        if now - self.step_cost.measured_at > STALE_S and prompt.missing_tokens <= self._max_num_batched_tokens:
            return max(other, self.step_cost.tokens_per_s)
        return self.step_cost.tokens_per_s

    def count(self, decision: PlacementDecision) -> None:
        """Counts a decision by which a prompt was admitted."""
        if decision.source is not None:
            self._decisions[decision.source, decision.reason] += 1

    def ordered(
        self, target: PrefillTarget, order: Hashable, tokens: int, cached_tokens: int, now: float
    ) -> PrefillNode:
        """Notes an order for the missing ``tokens`` of a prompt. Returns the node, to be told the outcome."""
        node = self._nodes.get(target.boot_id)
        if node is None:
            self._forget_idle()
            node = self._nodes[target.boot_id] = PrefillNode(target.name)
            node.max_prompt_tokens = self._longest.pop(target.boot_id, 0)
        remote = node.measures(now, self.bytes_per_token, self.step_cost.tokens_per_s, self.bytes_per_prompt)
        expected_s = remote_time(PromptSize(tokens, cached_tokens, 0, 0), remote, self._max_num_batched_tokens)
        node.ordered(order, tokens, cached_tokens, expected_s, tokens / self.step_cost.tokens_per_s, now)
        return node

    def needed_s(self, target: PrefillTarget, tokens: int, cached_tokens: int, now: float) -> float:
        """Returns how long the prefill node may take for such a prompt, if it is as measured or else like this node.

        The time includes what is queued there, and assumes that the node's prefix cache has nothing of the prompt.
        """
        node = self._nodes.get(target.boot_id) or PrefillNode(target.name)
        remote = node.measures(now, self.bytes_per_token, self.step_cost.tokens_per_s, self.bytes_per_prompt)
        # That the node is late is no reason to wait longer.
        remote = dataclasses.replace(remote, late_s=0.0, cached_share=0.0, held_share=0.0)
        return remote_time(PromptSize(tokens, cached_tokens, 0, 0), remote, self._max_num_batched_tokens)

    def tokens_per_s(self, rows: int, context_tokens: int, own_itl: OwnItl) -> float:
        """Returns the prompt tokens a second of this node beside ``rows`` requests that decode."""
        chunk_tokens = self._chunk_tokens(rows, context_tokens, own_itl)
        return self.step_cost.tokens_per_s_beside(rows, context_tokens, chunk_tokens)

    def met(self, boot_id: BootId, max_prompt_tokens: int) -> None:
        """Notes the longest prompt that a prefill node takes, as the node has said."""
        node = self._nodes.get(boot_id)
        if node is not None:
            node.max_prompt_tokens = max_prompt_tokens
            return
        self._longest[boot_id] = max_prompt_tokens
        if len(self._longest) > _MAX_NODES:
            del self._longest[next(iter(self._longest))]

    def heard(self, boot_id: BootId, load: PrefillLoad, now: float) -> None:
        """Notes the load that a prefill node has reported."""
        node = self._nodes.get(boot_id)
        if node is not None:
            node.heard(load, now)

    def _forget_idle(self) -> None:
        """Forgets the oldest idle nodes beyond ``_MAX_NODES``: a node that restarts is another one."""
        idle = [boot_id for boot_id, node in self._nodes.items() if node.idle]
        for boot_id in idle[:-_MAX_NODES]:
            del self._nodes[boot_id]

    def stats(self, now: float) -> PrefillStats:
        """Returns what the metrics show."""
        # Of two boots under one name, the newer one stays in the dictionary.
        nodes = {
            node.name: PrefillNodeStats(
                node.name, node.tokens_per_s or 0.0, round(node.queued_tokens(now)), node.overhead_s, node.bytes_per_s
            )
            for node in self._nodes.values()
        }
        decisions = sorted(self._decisions.items(), key=lambda item: (item[0][0].value, item[0][1].value))
        return PrefillStats(
            decisions=tuple(PrefillDecisions(source, reason, count) for (source, reason), count in decisions),
            nodes=tuple(nodes.values()),
            tokens_per_s=self.step_cost.tokens_per_s if self.step_cost.rate_known else 0.0,
            decode_step_s=self.step_cost.decode_step_s,
            last_local_s=self._times.local_s,
            last_remote_s=self._times.remote_s,
        )
