"""Keeps what a decode node knows of one prefill node, from the orders that it has sent to it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from pdserve.engine.placement.placement_rule import RemoteMeasures
from pdserve.wire.transfer import PrefillLoad

PROBE_S = 10.0
"""A node that was not asked for so long is asked again, whatever its estimate says."""
MAX_PROBE_S = 300.0
"""The time doubles up to this each time that asking did not pay."""

_PRIOR_OVERHEAD_S = 0.003
_PRIOR_BYTES_PER_S = 1e9
_PRIOR_CACHED_SHARE = 0.5
_WEIGHT = 0.25
_SLOW = 2.0
"""A node that has had so many times the expected time without delivering has failed."""


@dataclass(frozen=True, slots=True)
class _Order:
    tokens: int
    cached_tokens: int
    at: float
    ahead: float
    """The tokens that were in the node's queue before this prompt, as far as known."""
    expected_s: float
    alone_s: float

    def left(self, tokens_per_s: float, now: float) -> float:
        """Returns the tokens that are not computed yet if the node works at this rate."""
        done = (now - self.at) * tokens_per_s - self.ahead
        return self.tokens - min(max(0.0, done), self.tokens)


class PrefillNode:
    """One prefill node. The caller names each order; times are monotonic seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failing = False
        """Whether the last order failed through the node's fault."""
        self.max_prompt_tokens = 0
        """The longest prompt that the node takes, as it has said; 0 before it has."""
        self.overhead_s = _PRIOR_OVERHEAD_S
        self._cached_share = _PRIOR_CACHED_SHARE
        self._held_share = 0.0
        self._tokens_per_s: float | None = None
        self._moved_bytes = 0.0
        self._moving_s = 0.0
        self._orders: dict[Hashable, _Order] = {}
        self._others_tokens = 0.0
        self._others_at = 0.0
        self._streams = 0
        self._probe_s = PROBE_S
        self._probe_at = -math.inf

    @property
    def idle(self) -> bool:
        """Whether every order was answered."""
        return not self._orders

    @property
    def tokens_per_s(self) -> float | None:
        """The rate that the node itself has measured; None before it has reported one."""
        return self._tokens_per_s

    @property
    def bytes_per_s(self) -> float:
        """The rate at which blocks came after their first token."""
        return self._moved_bytes / self._moving_s if self._moving_s > 0 else _PRIOR_BYTES_PER_S

    def queued_tokens(self, now: float) -> float:
        """Returns the tokens of this node's orders and of others' prompts, less what the node has computed since."""
        return self._own(now) + self._others(now)

    def late_s(self, now: float) -> float:
        """Returns by how much the most overdue answer is late."""
        return max((max(0.0, now - order.at - order.expected_s) for order in self._orders.values()), default=0.0)

    def due(self, now: float) -> bool:
        """Returns whether it is time to ask the node again, to see what it can do."""
        return self.idle and now >= self._probe_at

    def measures(
        self, now: float, bytes_per_token: float, default_tokens_per_s: float, bytes_per_prompt: float = 0.0
    ) -> RemoteMeasures:
        """Returns what ``remote_time`` takes. A node whose rate is not known is taken to have the default."""
        return RemoteMeasures(
            tokens_per_s=self._tokens_per_s or default_tokens_per_s,
            queued_tokens=self.queued_tokens(now),
            late_s=self.late_s(now),
            overhead_s=self.overhead_s,
            cached_share=self._cached_share,
            bytes_per_token=bytes_per_token,
            bytes_per_s=self.bytes_per_s,
            bytes_per_prompt=bytes_per_prompt,
            held_share=self._held_share,
            streams=self._streams,
        )

    # ------------------------------------------------------------ events

    def ordered(
        self, order: Hashable, tokens: int, cached_tokens: int, expected_s: float, alone_s: float, now: float
    ) -> None:
        """Notes an order for the ``tokens`` of a prompt that are missing, to be answered in ``expected_s``.

        ``alone_s`` is the time that they would take on this node if it had nothing else to do.
        """
        self._orders[order] = _Order(tokens, cached_tokens, now, self.queued_tokens(now), expected_s, alone_s)

    def answered(self, order: Hashable, cached_tokens: int, load: PrefillLoad, now: float) -> None:
        """Notes that the first token has come; the node had ``cached_tokens`` of the prompt, and reports its load."""
        done = self._orders.pop(order, None)
        if done is None:
            return
        self.failing = False
        self.heard(load, now)
        if done.cached_tokens:
            share = min(1.0, cached_tokens / done.cached_tokens)
            self._cached_share += _WEIGHT * (share - self._cached_share)
        if done.tokens:
            held = min(1.0, max(0, cached_tokens - done.cached_tokens) / done.tokens)
            self._held_share += _WEIGHT * (held - self._held_share)
        elapsed_s = now - done.at
        if self._tokens_per_s is not None:
            computed = max(0, done.tokens + done.cached_tokens - cached_tokens)
            rest_s = max(0.0, elapsed_s - (done.ahead + computed) / self._tokens_per_s)
            self.overhead_s += _WEIGHT * (rest_s - self.overhead_s)
        self._probe_again(elapsed_s <= done.alone_s, now)

    def heard(self, load: PrefillLoad, now: float) -> None:
        """Notes the load that the node has reported, with an answer or by itself."""
        if 0 < load.tokens_per_s < math.inf:
            self._tokens_per_s = load.tokens_per_s
        self._others_tokens = max(0.0, load.queued_tokens - self._own(now))
        self._others_at = now
        self._streams = load.streams

    def landed(self, size: int, seconds: float) -> None:
        """Notes that ``size`` bytes came in ``seconds`` after a first token."""
        if size > 0 and seconds > 0:
            self._moved_bytes += size - _WEIGHT * self._moved_bytes
            self._moving_s += seconds - _WEIGHT * self._moving_s

    def failed(self, order: Hashable, now: float) -> None:
        """Notes that the node did not deliver."""
        self._orders.pop(order, None)
        self.failing = True
        self._probe_again(False, now)

    def timed_out(self, order: Hashable, now: float) -> None:
        """Notes that the node did not deliver in time: a failure unless that time was short for what was expected."""
        given = self._orders.get(order)
        if given is None or now - given.at > _SLOW * given.expected_s:
            self.failed(order, now)
        else:
            self.withdrawn(order)

    def withdrawn(self, order: Hashable) -> None:
        """Forgets an order that is not wanted any more, or that no node could have carried out."""
        self._orders.pop(order, None)

    def _probe_again(self, good: bool, now: float) -> None:
        self._probe_s = PROBE_S if good else min(2 * self._probe_s, MAX_PROBE_S)
        self._probe_at = now + self._probe_s

    def _own(self, now: float) -> float:
        return sum(order.left(self._tokens_per_s or 0.0, now) for order in self._orders.values())

    def _others(self, now: float) -> float:
        done = (now - self._others_at) * (self._tokens_per_s or 0.0)
        return max(0.0, self._others_tokens - done)
