"""Records one streamed answer as its client sees it, and computes TTFT, ITL and TPOT. This module does no I/O.

``EventReader`` finds server-sent events in a byte stream, and ``read_chunk`` reads what is in one; ``distribution``
computes means and percentiles for every benchmark. The definitions are those of vLLM's ``bench serve``, so that figures
can be laid side by side: TTFT ends with the first chunk that has a token, each gap between two such chunks is an ITL,
and TPOT is the mean time of a token after the first. ``AnswerTargets`` decides which answers are good: *goodput* counts
only those.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pdserve.errors import BenchError


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of measured values, in their own unit. The figures are NaN if there are no values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float


def distribution(values: Sequence[float]) -> Distribution:
    """Returns the distribution of ``values``. Percentiles interpolate between neighbours, as numpy's do."""
    if not values:
        nan = float("nan")
        return Distribution(0, nan, nan, nan, nan, nan)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Distribution(len(values), float(np.mean(values)), p50, p90, p99, float(max(values)))


DONE = b"[DONE]"
"""The data of the last event."""
SHOWN_ERROR = 300
"""The characters of a server's error that a benchmark shows."""
_MOST_ERRORS = 16
"""A run remembers so many different errors: an error may name its request, and then each one differs."""
_MAX_EVENT = 8 * 2**20


class EventReader:
    """Takes bytes as they come, and returns the data of each complete event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the events that ``data`` completes. Raises BenchError for an event without an end."""
        *complete, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > _MAX_EVENT:
            raise BenchError(f"the server sent {len(self._rest)} bytes without the end of an event")
        return [payload for event in complete if (payload := _data(event))]


def _data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class _Delta(msgspec.Struct):
    """What a chunk of a chat answer adds."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def brings_token(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """The part of a chunk of an answer, or of an error event, that a benchmark reads."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_chunks = msgspec.json.Decoder(Chunk)


def read_chunk(payload: bytes) -> Chunk:
    """Returns the chunk in the data of an event. Raises MsgspecError if it is none."""
    return _chunks.decode(payload)


@dataclass(slots=True)
class Stream:
    """One request and its answer. Times are in seconds of one monotonic clock."""

    started: float
    arrivals: list[float] = field(default_factory=list)
    """The time of each chunk that brought a token."""
    ended: float = 0.0
    output_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    """The ids of the answer's tokens, if the server reports them."""
    pieces: list[str] = field(default_factory=list)
    """The text of each chunk."""
    error: str = ""
    """Why there is no complete answer; empty if there is one."""
    reason: str = ""
    """The kind of the error, by which failed requests are counted."""

    def fail(self, reason: str, detail: str = "") -> None:
        """Records why there is no complete answer."""
        self.reason = reason
        self.error = f"{reason}: {detail}" if detail else reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def itls_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]

    @property
    def tpot_s(self) -> float | None:
        """Returns the mean time of a token after the first; None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The figures of a run. Streams that failed are only counted, and are in none of the figures."""

    succeeded: int
    failed: int
    errors: tuple[str, ...]
    """Each different error, once, and at most 16 of them."""
    reasons: Mapping[str, int]
    """The number of failed requests by the kind of their error, the most frequent first."""
    duration_s: float
    """The time from the first request to the end of the last answer; the sum over several runs."""
    output_tokens: int
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.succeeded / self.duration_s if self.duration_s else 0.0


def _numbers() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Tally:
    """What is remembered of the answers of one run: 8 bytes for each gap between two tokens, and no text."""

    succeeded: int = 0
    failed: int = 0
    errors: dict[str, None] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    ttfts_s: array[float] = field(default_factory=_numbers)
    tpots_s: array[float] = field(default_factory=_numbers)
    itls_s: array[float] = field(default_factory=_numbers)
    e2es_s: array[float] = field(default_factory=_numbers)
    began: float = float("inf")
    ended: float = float("-inf")

    def add(self, stream: Stream) -> None:
        """Adds an answer that has ended, in whatever way."""
        self.began = min(self.began, stream.started)
        self.ended = max(self.ended, stream.ended)
        if stream.error:
            self.failed += 1
            self.reasons[stream.reason or stream.error] += 1
            if len(self.errors) < _MOST_ERRORS:
                self.errors[stream.error] = None
            return
        self.succeeded += 1
        self.output_tokens += stream.output_tokens
        self.ttfts_s.append(stream.ttft_s)
        self.itls_s.extend(stream.itls_s)
        self.e2es_s.append(stream.e2e_s)
        if (tpot_s := stream.tpot_s) is not None:
            self.tpots_s.append(tpot_s)

    @property
    def duration_s(self) -> float:
        return max(0.0, self.ended - self.began)


def summarise(*runs: Sequence[Stream]) -> LoadResult:
    """Returns the figures of all streams of all ``runs`` together. The runs must not overlap."""
    return result_of(*(_tally(run) for run in runs))


def _tally(run: Sequence[Stream]) -> Tally:
    tally = Tally()
    for stream in run:
        tally.add(stream)
    return tally


def result_of(*tallies: Tally) -> LoadResult:
    """Returns the figures of all ``tallies`` together. Their runs must not overlap."""
    errors: dict[str, None] = {}
    reasons: Counter[str] = Counter()
    for tally in tallies:
        errors |= tally.errors
        reasons.update(tally.reasons)
    return LoadResult(
        succeeded=sum(tally.succeeded for tally in tallies),
        failed=sum(tally.failed for tally in tallies),
        errors=tuple(errors)[:_MOST_ERRORS],
        reasons=dict(reasons.most_common()),
        duration_s=sum(tally.duration_s for tally in tallies),
        output_tokens=sum(tally.output_tokens for tally in tallies),
        ttft_s=_together([tally.ttfts_s for tally in tallies]),
        tpot_s=_together([tally.tpots_s for tally in tallies]),
        itl_s=_together([tally.itls_s for tally in tallies]),
        e2e_s=_together([tally.e2es_s for tally in tallies]),
    )


def _together(parts: Sequence[array[float]]) -> Distribution:
    return distribution(parts[0] if len(parts) == 1 else [value for part in parts for value in part])


@dataclass(frozen=True, slots=True)
class AnswerTargets:
    """The longest time to the first token, and the longest time between two later ones."""

    ttft_s: float
    itl_s: float

    def met_in_mean(self, stream: Stream) -> bool:
        """Returns whether a complete answer met both: the first token's, and the others' in the mean (its TPOT)."""
        return self._met_at_first(stream) and (stream.tpot_s is None or stream.tpot_s <= self.itl_s)

    def met_at_p99(self, stream: Stream) -> bool:
        """Returns whether a complete answer met both, and the 99th percentile of its gaps too: it never stalled."""
        gaps_s = stream.itls_s
        return self._met_at_first(stream) and (not gaps_s or distribution(gaps_s).p99 <= self.itl_s)

    def _met_at_first(self, stream: Stream) -> bool:
        return not stream.error and bool(stream.arrivals) and stream.ttft_s <= self.ttft_s
