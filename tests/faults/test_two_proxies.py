"""One of two proxies is killed under load: new requests go through the other, and answers with a key go on."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster.nodes import MODEL, Cluster, Node, cluster, sample
from tests.eventually import eventually
from tests.faults.test_failover import FLAGS, TEXT, Answer, engine_pids, read_answer, read_whole
from tests.processes import Process, pdserve

PATIENCE_S = 120.0
COMMON: Mapping[str, object] = {"model": MODEL, "prompt": TEXT, "ignore_eos": True}
LONG: Mapping[str, object] = {**COMMON, "max_tokens": 300}
BODIES: dict[str, Mapping[str, object]] = {
    **{f"stream {seed}": {**LONG, "stream": True, "seed": seed} for seed in range(31, 35)},
    "several": {**LONG, "stream": True, "seed": 36, "n": 2, "stream_options": {"include_usage": True}},
    "whole": {**LONG, "seed": 37},
}


@dataclass
class Resuming:
    """A client of several proxies that asks the next one for what it lacks when it loses one."""

    urls: Sequence[str]
    name: str
    body: Mapping[str, object]
    keyed: bool = True
    events: list[bytes] = field(default_factory=list)
    """The events of a stream without their ids, or the whole answer."""
    ids: list[str] = field(default_factory=list)
    tries: int = 0
    failure: str = ""
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for url in itertools.islice(itertools.cycle(self.urls), 20):
            self.tries += 1
            try:
                self._ask(url)
            except (OSError, http.client.HTTPException):
                continue
            return
        self.failure = "no proxy answered"

    def _ask(self, url: str) -> None:
        headers = {"content-type": "application/json"}
        if self.keyed:
            # A stream's client has no key of its own: the ids of events are enough.
            headers |= {"last-event-id": self.ids[-1] if self.ids else ""} if self.body.get("stream") else {}
            headers |= {} if self.body.get("stream") else {"idempotency-key": self.name}
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self.body), headers)
            response = connection.getresponse()
            if response.status != 200:
                self.failure = f"{response.status} {response.read().decode()}"
            elif not self.body.get("stream"):
                self.events = [response.read()]
            else:
                self._read_events(response)
        finally:
            connection.close()

    def _read_events(self, response: http.client.HTTPResponse) -> None:
        while not self.events or b"[DONE]" not in self.events[-1]:
            lines = []
            while (line := response.readline()) != b"\n":
                if not line.endswith(b"\n"):
                    raise http.client.IncompleteRead(line)
                lines.append(line)
            ids = [line[4:-1].decode() for line in lines if line.startswith(b"id: ")]
            if len(ids) != int(self.keyed):
                self.failure = f"an event with the ids {ids}: {lines}"
                return
            self.ids += ids
            self.events.append(b"".join(line for line in lines if not line.startswith(b"id: ")) + b"\n")

    def answer(self) -> Answer:
        """Waits for the whole answer, and returns what it adds up to."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), f"{self.name} is not over"
        assert not self.failure, f"{self.name} at try {self.tries}, behind {len(self.ids)} events: {self.failure}"
        received = b"".join(self.events)
        if not self.body.get("stream"):
            return read_whole(received)
        numbers = [int(event_id.rpartition(".")[2]) for event_id in self.ids]
        assert numbers == list(range(1, len(numbers) + 1)), "every event came once, in its order"
        return read_answer(received)


@dataclass(frozen=True)
class TwoProxies:
    cluster: Cluster
    second: Process

    @property
    def urls(self) -> list[str]:
        return [self.cluster.url, self.second.listening().url]


@pytest.fixture
def two(slow_tiny_model: Path) -> Iterator[TwoProxies]:
    with ExitStack() as stack:
        second = stack.enter_context(pdserve("proxy", "--port", "0", "--control-port", "0"))
        port = second.listening().control.rpartition(":")[2]
        # The nodes find the second proxy by a name. Each has places for all answers with a key, for a while without
        # readers, of whom one client may have a quarter.
        flags = (*FLAGS, "--max-num-seqs", "32", "--proxy", f"tcp://localhost:{port}")
        running = stack.enter_context(cluster(slow_tiny_model, *flags, decode=2))
        made = TwoProxies(running, second)
        eventually(lambda: all(sample(url, "proxy_live_proxies") == 2 for url in made.urls), "proxies that are counted")
        yield made


@pytest.mark.nightly
def test_a_killed_proxy_costs_no_request_and_no_answer_with_a_key(two: TwoProxies) -> None:
    """In every run, a cell of ``tests/faults/matrix`` kills the proxy of a stream, whose client asks the other one."""
    second = two.urls[1]
    before = {name: Resuming([second], f"unbroken {name}", body) for name, body in BODIES.items()}
    unbroken = {name: client.answer() for name, client in before.items()}
    stop, load = threading.Event(), list[Resuming]()

    def send_load() -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            body = {**COMMON, "max_tokens": 4, "seed": turn}
            load.append(Resuming(two.urls if turn % 2 else two.urls[::-1], "load", body, keyed=False))
            load[-1].thread.join()

    loading = threading.Thread(target=send_load, daemon=True)
    loading.start()
    clients = {name: Resuming(two.urls, name, body) for name, body in BODIES.items()}
    streams = {name: client for name, client in clients.items() if client.body.get("stream")}
    eventually(lambda: all(len(client.events) > 8 for client in streams.values()), "streams under way")
    os.killpg(two.cluster.proxy.pid, signal.SIGKILL)
    eventually(lambda: all(client.tries == 2 for client in clients.values()), "clients at the other proxy")
    seen = {name: len(client.events) for name, client in streams.items()}
    # Nodes go on while clients look for the other proxy, so a stream may have few tokens left then.
    eventually(lambda: all(goes_on(client, seen[name]) for name, client in streams.items()), "they go on")
    assert any(client.thread.is_alive() for client in streams.values())
    assert sum(node.metric("replayed_answers_total") for node in two.cluster.decode) >= len(streams)
    # What the second proxy has of the answers is enough for another node to go on with them.
    kill(max(two.cluster.decode, key=lambda node: node.metric("num_requests_running")))
    for name, client in clients.items():
        client.answer().like(unbroken[name])
        assert client.tries == 2, f"{name}: nothing was lost but the first proxy"
    eventually(lambda: sample(second, "proxy_live_proxies") == 1, "the second proxy knowing that it is alone")
    finished = len(load)
    eventually(lambda: len(load) > finished + 3, "requests behind all that")
    stop.set()
    loading.join(PATIENCE_S)
    assert not [client.failure for client in load if client.failure]
    assert max(client.tries for client in load) <= 2
    assert sample(second, "proxy_resumes_total", outcome="resumed") > 0


def goes_on(client: Resuming, seen: int) -> bool:
    return len(client.events) > seen + 8 or not client.thread.is_alive()


def kill(node: Node) -> None:
    for pid in (*engine_pids(node.process.pid), node.process.pid):
        os.kill(pid, signal.SIGKILL)
