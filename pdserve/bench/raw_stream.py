"""Clients that cost next to nothing: sockets polled and read as they are, a stream's chunks counted, not parsed.

A closed loop (each client sends again as soon as it is answered) or an open one (requests at set times, whichever
client is free; a request that has to wait for a client is late, and its wait counts). Backends write whole events, each
in an HTTP chunk of its own, and neither pdserve's proxy nor vllm-router takes one apart: an event's first bytes are
found where it begins.
"""

from __future__ import annotations

import heapq
import re
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

CHUNK_MARK = b"data: {"

_STREAM_END = b"0\r\n\r\n"
_READ_BYTES = 2**18
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SHOWN = 200


@dataclass(slots=True)
class Reply:
    """One answer. Times are seconds of one monotonic clock."""

    due_s: float
    """When its request was to be sent."""
    ended_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Of reads that brought chunks: when, and how many."""
    error: str = ""
    """Why it is not whole."""

    @property
    def chunks(self) -> int:
        return sum(count for _, count in self.arrivals)


class RawClient:
    """One kept connection, one request on it at a time. Sans I/O but for its socket's number."""

    __slots__ = ("_expected", "_size", "_tail", "_whole_bytes", "connection", "reply")

    def __init__(self, connection: socket.socket, expected_chunks: int) -> None:
        """``expected_chunks`` of a stream; 0 for an answer in one piece."""
        self.connection = connection
        self._expected = expected_chunks
        self.reply: Reply | None = None

    def begin(self, reply: Reply) -> None:
        self.reply = reply
        self._tail = b""
        self._size = 0
        self._whole_bytes = 0

    def feed(self, now: float, data: bytes) -> bool:
        """Takes what came at ``now``, nothing for the end of the connection. Returns whether the answer is over."""
        reply = self.reply
        assert reply is not None
        if not data:
            reply.error = "the connection ended within the answer"
        elif not self._size and not data.startswith(b"HTTP/1.1 200 "):
            reply.error = data[:_SHOWN].decode("latin-1")
        elif not self._take(reply, now, data):
            return False
        reply.ended_s = now
        if self._expected and not reply.error and reply.chunks != self._expected:
            reply.error = f"{reply.chunks} chunks came where {self._expected} were sent"
        return True

    def _take(self, reply: Reply, now: float, data: bytes) -> bool:
        self._size += len(data)
        if not self._expected:
            return self._take_whole(data)
        seen = self._tail + data
        # Of a mark that lies across two reads, the tail has less than all.
        count = seen.count(CHUNK_MARK)
        if count:
            reply.arrivals.append((now, count))
        self._tail = seen[1 - len(CHUNK_MARK) :]
        return seen.endswith(_STREAM_END)

    def _take_whole(self, data: bytes) -> bool:
        if not self._whole_bytes:
            self._tail += data
            end = self._tail.find(b"\r\n\r\n")
            if end < 0:
                return False
            length = _LENGTH.search(self._tail, 0, end)
            self._whole_bytes = end + 4 + (int(length[1]) if length else 0)
        return self._size >= self._whole_bytes


def connect(host: str, port: int, count: int, timeout_s: float) -> list[socket.socket]:
    """Open connections. Raises OSError."""
    return [socket.create_connection((host, port), timeout_s) for _ in range(count)]


class Load(msgspec.Struct, frozen=True):
    """What clients send, and for how long."""

    request: bytes
    """As it goes over the wire."""
    chunks: int
    """That each answer has; 0 if it comes in one piece."""
    seconds: float
    """In which requests begin; those under way are waited for."""
    rate: float
    """Requests a second, at set times; 0 for a closed loop."""
    once: bool
    """Each client sends one request, all at once."""
    timeout_s: float


def send_load(connections: Sequence[socket.socket], load: Load) -> list[Reply]:
    """Every reply, also those that never came whole. Raises OSError if a request cannot be sent."""
    clients = {connection.fileno(): RawClient(connection, load.chunks) for connection in connections}
    idle = deque(clients.values())
    replies: list[Reply] = []
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
                client, reply = idle.popleft(), Reply(heapq.heappop(schedule))
                replies.append(reply)
                client.begin(reply)
                client.connection.sendall(load.request)
                under_way += 1
            if not under_way and not schedule:
                break
            until = min(limit, schedule[0]) if schedule and idle else limit
            for number, _ in poll.poll(max(0.0, until - time.perf_counter())):
                client = clients[number]
                data = _read(client.connection)
                now = time.perf_counter()
                if client.reply is None:
                    poll.unregister(number)  # an idle connection that ended
                elif client.feed(now, data):
                    client.reply = None
                    under_way -= 1
                    if data:
                        idle.append(client)
                        if not load.rate and not load.once and now < start + load.seconds:
                            heapq.heappush(schedule, now)
                    else:
                        poll.unregister(number)
    for client in clients.values():
        if client.reply is not None:
            client.reply.error = f"not over after {load.timeout_s:g} s"
    return replies


def _schedule(load: Load, start: float, clients: int) -> list[float]:
    """When the first request of each client is due, or every request of an open loop."""
    if load.rate:
        return [start + index / load.rate for index in range(int(load.rate * load.seconds))]
    return [start] * clients


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_READ_BYTES)
    except ConnectionError:
        return b""
