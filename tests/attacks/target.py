"""The cluster under attack, and the checks that it is unharmed: answers, health, memory, descriptors, threads."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.attacks.client import ANSWER_S
from tests.cluster.nodes import MODEL, Cluster, Node, cluster, http
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid
from tests.processes import Process

FLAGS = (
    *("--dtype", "fp32", "--kv-cache-mib", "16"),
    # An attacker comes over the network, so blocks must move over it too.
    *("--ucx-tls", "tcp"),
)
CONTEXT = 1024
"""The context of the tiny model. It is long enough for all requests, and so short that a token costs almost nothing."""
PROMPT = [11 + i % 400 for i in range(70)]
"""The prompt has more than one block, so it is prefilled remotely."""
NEW_TOKENS = 4
PATIENCE_S = 2 * ANSWER_S
"""The seconds that the client waits for the ordinary request. More than ``ANSWER_S`` counts as a failure."""
HEALTH_GAP_S = 5.0
"""The seconds that ``/health`` may take on a busy machine with two cores. An event loop that hangs takes far longer."""
MEMORY_MIB = 64
"""The memory by which a process may have grown after a group. Bodies have up to 9 MiB, and malloc keeps some."""
WASTE_S = 60.0
"""The seconds that failed attacks may take altogether. Further ones would show nothing new."""
ATTACKS_A_CHECK = 10
"""After so many short attacks the ordinary request is sent once."""
SPARE = 12
"""The descriptors and threads that a process may keep for later requests, in its pools of connections and threads."""


@dataclass(frozen=True)
class Footprint:
    """The memory, descriptors and threads of one process."""

    rss_mib: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        process = Path("/proc", str(pid))
        pages = int((process / "statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
            len(list((process / "fd").iterdir())),
            len(list((process / "task").iterdir())),
        )

    def no_more_than(self, before: Footprint) -> bool:
        return (
            self.rss_mib <= before.rss_mib + MEMORY_MIB
            and self.descriptors <= before.descriptors + SPARE
            and self.threads <= before.threads + SPARE
        )


class HealthWatch:
    """Asks one server for ``/health`` again and again, each time over a new connection, as a load balancer does."""

    PAUSE_S = 0.5

    def __init__(self, url: str) -> None:
        self.longest_s = 0.0
        self.failures: list[str] = []
        self.answers = 0
        self._netloc = urlsplit(url).netloc
        self._asked_at: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"health of {url}")
        self._thread.start()

    def gap_s(self) -> float:
        """Returns the longest time that an answer has taken, including the one that is awaited now."""
        asked_at = self._asked_at
        waiting_s = 0.0 if asked_at is None else time.monotonic() - asked_at
        return max(self.longest_s, waiting_s)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self.PAUSE_S):
            self._asked_at = time.monotonic()
            try:
                self._ask()
            except (OSError, HTTPException) as exc:
                self.failures.append(repr(exc))
            self.longest_s = max(self.longest_s, time.monotonic() - self._asked_at)
            self._asked_at = None

    def _ask(self) -> None:
        connection = HTTPConnection(self._netloc, timeout=4 * HEALTH_GAP_S)
        try:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
        finally:
            connection.close()
        self.answers += 1
        if answer.status != 200:
            self.failures.append(f"status {answer.status}")


class Target:
    """A proxy, a prefill node and a decode node, with the answer to the ordinary request."""

    def __init__(self, running: Cluster, watches: Mapping[str, HealthWatch]) -> None:
        self.cluster = running
        self.watches = watches
        (self.prefill,) = running.prefill
        (self.decode,) = running.decode
        self.wasted_s = 0.0
        """The seconds that failed attacks have taken."""
        self._salts = count()
        self._attacks = count(1)
        self._instances: dict[str, dict[str, Any]] = {}
        # Until the engines have made their handshake, the decode node computes prompts itself.
        eventually(self._asked_remotely, "a prompt goes to the prefill node")
        self.tokens = self.ask()

    def check_worth_attacking(self) -> None:
        """Raises AssertionError if a process of this cluster has ended, or if failed attacks have taken too long."""
        ended = [" ".join(process.argv[4:7]) for process in self._started if process.popen.poll() is not None]
        assert not ended, f"not tried: ended before: {ended}"
        assert self.wasted_s < WASTE_S, f"not tried: attacks before it have failed for {self.wasted_s:.0f} s"

    @property
    def _started(self) -> list[Process]:
        return [self.cluster.proxy, *(node.process for node in self.cluster.nodes)]

    @property
    def processes(self) -> dict[str, int]:
        """Returns the process ids of all processes that an attack could harm."""
        pids = {"proxy": self.cluster.proxy.pid}
        for node in self.cluster.nodes:
            pids |= {node.name: node.process.pid, f"engine of {node.name}": engine_pid(node)}
        return pids

    def instance(self, node: Node) -> dict[str, Any]:
        """Returns a node as the proxy has described it first: no node is started anew."""
        if node.name not in self._instances:
            known: list[dict[str, Any]] = http(self.cluster.url + "/instances").json()
            self._instances = {instance["name"]: instance for instance in known}
        return self._instances[node.name]

    def salt(self) -> dict[str, object]:
        """Returns a salt that no other request has, so that no prefix cache has the request's blocks."""
        return {"cache_salt": f"salt {next(self._salts)}"}

    def ordinary(self, **more: object) -> dict[str, object]:
        """Returns the body of the ordinary request. Its prompt has to be computed and transferred each time."""
        return {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **self.salt(),
            **more,
        }

    def _asked_remotely(self) -> bool:
        self._complete()
        return self.remote_prefills() > 0

    def _complete(self) -> bytes:
        """Returns the answer to the ordinary request, which must come."""
        return http(self.cluster.url + "/v1/completions", self.ordinary(), timeout_s=PATIENCE_S).body

    def ask(self) -> list[int]:
        """Sends the ordinary request, checks that it was prefilled remotely, and returns its tokens."""
        before = self.remote_prefills()
        tokens: list[int] = self.answer_tokens(self._complete())
        eventually(lambda: self.remote_prefills() > before, "the ordinary request was prefilled remotely")
        return tokens

    def answer_tokens(self, body: bytes) -> list[int]:
        answer = json.loads(body)
        assert "choices" in answer, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    def remote_prefills(self) -> float:
        return self.decode.metric("prefills_total", source="remote")

    def lost_prefills(self) -> float:
        """Returns how many prompts a prefill node was asked for and the decode node then computed itself."""
        return self.decode.metric("prefills_total", source="fallback")

    def attack_is_over(self) -> bool:
        """Checks after a short attack that every process answers in time, and sometimes that it answers as before.

        Returns whether it was one of the latter checks. It answers for all attacks since the one before it, and
        ``unharmed`` for the last attacks of a module.
        """
        if next(self._attacks) % ATTACKS_A_CHECK:
            self._check_health()
            return False
        self.check_answers()
        return True

    def check_answers(self) -> None:
        """Checks that every process still answers other clients as before."""
        self._check_health()
        asked_at = time.monotonic()
        body = self._complete()
        took_s = time.monotonic() - asked_at
        assert self.answer_tokens(body) == self.tokens
        assert took_s < ANSWER_S, f"the ordinary request took {took_s:.1f} s"

    def _check_health(self) -> None:
        for name, watch in self.watches.items():
            gap_s = watch.gap_s()
            assert gap_s < HEALTH_GAP_S, f"/health of {name} took {gap_s:.1f} s"
            assert not watch.failures, f"/health of {name}: {watch.failures}"

    def footprints(self) -> dict[str, Footprint]:
        return {name: Footprint.of(pid) for name, pid in self.processes.items()}

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Checks that a group of attacks leaves everything as it was before."""
        processes, before = self.processes, self.footprints()
        answered = {name: watch.answers for name, watch in self.watches.items()}
        yield
        self.check_worth_attacking()
        assert self.processes == processes, "a process was started anew"
        self.cluster.until_idle()
        assert self.ask() == self.tokens

        def released() -> bool:
            return all(now.no_more_than(before[name]) for name, now in self.footprints().items())

        try:
            eventually(released, "", 30.0)
        except AssertionError:
            now = self.footprints()
            grown = {name: (before[name], now[name]) for name in now if not now[name].no_more_than(before[name])}
            raise AssertionError(f"hold more than before: {grown}") from None
        eventually(
            lambda: all(watch.answers > answered[name] for name, watch in self.watches.items()),
            "every process answers /health",
        )


@contextmanager
def target(model: Path) -> Iterator[Target]:
    with cluster(model, *FLAGS) as running:
        urls = {"proxy": running.url, **{node.name: node.url for node in running.nodes}}
        watches = {name: HealthWatch(url) for name, url in urls.items()}
        try:
            yield Target(running, watches)
        finally:
            for watch in watches.values():
                watch.stop()
