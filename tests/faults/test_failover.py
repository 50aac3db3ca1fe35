"""Decode nodes die or hang under running streams, and every answer goes on as if nothing had happened.

How many tokens come in one chunk depends on who is late, so answers are compared by what their chunks add up to.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import MODEL, Cluster, Node, cluster, http, one_core, start_node
from tests.eventually import eventually

# In bf16: its compiled kernels give the same bits in every batch, where rounding could decide a near tie otherwise.
FLAGS = ("--dtype", "bf16", "--max-running", "16", "--kv-cache-mib", "64")
TOKENS = 60
TEXT = "Once upon a time there was"
STREAMED: dict[str, Mapping[str, object]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 11, "temperature": 0.9, "top_p": 0.95},
    "several": {"seed": 3, "n": 2},
    "prompts": {"prompt": [TEXT, "In the beginning"], "seed": 5},
    "usage": {"seed": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "logprobs": {"seed": 4, "logprobs": 3},
    "penalties": {"seed": 6, "presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "ruled": {"seed": 7, "min_tokens": 60, "logit_bias": {"100": 2.0, "200": -100}, "bad_words": ["the"]},
    "stop strings": {"seed": 8, "stop": ["zzqx", "qqjj"], "include_stop_str_in_output": True},
    "echo": {"seed": 9, "echo": True, "return_token_ids": True},
    "few chunks": {"seed": 10, "stream_interval": 7},
}
WHOLE: Mapping[str, object] = {"seed": 12, "n": 2, "logprobs": 1}
"""A request whose answer comes in one piece."""


@dataclass
class Choice:
    """All that an answer says of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    """The finish reasons: one, in an answer that is whole."""
    tokens: list[str] = field(default_factory=list)
    """The tokens that have log probabilities, and where their texts begin."""
    logprobs: list[float] = field(default_factory=list)

    def add(self, said: Mapping[str, Any]) -> None:
        """Adds a chunk's choice, or the choice of a whole answer."""
        self.text += said["text"]
        self.token_ids += said.get("token_ids") or []
        self.finish += [said["finish_reason"]] if said["finish_reason"] else []
        if shown := said["logprobs"]:
            self.tokens += [f"{token} at {at}" for token, at in zip(shown["tokens"], shown["text_offset"], strict=True)]
            self.logprobs += shown["token_logprobs"]


@dataclass
class Answer:
    """What one answer adds up to, without its id and its time, which are its own."""

    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int | None = None

    def like(self, other: Answer) -> None:
        """Asserts that both say the same."""
        assert self.completion_tokens == other.completion_tokens
        assert self.choices.keys() == other.choices.keys()
        for index, choice in self.choices.items():
            assert choice == other.choices[index]


def read_answer(received: bytes) -> Answer:
    """Reads a streamed answer, which must be whole."""
    answer, own = Answer(), set()
    *events, rest = received.split(b"\n\n")
    assert (events.pop(), rest) == (b"data: [DONE]", b"")
    for event in events:
        assert event.startswith(b"data: {")
        assert b"\n" not in event
        chunk = json.loads(event[6:])
        own.add((chunk["id"], chunk["created"]))
        if chunk.get("usage"):
            answer.completion_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            answer.choices.setdefault(choice["index"], Choice()).add(choice)
    assert len(own) == 1
    return answer


def read_whole(received: bytes) -> Answer:
    """Reads an answer that came in one piece."""
    body, answer = json.loads(received), Answer()
    answer.completion_tokens = body["usage"]["completion_tokens"]
    for choice in body["choices"]:
        answer.choices.setdefault(choice["index"], Choice()).add(choice)
    return answer


@dataclass
class Client:
    """One request, whose answer a thread reads as it comes."""

    url: str
    round_name: str
    name: str
    body: Mapping[str, object]
    received: bytearray = field(default_factory=bytearray)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    @property
    def label(self) -> str:
        return f"{self.round_name}-{self.name}".replace(" ", "-")

    def _read(self) -> None:
        headers = {"content-type": "application/json", "x-request-id": self.label}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(self.body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            while data := response.read1():
                self.received += data

    def answer(self) -> Answer:
        """Waits for the whole answer, and returns what its chunks add up to."""
        self.thread.join(120)
        assert not self.thread.is_alive(), f"{self.label} is not over"
        return read_answer(bytes(self.received)) if self.body.get("stream") else read_whole(bytes(self.received))


def requests(round_name: str, url: str) -> dict[str, Client]:
    """All requests of a round, at once."""
    common = {"model": MODEL, "prompt": TEXT, "max_tokens": TOKENS, "ignore_eos": True}
    bodies: dict[str, dict[str, object]] = {name: {**common, "stream": True, **more} for name, more in STREAMED.items()}
    bodies["whole"] = {**common, **WHOLE}
    return {name: Client(url, round_name, name, body) for name, body in bodies.items()}


@dataclass(frozen=True)
class Failing:
    """A cluster of two decode nodes that tests break and start anew."""

    cluster: Cluster
    model: Path
    stack: ExitStack

    def replace(self, index: int) -> None:
        """Starts a node in the place of a broken one, and returns when the proxy knows it."""
        broken = self.cluster.decode[index]
        broken.process.reap()
        flags = ("--disaggregation", "always", *FLAGS, *one_core(index))
        process = self.stack.enter_context(start_node("decode", broken.name, self.model, self.cluster, *flags))
        self.cluster.decode[index] = Node(broken.name, process, process.listening().url)
        urls = {node.url for node in self.cluster.nodes}
        eventually(lambda: {known["url"] for known in http(self.cluster.url + "/instances").json()} == urls)

    def resumed(self) -> set[str]:
        """The labels of all requests that the proxy says it has resumed."""
        return set(re.findall(r"request_id=(\S+) resumed", self.cluster.proxy.output))


@pytest.fixture(scope="module")
def failing(slow_tiny_model: Path) -> Iterator[Failing]:
    with cluster(slow_tiny_model, *FLAGS, decode=2) as running, ExitStack() as stack:
        yield Failing(running, slow_tiny_model, stack)


@pytest.fixture(scope="module")
def unbroken(failing: Failing) -> dict[str, Answer]:
    """What the cluster answers while nothing fails."""
    return {name: client.answer() for name, client in requests("unbroken", failing.cluster.url).items()}


def engine_pids(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def until_received(client: Client, count: int) -> None:
    eventually(lambda: len(client.received) > count, "the stream runs")


def break_node(node: Node, how: signal.Signals) -> None:
    pid = node.process.pid
    for each in (*engine_pids(pid), pid):
        os.kill(each, how)


@pytest.mark.parametrize(
    ("how", "victims"), [(signal.SIGKILL, (0, 1)), (signal.SIGSTOP, (0,))], ids=["killed", "stopped"]
)
def test_answers_go_on_at_another_node(
    failing: Failing, unbroken: dict[str, Answer], how: signal.Signals, victims: Sequence[int]
) -> None:
    """One node is broken after the other, so that nearly every request has been at a broken one."""
    resumed: set[str] = set()
    for turn, victim in enumerate(victims):
        clients = requests(f"{how.name.lower()}-{turn}", failing.cluster.url)
        until_received(clients["greedy"], 3000 * (turn + 1))
        break_node(failing.cluster.decode[victim], how)
        for client in clients.values():
            client.answer().like(unbroken[client.name])
        resumed |= {name for name, client in clients.items() if client.label in failing.resumed()}
        failing.replace(victim)
    assert len(resumed) > len(STREAMED) * len(victims) / 4
    failing.cluster.until_idle()
