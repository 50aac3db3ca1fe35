"""The latency targets that decide whether an answer counts as good: *goodput* counts only good ones."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.bench.streamed_answer import Stream, distribution


@dataclass(frozen=True, slots=True)
class AnswerTargets:
    """The longest time to the first token, and the longest time between two later ones."""

    ttft_s: float
    itl_s: float

    def met_in_mean(self, stream: Stream) -> bool:
        """Returns whether a whole answer met both: the first token's, and the others' in the mean (its TPOT)."""
        return self._met_at_first(stream) and (stream.tpot_s is None or stream.tpot_s <= self.itl_s)

    def met_at_p99(self, stream: Stream) -> bool:
        """Returns whether a whole answer met both, and the 99th percentile of its gaps too: it never stalled."""
        gaps_s = stream.itls_s
        return self._met_at_first(stream) and (not gaps_s or distribution(gaps_s).p99 <= self.itl_s)

    def _met_at_first(self, stream: Stream) -> bool:
        return not stream.error and bool(stream.arrivals) and stream.ttft_s <= self.ttft_s
