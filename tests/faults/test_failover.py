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
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import EARLY_LOSS, MODEL, Cluster, Node, cluster, http, one_core, sample, start_node
from tests.eventually import eventually
from tests.nightly import nightly

# In bf16: its compiled kernels give the same bits in every batch, where rounding could decide a near tie otherwise.
FLAGS = ("--dtype", "bf16", "--max-num-seqs", "16", "--kv-cache-mib", "64")
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
    "by a grammar": {"seed": 15, "guided_regex": "[a-z ]+"},
}
WHOLE: dict[str, Mapping[str, object]] = {
    "whole": {"temperature": 0},
    "several in whole": {"seed": 12, "n": 2, "return_token_ids": True},
    "whole stop strings": {"seed": 13, "stop": ["zzqx", "qqjj"], "presence_penalty": 0.5},
    "whole echo": {"seed": 14, "echo": True, "prompt": [TEXT, "In the beginning"]},
}
"""Requests whose answers come in one piece."""
AGAIN: Mapping[str, object] = {"seed": 12, "best_of": 2}
"""A request that has no journal, and begins again."""


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


def requests(round_name: str, url: str, only: Collection[str] = (), tokens: int = TOKENS) -> dict[str, Client]:
    """The requests of a round, at once: those with the names in ``only``, or all."""
    common = {"model": MODEL, "prompt": TEXT, "max_tokens": tokens, "ignore_eos": True}
    bodies: dict[str, dict[str, object]] = {name: {**common, "stream": True, **more} for name, more in STREAMED.items()}
    bodies |= {name: {**common, **more} for name, more in {**WHOLE, "again": AGAIN}.items()}
    return {name: Client(url, round_name, name, bodies[name]) for name in only or bodies}


@dataclass(frozen=True)
class Failing:
    """A cluster of two decode nodes that tests break and start anew."""

    cluster: Cluster
    model: Path
    stack: ExitStack

    def replace(self, *broken: Node) -> None:
        """Starts nodes in the places of broken ones, and returns when the proxy knows them."""
        for node in broken:
            node.process.reap()
            role, nodes = (
                ("prefill", self.cluster.prefill) if node in self.cluster.prefill else ("decode", self.cluster.decode)
            )
            index = nodes.index(node)
            flags = ("--disaggregation", "always", *FLAGS, *one_core(index))
            process = self.stack.enter_context(start_node(role, node.name, self.model, self.cluster, *flags))
            nodes[index] = Node(node.name, process, process.listening().url)
        urls = {node.url for node in self.cluster.nodes}
        eventually(lambda: {known["url"] for known in http(self.cluster.url + "/instances").json()} == urls)

    def resumed(self) -> set[str]:
        """The labels of all requests that the proxy says it has resumed."""
        return set(re.findall(r"request_id=(\S+) resumed", self.cluster.proxy.output))


@pytest.fixture(scope="module")
def failing(slow_tiny_model: Path) -> Iterator[Failing]:
    with cluster(slow_tiny_model, *FLAGS, decode=2, proxy_flags=EARLY_LOSS) as running, ExitStack() as stack:
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
    ("how", "victims"),
    # In every run, a cell of ``matrix`` stops the node of one stream.
    [(signal.SIGKILL, (0, 1)), nightly(signal.SIGSTOP, (0,))],
    ids=["killed", "stopped"],
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
        resumed |= {client.label for client in clients.values()} & failing.resumed()
        assert clients["again"].label not in resumed
        failing.replace(failing.cluster.decode[victim])
    # Half of them are at the node that breaks. Those whose clients have nothing yet, and no journal, begin again.
    assert len(resumed) > len(clients) * len(victims) / 6
    failing.cluster.until_idle()


def test_an_answer_in_one_piece_goes_on_at_another_node(failing: Failing) -> None:
    """Its node dies once the proxy has some of its journal, which nodes send of answers that take a while."""
    cluster, only, tokens = failing.cluster, ["several in whole"], 4 * TOKENS
    (unbroken,) = requests("unbroken", cluster.url, only, tokens).values()
    expected = unbroken.answer()
    (client,) = requests("one-piece", cluster.url, only, tokens).values()
    eventually(lambda: sample(cluster.url, "proxy_journal_bytes") > 0, "the answer is journaled")
    (victim,) = (node for node in cluster.decode if node.metric("num_requests_running") > 0)
    break_node(victim, signal.SIGKILL)
    client.answer().like(expected)
    assert client.label in failing.resumed()
    failing.replace(victim)


@pytest.mark.parametrize("during", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["before", "during"])
def test_answers_go_on_without_the_prefill_node_too(
    failing: Failing, unbroken: dict[str, Answer], during: bool
) -> None:
    """It dies after it has computed their prompts: before they are resumed, or when the node that resumes needs it."""
    only = ("greedy", "several", "stop strings", "several in whole")
    clients = requests(f"alone-{during}", failing.cluster.url, only)
    (prefill,) = failing.cluster.prefill
    until_received(clients["greedy"], 1500)
    # A request is resumed if its client has an event. Otherwise it begins again.
    victim = failing.cluster.answering(clients["greedy"].label)
    if during:
        break_node(victim, signal.SIGKILL)
        break_node(prefill, signal.SIGKILL)
    else:
        break_node(prefill, signal.SIGKILL)
        until_received(clients["greedy"], 3000)
        break_node(victim, signal.SIGKILL)
    for client in clients.values():
        client.answer().like(unbroken[client.name])
    assert clients["greedy"].label in failing.resumed()
    failing.replace(victim, prefill)
    failing.cluster.until_idle()
