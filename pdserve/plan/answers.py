"""What becomes of the requests of a simulation, and as soon as it is sure that too many of them come too late."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.plan.load import PlannedRequest
from pdserve.plan.profile import NodeSpeed

_BEHIND = 0.05
"""A cluster that leaves more of the requests behind does not keep up."""


@dataclass(slots=True, eq=False)
class Answer:
    """One answer, while it is made and afterwards. Times are in seconds of the simulated clock."""

    request: PlannedRequest
    tokens_left: int
    """The tokens after the first that its client has not got."""
    first_at: float = math.nan
    last_at: float = math.nan
    done: bool = False
    """Whether its client has all tokens, and its node has forgotten it."""

    @classmethod
    def to(cls, request: PlannedRequest) -> Answer:
        return cls(request, request.output_tokens - 1)

    @property
    def begun(self) -> bool:
        """Whether its client has the first token."""
        return not math.isnan(self.first_at)

    def end(self, now: float) -> None:
        self.last_at, self.done = now, True

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.request.at_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a token after the first; None for an answer of one token."""
        after_first = self.request.output_tokens - 1
        return (self.last_at - self.first_at) / after_first if after_first else None


class Bounds:
    """Counts what comes too late. Targets are in seconds, 0 for any."""

    def __init__(
        self, ttft_s: float, itl_s: float, percentile: float, load: Sequence[PlannedRequest], speed: NodeSpeed
    ) -> None:
        self.hopeless = False
        """Whether the cluster misses what is wanted, whatever happens from now on."""
        self._ttft_s, self._itl_s = ttft_s or math.inf, itl_s or math.inf
        share, gaps = 1 - percentile / 100, sum(request.output_tokens - 1 for request in load)
        # One more than the share, so that no rounding decides.
        self._answers_left, self._gaps_left = share * len(load) + 1, share * gaps + 1
        self._spreads = {beside: sorted(speed.spread_of(beside)) for beside in (False, True)}
        self._upto_middle, self._came = upto_middle(load), len(load) - upto_middle(load)
        self._at_middle = self._looked_at = 0

    def passed(self, now: float, answers: Sequence[Answer]) -> None:
        """Notes that it is ``now``: of ``answers``, those are too late whose first token should have come before."""
        while self._looked_at < len(answers):
            answer = answers[self._looked_at]
            if answer.request.at_s + self._ttft_s >= now:
                return
            self._looked_at += 1
            if not answer.begun or answer.ttft_s > self._ttft_s:
                self._answers_left -= 1
                self.hopeless |= self._answers_left < 0

    def gap(self, seconds: float, count: int, beside: bool) -> None:
        """Notes so many gaps between tokens, which are as long as that but for the spread of steps."""
        if seconds <= 0:
            return
        spread = self._spreads[beside]
        late = len(spread) - bisect_right(spread, self._itl_s / seconds)
        if late:
            self._gaps_left -= count * late / len(spread)
            self.hopeless |= self._gaps_left < 0

    def middle(self, answers: Sequence[Answer]) -> None:
        """Notes that the moment of the middle one of ``answers`` is over."""
        self._at_middle = _under_way_now(answers[: self._upto_middle])

    def last(self, answers: Sequence[Answer]) -> None:
        """Notes that the moment of the last one of them is over."""
        self.hopeless |= falls_behind(self._came, self._at_middle, _under_way_now(answers))


def upto_middle(load: Sequence[PlannedRequest]) -> int:
    """Returns how many requests come before the middle one or at the same moment as it."""
    return bisect_right(load, load[len(load) // 2].at_s, key=lambda request: request.at_s)


def _under_way_now(answers: Sequence[Answer]) -> int:
    """Returns how many of the ``answers`` that have been asked for have not ended."""
    return sum(not (answer.done or (answer.begun and not answer.tokens_left)) for answer in answers)


def falls_behind(came: int, at_middle: int, at_last: int) -> bool:
    """Returns whether the requests under way grow by more than chance while so many came after the middle one."""
    return at_last - at_middle > max(_BEHIND * came, 3 * math.sqrt(at_middle + 1))
