"""The clients of ``pdserve bench proxy``, as a process: ``python -m pdserve.bench.proxy_load``, its order on stdin."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from pdserve.bench.client_process import serve_order
from pdserve.bench.distribution import Distribution, distribution
from pdserve.bench.open_files import allow_open_files
from pdserve.bench.process_usage import cpu_s, peak_mib, reset_peaks
from pdserve.bench.raw_stream import Load, Reply, connect, send_load

_CONNECT_TIMEOUT_S = 30.0
_SHOWN_ERRORS = 5
_LIVE = b"GET /live HTTP/1.1\r\nhost: bench\r\n\r\n"


class LoadOrder(msgspec.Struct, frozen=True):
    """What to do."""

    host: str
    port: int
    connections: int
    load: Load
    watched: dict[str, int]
    """Process ids by name, of those whose CPU time is wanted."""
    idle: int = 0
    """Connections that have made one request before and make none meanwhile."""
    warm_up: Load | None = None


class LoadReport(msgspec.Struct, frozen=True):
    """What came of it."""

    answered: int
    failed: int
    errors: tuple[str, ...]
    """Each different one once, the first few."""
    chunks: int
    seconds: float
    """From the first request to the last answer's end."""
    first_s: Distribution
    """From when a request was due to its first chunk."""
    latency_s: Distribution
    """From when a request was due to its answer's end."""
    gaps_s: Distribution
    """Between chunks of one stream."""
    cpu_s: dict[str, float]
    memory_mib: dict[str, float]
    """Of each process, by which the idle connections made its peak rise."""


def run(order: LoadOrder) -> LoadReport:
    """Raises BenchError if a watched process is gone, or too few files may be open; OSError if the server takes too few
    connections.
    """
    allow_open_files(order.connections + order.idle)
    with ExitStack() as stack:
        connections = connect(order.host, order.port, order.connections, _CONNECT_TIMEOUT_S)
        for connection in connections:
            stack.enter_context(connection)
        gc.disable()
        if order.warm_up is not None:
            send_load(connections, order.warm_up)
        reset_peaks(order.watched)
        before_mib = peak_mib(order.watched)
        for _ in range(order.idle):
            (connection,) = connect(order.host, order.port, 1, _CONNECT_TIMEOUT_S)
            stack.enter_context(connection)
            connection.sendall(_LIVE)
            connection.recv(4096)
        after_mib = peak_mib(order.watched)
        before_s = cpu_s(order.watched)
        replies = send_load(connections, order.load)
        after_s = cpu_s(order.watched)
    return _report(
        replies,
        {name: after_s[name] - before_s[name] for name in order.watched},
        {name: after_mib[name] - before_mib[name] for name in order.watched},
    )


def _report(replies: Sequence[Reply], used_s: dict[str, float], memory_mib: dict[str, float]) -> LoadReport:
    good = [reply for reply in replies if not reply.error]
    errors = dict.fromkeys(reply.error for reply in replies if reply.error)
    return LoadReport(
        answered=len(good),
        failed=len(replies) - len(good),
        errors=tuple(itertools.islice(errors, _SHOWN_ERRORS)),
        chunks=sum(reply.chunks for reply in good),
        seconds=max((reply.ended_s for reply in good), default=0.0) - min((reply.due_s for reply in good), default=0.0),
        first_s=distribution([reply.arrivals[0][0] - reply.due_s for reply in good if reply.arrivals]),
        latency_s=distribution([reply.ended_s - reply.due_s for reply in good]),
        gaps_s=distribution([gap for reply in good for gap in _gaps_s(reply)]),
        cpu_s=used_s,
        memory_mib=memory_mib,
    )


def _gaps_s(reply: Reply) -> list[float]:
    """Chunks that came in one read are 0 apart."""
    times = [now for now, count in reply.arrivals for _ in range(count)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


if __name__ == "__main__":
    sys.exit(serve_order(LoadOrder, run))
