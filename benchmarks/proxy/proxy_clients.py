"""The clients of ``benchmarks proxy``, which cost next to nothing.

They poll their sockets and do not parse what they read; they only count a stream's chunks.

The loop is closed (each client sends again as soon as it is answered) or open (requests are sent at set times by any
free client; a request that has to wait for a client is late, and its wait counts). Backends write complete events, each
in an HTTP chunk of its own, and neither pdserve's proxy nor vllm-router splits one: an event's first bytes are found
where it begins.

The clients run in a process of their own: ``python -m benchmarks.proxy.proxy_clients``, with an order on stdin.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import re
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from benchmarks.client_process import connect, receive, serve_order
from benchmarks.process_usage import cpu_s, peak_mib, reset_peaks
from pdserve.bench.streamed_answer import Distribution, distribution
from pdserve.process import allow_open_files

CHUNK_MARK = b"data: {"

_STREAM_END = b"0\r\n\r\n"
_READ_BYTES = 2**18
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SHOWN = 200


@dataclass(slots=True)
class CountedAnswer:
    """The chunks of one answer, counted as they come. Times are seconds of one monotonic clock."""

    due_s: float
    """The time at which its request was due."""
    ended_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """The time of each read that brought chunks, and the number of chunks."""
    error: str = ""
    """Why the answer is not complete; empty if it is."""

    @property
    def chunks(self) -> int:
        return sum(count for _, count in self.arrivals)


class RawClient:
    """A connection that stays open, with one request on it at a time. It does no I/O, but knows its socket's number."""

    __slots__ = ("_expected", "_size", "_tail", "_wanted_bytes", "answer", "connection")

    def __init__(self, connection: socket.socket, expected_chunks: int) -> None:
        """``expected_chunks`` is the number of chunks of a stream; 0 for an answer in one piece."""
        self.connection = connection
        self._expected = expected_chunks
        self.answer: CountedAnswer | None = None

    def begin(self, answer: CountedAnswer) -> None:
        self.answer = answer
        self._tail = b""
        self._size = 0
        self._wanted_bytes = 0

    def feed(self, now: float, data: bytes) -> bool:
        """Takes what a read at ``now`` brought, nothing at the connection's end. Returns whether the answer is over."""
        answer = self.answer
        assert answer is not None
        if not data:
            answer.error = "the connection ended within the answer"
        elif not self._size and not data.startswith(b"HTTP/1.1 200 "):
            answer.error = data[:_SHOWN].decode("latin-1")
        elif not self._take(answer, now, data):
            return False
        answer.ended_s = now
        if self._expected and not answer.error and answer.chunks != self._expected:
            answer.error = f"{answer.chunks} chunks came where {self._expected} were sent"
        return True

    def _take(self, answer: CountedAnswer, now: float, data: bytes) -> bool:
        self._size += len(data)
        if not self._expected:
            return self._take_plain(data)
        found = self._tail + data
        # The tail is shorter than a mark, so that a mark that lies across two reads is counted once.
        count = found.count(CHUNK_MARK)
        if count:
            answer.arrivals.append((now, count))
        self._tail = found[1 - len(CHUNK_MARK) :]
        return found.endswith(_STREAM_END)

    def _take_plain(self, data: bytes) -> bool:
        if not self._wanted_bytes:
            self._tail += data
            end = self._tail.find(b"\r\n\r\n")
            if end < 0:
                return False
            length = _LENGTH.search(self._tail, 0, end)
            self._wanted_bytes = end + 4 + (int(length[1]) if length else 0)
        return self._size >= self._wanted_bytes


class ClientLoad(msgspec.Struct, frozen=True):
    """The requests that the clients send, and for how long."""

    request: bytes
    """The bytes of the request as they go over the wire."""
    chunks: int
    """The number of chunks of each answer; 0 if an answer comes in one piece."""
    seconds: float
    """The time in which requests begin. Requests under way at its end are finished."""
    rate: float
    """The requests a second, at set times; 0 for a closed loop."""
    once: bool
    """Whether each client sends one request, all at once."""
    timeout_s: float


def send_load(connections: Sequence[socket.socket], load: ClientLoad) -> list[CountedAnswer]:
    """Returns every answer, including incomplete ones. Raises OSError if a request cannot be sent."""
    clients = {connection.fileno(): RawClient(connection, load.chunks) for connection in connections}
    idle = deque(clients.values())
    answers: list[CountedAnswer] = []
    with select.epoll(len(clients)) as poll:
        for number, client in clients.items():
            client.connection.setblocking(False)
            poll.register(number, select.EPOLLIN)
        start = time.perf_counter()
        schedule = _schedule(load, start, len(clients))
        limit = start + load.timeout_s
        under_way = 0
        while (now := time.perf_counter()) < limit:
            while idle and schedule and schedule[0] <= now:
                client, answer = idle.popleft(), CountedAnswer(heapq.heappop(schedule))
                answers.append(answer)
                client.begin(answer)
                client.connection.sendall(load.request)
                under_way += 1
            if not under_way and not schedule:
                break
            until = min(limit, schedule[0]) if schedule and idle else limit
            for number, _ in poll.poll(max(0.0, until - time.perf_counter())):
                client = clients[number]
                data = receive(client.connection, _READ_BYTES)
                now = time.perf_counter()
                if client.answer is None:
                    poll.unregister(number)  # an idle connection ended
                elif client.feed(now, data):
                    client.answer = None
                    under_way -= 1
                    if data:
                        idle.append(client)
                        if not load.rate and not load.once and now < start + load.seconds:
                            heapq.heappush(schedule, now)
                    else:
                        poll.unregister(number)
    for client in clients.values():
        if client.answer is not None:
            client.answer.error = f"not over after {load.timeout_s:g} s"
    return answers


def _schedule(load: ClientLoad, start: float, clients: int) -> list[float]:
    """Returns the time of each client's first request, or of every request of an open loop."""
    if load.rate:
        return [start + index / load.rate for index in range(int(load.rate * load.seconds))]
    return [start] * clients


_SHOWN_ERRORS = 5
_LIVE = b"GET /live HTTP/1.1\r\nhost: bench\r\n\r\n"


class ProxyLoadOrder(msgspec.Struct, frozen=True):
    """The order that the client process reads."""

    host: str
    port: int
    connections: int
    load: ClientLoad
    watched: dict[str, int]
    """The ids, by name, of the processes whose CPU time is measured."""
    idle: int = 0
    """The number of connections that have made one request before and make none during the run."""
    warm_up: ClientLoad | None = None


class ProxyLoadReport(msgspec.Struct, frozen=True):
    """The report that the client process writes."""

    answered: int
    failed: int
    errors: tuple[str, ...]
    """The first few different errors, each once."""
    chunks: int
    seconds: float
    """The time from the first request to the last answer's end."""
    first_s: Distribution
    """The times from when a request was due to its first chunk."""
    latency_s: Distribution
    """The times from when a request was due to its answer's end."""
    gaps_s: Distribution
    """The times between chunks of one stream."""
    cpu_s: dict[str, float]
    memory_mib: dict[str, float]
    """The memory of each process by which the idle connections raised its peak."""


def run(order: ProxyLoadOrder) -> ProxyLoadReport:
    """Carries out the order. Raises BenchError if a watched process is gone, or too few files may be open; OSError if
    the server takes too few connections.
    """
    allow_open_files(order.connections + order.idle)
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(order.host, order.port)) for _ in range(order.connections)]
        gc.disable()
        if order.warm_up is not None:
            send_load(connections, order.warm_up)
        reset_peaks(order.watched)
        before_mib = peak_mib(order.watched)
        for _ in range(order.idle):
            connection = stack.enter_context(connect(order.host, order.port))
            connection.sendall(_LIVE)
            connection.recv(4096)
        after_mib = peak_mib(order.watched)
        before_s = cpu_s(order.watched)
        answers = send_load(connections, order.load)
        after_s = cpu_s(order.watched)
    return _report(
        answers,
        {name: after_s[name] - before_s[name] for name in order.watched},
        {name: after_mib[name] - before_mib[name] for name in order.watched},
    )


def _report(
    answers: Sequence[CountedAnswer], used_s: dict[str, float], memory_mib: dict[str, float]
) -> ProxyLoadReport:
    good = [answer for answer in answers if not answer.error]
    errors = dict.fromkeys(answer.error for answer in answers if answer.error)
    return ProxyLoadReport(
        answered=len(good),
        failed=len(answers) - len(good),
        errors=tuple(itertools.islice(errors, _SHOWN_ERRORS)),
        chunks=sum(answer.chunks for answer in good),
        seconds=max((one.ended_s for one in good), default=0.0) - min((one.due_s for one in good), default=0.0),
        first_s=distribution([answer.arrivals[0][0] - answer.due_s for answer in good if answer.arrivals]),
        latency_s=distribution([answer.ended_s - answer.due_s for answer in good]),
        gaps_s=distribution([gap for answer in good for gap in _gaps_s(answer)]),
        cpu_s=used_s,
        memory_mib=memory_mib,
    )


def _gaps_s(answer: CountedAnswer) -> list[float]:
    """Returns the gaps between the answer's chunks. Chunks that came in one read are 0 apart."""
    times = [now for now, count in answer.arrivals for _ in range(count)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


if __name__ == "__main__":
    sys.exit(serve_order(ProxyLoadOrder, run))
