"""Measures what many nodes cost one proxy: ``python -m lab.scale --nodes 1 10 100 1000 --workers 1 --json FILE``.

The proxy is a real process, and so are the processes that play the nodes: real registration and heartbeats, sealed with
the secret. Requests are plain ones at a steady rate, which nodes answer at once. The CPU time of a request is what the
proxy used while they came, without what it uses for heartbeats alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.process_usage import cpu_s
from benchmarks.proxy.proxy_clients import ClientLoad, send_load
from lab.scale.figures import PolicyFigures, ProxyFigures, RackFigures, add_runs
from lab.scale.mock_nodes import MODEL
from pdserve.config import RoutingPolicy
from pdserve.process import PARENT_PID_ENV, free_port
from tests.eventually import eventually
from tests.processes import SECRET, Process, clean_environ, pdserve, running

PLAY = (sys.executable, "-m", "lab.scale.mock_nodes")
PLAYERS = 4
"""So many processes share the nodes. One of them is a rack: it is killed."""
CONNECTIONS = 8
PATIENCE_S = 60.0
LOOK_S = 0.1
ASKED = 20
"""Each page is asked for so many times."""


class Proxy:
    """A running proxy."""

    def __init__(self, process: Process, port: int) -> None:
        self._pid = process.pid
        self._host, self._port = "127.0.0.1", port
        eventually(self._answers, "the proxy takes connections")

    def cpu_s(self) -> float:
        return sum(cpu_s({str(pid): pid for pid in self._pids()}).values())

    def rss_mib(self) -> float:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._pids())
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def get(self, path: str) -> bytes:
        connection = HTTPConnection(self._host, self._port, timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, body
            return body
        finally:
            connection.close()

    def nodes(self) -> int:
        return sum(json.loads(self.get("/server_info"))["nodes"].values())

    def wait_for(self, count: int) -> float:
        """Waits until the proxy knows so many nodes, and returns how long that took."""
        began = time.monotonic()
        while self.nodes() != count:
            if time.monotonic() - began > PATIENCE_S:
                raise AssertionError(f"the proxy knows {self.nodes()} nodes after {PATIENCE_S:g} s, and not {count}")
            time.sleep(LOOK_S)  # each look costs the proxy something
        return time.monotonic() - began

    def send(self, rate: float, seconds: float, connections: Sequence[socket.socket]) -> list[tuple[float, str]]:
        """Returns the latency and the error, if any, of each request."""
        body = json.dumps({"model": MODEL, "prompt": "word " * 400, "max_tokens": 1}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
        load = ClientLoad(request, 0, seconds, rate, once=False, timeout_s=seconds + 30)
        return [(answer.ended_s - answer.due_s, answer.error) for answer in send_load(connections, load)]

    @contextmanager
    def connections(self) -> Iterator[list[socket.socket]]:
        with ExitStack() as open_ones:
            yield [
                open_ones.enter_context(socket.create_connection((self._host, self._port))) for _ in range(CONNECTIONS)
            ]

    def _answers(self) -> bool:
        try:
            return bool(self.get("/live"))
        except OSError:
            return False

    def _pids(self) -> list[int]:
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        return [self._pid, *map(int, children)]


@contextmanager
def proxy(port: int, control: int, workers: int, policy: RoutingPolicy) -> Iterator[Proxy]:
    """Runs a proxy, which writes no line of log for a request."""
    flags = ["--port", str(port), "--control-port", str(control), "--workers", str(workers)]
    more = ["--policy", policy.value, "--heartbeat-ms", "1000", "--log-level", "error", "--status-page", "on"]
    with pdserve("proxy", *flags, *more) as process:
        yield Proxy(process, port)


@contextmanager
def players(control: str, nodes: int) -> Iterator[list[Process]]:
    """Runs the processes that play the nodes."""
    own = clean_environ(**{"PDSERVE_SECRET": SECRET, PARENT_PID_ENV: str(os.getpid())})
    count = min(PLAYERS, nodes)
    firsts = [nodes * player // count for player in range(count + 1)]
    with ExitStack() as started:
        yield [
            started.enter_context(
                running(
                    [*PLAY, control, str(first), str(end - first), str(nodes)],
                    own,
                )
            )
            for first, end in itertools.pairwise(firsts)
        ]


def measure_policy(at: Proxy, policy: RoutingPolicy, idle: float, rate: float, seconds: float) -> PolicyFigures:
    with at.connections() as connections:
        at.send(rate, 1.0, connections)  # opens the connections to nodes
        before, began = at.cpu_s(), time.monotonic()
        replies = at.send(rate, seconds, connections)
        used, took_s = at.cpu_s() - before, time.monotonic() - began
    latencies = [latency for latency, error in replies if not error]
    return PolicyFigures(
        policy=policy.value,
        request_us=(used - idle * took_s) / len(replies) * 1e6,
        p50_ms=statistics.median(latencies) * 1e3,
        p99_ms=percentile(latencies, 0.99) * 1e3,
        failed=len(replies) - len(latencies),
    )


def measure_pages(at: Proxy, idle: float) -> dict[str, float]:
    used: dict[str, float] = {}
    for page in ("/instances", "/metrics", "/status"):
        before, began = at.cpu_s(), time.monotonic()
        for _ in range(ASKED):
            at.get(page)
        used[page] = (at.cpu_s() - before - idle * (time.monotonic() - began)) / ASKED * 1e3
    return used


def measure_rack(at: Proxy, rack: Process, left: int) -> RackFigures:
    with at.connections() as connections:
        rack.popen.kill()
        killed_s = time.monotonic()
        replies: list[tuple[float, str]] = []
        known_s = 0.0
        while not known_s:
            if time.monotonic() > killed_s + PATIENCE_S:
                raise TimeoutError(f"the proxy has {at.nodes()} nodes {PATIENCE_S:g} s after the loss, not {left}")
            replies += at.send(100, 0.2, connections)
            if at.nodes() == left:
                known_s = time.monotonic() - killed_s
        replies += at.send(100, 1.0, connections)
    latencies = [latency for latency, error in replies if not error]
    return RackFigures(known_s, percentile(latencies, 0.99) * 1e3, len(replies) - len(latencies))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def idle_share(at: Proxy, seconds: float) -> float:
    before, began = at.cpu_s(), time.monotonic()
    time.sleep(seconds)
    return (at.cpu_s() - before) / (time.monotonic() - began)


def measure(nodes: int, workers: int, rate: float, seconds: float) -> ProxyFigures:
    """Measures with so many nodes. The proxy is started again with each policy, and the nodes find it again."""
    first, *others = RoutingPolicy
    policies: list[PolicyFigures] = []
    port, control = free_port(), free_port()
    with ExitStack() as playing:
        with proxy(port, control, workers, first) as at:
            began = time.monotonic()
            played = playing.enter_context(players(f"tcp://127.0.0.1:{control}", nodes))
            at.wait_for(nodes)
            registration_s = time.monotonic() - began
            idle = idle_share(at, seconds)
            rss_mib, pages_ms = at.rss_mib(), measure_pages(at, idle)
            policies.append(measure_policy(at, first, idle, rate, seconds))
        restarts: list[tuple[float, float]] = []
        rack = None
        for policy in others:
            with proxy(port, control, workers, policy) as at:
                before = at.cpu_s()
                restarts.append((at.wait_for(nodes), at.cpu_s() - before))
                policies.append(measure_policy(at, policy, idle_share(at, seconds), rate, seconds))
                if policy is others[-1] and nodes >= PLAYERS:
                    last = nodes - nodes * (PLAYERS - 1) // PLAYERS
                    rack = measure_rack(at, played[-1], nodes - last)
    restart_s, restart_cpu_s = (statistics.median(figures) for figures in zip(*restarts, strict=True))
    return ProxyFigures(
        nodes, workers, registration_s, restart_s, restart_cpu_s, idle * 100, rss_mib, pages_ms, policies, rack
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.scale", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rate", type=float, default=200.0, help="plain requests a second")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the runs to this file, or replace them there")
    asked = parser.parse_args()
    found = []
    for nodes in asked.nodes:
        figures = measure(nodes, asked.workers, asked.rate, asked.seconds)
        print(json.dumps(asdict(figures)), flush=True)
        found.append(figures)
    if asked.json is not None:
        add_runs(asked.json, found)


if __name__ == "__main__":
    main()
