"""The clients of ``benchmarks stream``, in their own process: ``python -m benchmarks.stream.stream_clients``.

They read an order from standard input. A load generator beside servers on two cores must cost next to nothing: the
clients poll their sockets, take one timestamp for each read, and parse nothing before the last stream is over.
"""

from __future__ import annotations

import enum
import gc
import math
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec

from benchmarks.client_process import connect, receive, serve_order
from benchmarks.process_usage import cpu_s, peak_mib, reset_peaks
from benchmarks.stream.credit import CreditWriter, credit_to
from benchmarks.stream.raw_answer import RawAnswer, Wording, WordStream, read_answer
from pdserve.bench.streamed_answer import Distribution, summarise

CLIENTS = "clients"
"""The name of this process beside those that it watches."""
_READ_BYTES = 2**16
_TELL_AGAIN_S = 0.1
"""The time after which a number is sent again for which the FIFO was too full, while the engine waits for it."""


class StreamLoadOrder(msgspec.Struct, frozen=True):
    """The order that the client process reads: all streams begin at once, each with one request."""

    host: str
    port: int
    request: bytes
    """The bytes of the request as they go over the wire."""
    streams: int
    wording: Wording
    watched: dict[str, int]
    """The ids, by name, of the processes whose CPU time and memory are measured."""
    timeout_s: float
    credit_file: str = ""
    """The FIFO in which to tell how many tokens have come (``credit``); empty if the engine does not wait for them."""


class Span(msgspec.Struct, frozen=True):
    """A part of the run."""

    seconds: float
    tokens: int
    chunks: int
    cpu_s: dict[str, float]
    """The CPU seconds by process."""


class StreamLoadReport(msgspec.Struct, frozen=True):
    """The report that the client process writes."""

    failed: int
    errors: tuple[str, ...]
    run: Span
    """The time from the first request to the last byte."""
    steady: Span | None
    """The time from the last stream's first token to the first stream's end, with only tokens; None if it is empty."""
    ttft_s: Distribution
    tpot_s: Distribution
    gaps_s: Distribution
    """The times between the chunks of a stream."""
    peak_mib: dict[str, float]


class Stage(enum.Enum):
    """The stages that a run reaches."""

    STARTED = "started"
    ALL_BEGUN = "all begun"
    """The last stream has had its first token."""
    FIRST_ENDED = "first ended"
    OVER = "over"


class Marks:
    """The time at which the run reached each stage, and the CPU time of each process by then."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._marks: dict[Stage, tuple[float, dict[str, float]]] = {}

    def set(self, stage: Stage) -> None:
        """Records the stage. Only the first call for a stage counts."""
        if stage not in self._marks:
            self._marks[stage] = time.perf_counter(), cpu_s(self._pids)

    def span(self, first: Stage, last: Stage, streams: Sequence[WordStream]) -> Span | None:
        """Returns the part of the run between two stages; None if the run did not reach both in this order."""
        since, before = self._marks.get(first, (math.inf, {}))
        until, after = self._marks.get(last, (-math.inf, {}))
        if since >= until:
            return None
        words = [
            count
            for stream in streams
            for arrival, count in zip(stream.times.arrivals, stream.words, strict=True)
            if since < arrival <= until
        ]
        used = {name: after[name] - before[name] for name in self._pids}
        return Span(until - since, sum(words), len(words), used)


def run(order: StreamLoadOrder) -> StreamLoadReport:
    """Carries out the order. Raises BenchError if a watched process is gone, and OSError if a connection fails."""
    pids = {**order.watched, CLIENTS: os.getpid()}
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(order.host, order.port)) for _ in range(order.streams)]
        reset_peaks(order.watched)
        marks = Marks(pids)
        gc.disable()
        answers = _exchange(order, connections, marks, stack.enter_context(credit_to(order.credit_file)))
    peaks = peak_mib(order.watched)
    streams = [read_answer(answer, order.wording) for answer in answers]
    result = summarise([stream.times for stream in streams])
    run = marks.span(Stage.STARTED, Stage.OVER, streams)
    assert run is not None
    return StreamLoadReport(
        failed=result.failed,
        errors=result.errors,
        run=run,
        steady=marks.span(Stage.ALL_BEGUN, Stage.FIRST_ENDED, streams),
        ttft_s=result.ttft_s,
        tpot_s=result.tpot_s,
        gaps_s=result.itl_s,
        peak_mib=peaks,
    )


def _exchange(
    order: StreamLoadOrder, connections: Sequence[socket.socket], marks: Marks, credit: CreditWriter | None
) -> list[RawAnswer]:
    tokens = 0
    answers: list[RawAnswer] = []
    by_number: dict[int, tuple[socket.socket, RawAnswer]] = {}
    with select.epoll(len(connections)) as poll:
        marks.set(Stage.STARTED)
        for connection in connections:
            answer = RawAnswer(time.perf_counter())
            connection.sendall(order.request)
            connection.setblocking(False)
            poll.register(connection, select.EPOLLIN)
            answers.append(answer)
            by_number[connection.fileno()] = (connection, answer)
        deadline = time.perf_counter() + order.timeout_s
        silent = len(connections)
        while by_number and (left_s := deadline - time.perf_counter()) > 0:
            for number, _ in poll.poll(min(left_s, _TELL_AGAIN_S)):
                connection, answer = by_number[number]
                data = receive(connection, _READ_BYTES)
                silent -= answer.feed(time.perf_counter(), data)
                if not silent:
                    marks.set(Stage.ALL_BEGUN)
                if answer.ended:
                    marks.set(Stage.FIRST_ENDED)
                    poll.unregister(number)
                    del by_number[number]
                elif credit is not None:
                    tokens += answer.last_words
            if credit is not None:
                credit.tell(tokens)
        marks.set(Stage.OVER)
    return answers


if __name__ == "__main__":
    sys.exit(serve_order(StreamLoadOrder, run))
