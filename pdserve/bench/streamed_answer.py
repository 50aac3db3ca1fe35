"""Records one streamed answer as its client sees it, and computes TTFT, ITL and TPOT. This module does no I/O.

``EventReader`` finds server-sent events in a byte stream, and ``read_chunk`` reads what is in one; ``distribution``
computes means and percentiles for every benchmark. The definitions are those of vLLM's ``bench serve``, so that figures
can be laid side by side: TTFT ends with the first chunk that has a token, each gap between two such chunks is an ITL,
and TPOT is the mean time of a token after the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
_MAX_EVENT = 8 * 2**20


class EventReader:
    """Takes bytes as they come, and returns the data of each whole event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the events that ``data`` completes. Raises BenchError for an event without an end."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > _MAX_EVENT:
            raise BenchError(f"the server sent {len(self._rest)} bytes without the end of an event")
        return [payload for event in whole if (payload := _data(event))]


def _data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """The part of a text completion's chunk, or of an error event, that a benchmark reads."""

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
    text: str = ""
    error: str = ""
    """Why there is no whole answer; empty if there is one."""

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
    """The figures of a whole run. Streams that failed are only counted, and are in none of the figures."""

    succeeded: int
    failed: int
    errors: tuple[str, ...]
    """Each different error, once."""
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


def summarise(*runs: Sequence[Stream]) -> LoadResult:
    """Returns the figures of all streams of all ``runs`` together. The runs must not overlap."""
    streams = [stream for run in runs for stream in run]
    good = [stream for stream in streams if not stream.error]
    return LoadResult(
        succeeded=len(good),
        failed=len(streams) - len(good),
        errors=tuple(dict.fromkeys(stream.error for stream in streams if stream.error)),
        duration_s=sum(_duration_s(run) for run in runs if run),
        output_tokens=sum(stream.output_tokens for stream in good),
        ttft_s=distribution([stream.ttft_s for stream in good]),
        tpot_s=distribution([tpot for stream in good if (tpot := stream.tpot_s) is not None]),
        itl_s=distribution([gap for stream in good for gap in stream.itls_s]),
        e2e_s=distribution([stream.e2e_s for stream in good]),
    )


def _duration_s(run: Sequence[Stream]) -> float:
    return max(stream.ended for stream in run) - min(stream.started for stream in run)
