"""What a decode node knows of one prefill node, from the orders that it has sent there itself."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from pdserve.engine.placement.prefill_cost import RemoteMeasures
from pdserve.wire.transfer import PrefillLoad

PROBE_S = 10.0
"""A node that was not heard of for so long is asked again, whatever its estimate says …"""
MAX_PROBE_S = 300.0
"""… and after each time that it was no good, after twice as long, up to this."""

_PRIOR_OVERHEAD_S = 0.003
_PRIOR_BYTES_PER_S = 1e9
_PRIOR_CACHED_SHARE = 0.5
_WEIGHT = 0.25
_SLOW = 2.0
"""Times what was expected: who has had so long and is not done is slow."""


@dataclass(frozen=True, slots=True)
class _OrderedPrompt:
    tokens: int
    cached_tokens: int
    at: float
    ahead: float
    """Tokens in the node's queue before it, as far as known."""
    expected_s: float
    alone_s: float


class PrefillNode:
    """Orders are named by whoever sends them. Times are monotonic seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failing = False
        """Its last order came to nothing, by its own fault."""
        self.max_prompt_tokens = 0
        """As the node itself has said; 0 before it has."""
        self.overhead_s = _PRIOR_OVERHEAD_S
        self._cached_share = _PRIOR_CACHED_SHARE
        self._tokens_per_s: float | None = None
        self._moved_bytes = 0.0
        self._moving_s = 0.0
        self._orders: dict[Hashable, _OrderedPrompt] = {}
        self._others_tokens = 0.0
        self._others_at = 0.0
        self._probe_s = PROBE_S
        self._probe_at = -math.inf

    @property
    def idle(self) -> bool:
        """Whether nothing is ordered there that has not been answered."""
        return not self._orders

    @property
    def tokens_per_s(self) -> float | None:
        """As the node itself has measured it; None before it has said so."""
        return self._tokens_per_s

    @property
    def bytes_per_s(self) -> float:
        """Of blocks that came after their first token."""
        return self._moved_bytes / self._moving_s if self._moving_s > 0 else _PRIOR_BYTES_PER_S

    def queued_tokens(self, now: float) -> float:
        """What is ordered from here, and what it has said of others' prompts, less what it has done since."""
        own = sum(order.tokens for order in self._orders.values())
        return own + self._others(now)

    def late_s(self, now: float) -> float:
        """By how much its most overdue answer is late."""
        return max((max(0.0, now - order.at - order.expected_s) for order in self._orders.values()), default=0.0)

    def due(self, now: float) -> bool:
        """Whether it is time to ask it again, to see what it can do."""
        return self.idle and now >= self._probe_at

    def measures(self, now: float, bytes_per_token: float, default_tokens_per_s: float) -> RemoteMeasures:
        """Returns what ``remote_cost`` takes. A node whose rate is not known is taken to have the default."""
        return RemoteMeasures(
            tokens_per_s=self._tokens_per_s or default_tokens_per_s,
            queued_tokens=self.queued_tokens(now),
            late_s=self.late_s(now),
            overhead_s=self.overhead_s,
            cached_share=self._cached_share,
            bytes_per_token=bytes_per_token,
            bytes_per_s=self.bytes_per_s,
        )

    # ------------------------------------------------------------ what happens

    def ordered(
        self, order: Hashable, tokens: int, cached_tokens: int, expected_s: float, alone_s: float, now: float
    ) -> None:
        """It was asked for a prompt of which ``tokens`` are missing here, and is expected to answer in ``expected_s``.

        ``alone_s`` is what they would take on this node if it had nothing else to do.
        """
        self._orders[order] = _OrderedPrompt(tokens, cached_tokens, now, self.queued_tokens(now), expected_s, alone_s)

    def answered(self, order: Hashable, cached_tokens: int, load: PrefillLoad, now: float) -> None:
        """The first token is here; the node held ``cached_tokens`` of the prompt, and says how it is."""
        done = self._orders.pop(order, None)
        if done is None:
            return
        self.failing = False
        self.heard(load, now)
        if done.cached_tokens:
            share = min(1.0, cached_tokens / done.cached_tokens)
            self._cached_share += _WEIGHT * (share - self._cached_share)
        elapsed_s = now - done.at
        if self._tokens_per_s is not None:
            computed = max(0, done.tokens + done.cached_tokens - cached_tokens)
            rest_s = max(0.0, elapsed_s - (done.ahead + computed) / self._tokens_per_s)
            self.overhead_s += _WEIGHT * (rest_s - self.overhead_s)
        self._probe_again(elapsed_s <= done.alone_s, now)

    def heard(self, load: PrefillLoad, now: float) -> None:
        """It says how it is: with an answer, or meanwhile."""
        if 0 < load.tokens_per_s < math.inf:
            self._tokens_per_s = load.tokens_per_s
        self._others_tokens = max(0.0, load.queued_tokens - sum(order.tokens for order in self._orders.values()))
        self._others_at = now

    def landed(self, size: int, seconds: float) -> None:
        """So many bytes came in ``seconds`` after a first token."""
        if size > 0 and seconds > 0:
            self._moved_bytes += size - _WEIGHT * self._moved_bytes
            self._moving_s += seconds - _WEIGHT * self._moving_s

    def failed(self, order: Hashable, now: float) -> None:
        """It did not deliver."""
        self._orders.pop(order, None)
        self.failing = True
        self._probe_again(False, now)

    def timed_out(self, order: Hashable, now: float) -> None:
        """It did not deliver in time: a failure unless that time was short for what it was expected to take."""
        given = self._orders.get(order)
        if given is None or now - given.at > _SLOW * given.expected_s:
            self.failed(order, now)
        else:
            self.withdrawn(order)

    def withdrawn(self, order: Hashable) -> None:
        """Nobody wants it any more, or nobody could have done it: that says nothing of the node."""
        self._orders.pop(order, None)

    def _probe_again(self, good: bool, now: float) -> None:
        self._probe_s = PROBE_S if good else min(2 * self._probe_s, MAX_PROBE_S)
        self._probe_at = now + self._probe_s

    def _others(self, now: float) -> float:
        done = (now - self._others_at) * (self._tokens_per_s or 0.0)
        return max(0.0, self._others_tokens - done)
