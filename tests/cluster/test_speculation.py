"""A decode node that drafts and one that does not, behind one proxy: nobody can tell which of them has answered.

The nodes' kernels give the same bits in every batch, so that answers are compared whole, log probabilities included.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import drafting_node
from tests.cluster.nodes import MODEL, Cluster, Node, cluster, http, one_core, start_node
from tests.eventually import eventually
from tests.faults.test_failover import (
    FLAGS,
    STREAMED,
    TOKENS,
    WHOLE,
    Answer,
    Client,
    break_node,
    until_received,
)

LIST = "apples, pears, plums, figs; apples, pears, plums, figs; apples, pears, plums, figs; apples, pears,"
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": ["small", "large"]} for name in ("first_size", "second_size", "third_size")},
    "required": ["first_size", "second_size", "third_size"],
    "additionalProperties": False,
}
FEW_TOKENS = [*range(100, 105)]
"""An answer of so few tokens repeats itself, also where it is drawn."""
ROOMY = ("--max-num-seqs", "64")
"""A step has no drafts where requests take all of its rows."""
OFF, DRAFTS = (*ROOMY, "--speculation", "off"), (*ROOMY, "--speculation", "ngram", "--draft-tokens", "5")
MORE: dict[str, Mapping[str, object]] = {
    "list": {"prompt": LIST, "temperature": 0, "allowed_token_ids": FEW_TOKENS},
    "drawn of few": {"prompt": LIST, "temperature": 0.9, "seed": 3, "allowed_token_ids": FEW_TOKENS},
    "several of few": {"temperature": 0.9, "seed": 4, "n": 3, "allowed_token_ids": FEW_TOKENS, "logprobs": 2},
    "few at once": {
        "temperature": 0,
        "stream_interval": 5,
        "logprobs": 1,
        "return_token_ids": True,
        "allowed_token_ids": FEW_TOKENS,
    },
    "counted": {
        "temperature": 0,
        "allowed_token_ids": FEW_TOKENS,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "filled in": {"seed": 5, "guided_json": SCHEMA, "ignore_eos": False},
    "penalised": {"prompt": LIST, "seed": 6, "allowed_token_ids": FEW_TOKENS, "frequency_penalty": 0.1},
}
CHAT = [{"role": "user", "content": f"Say this again: {LIST}"}]
FEW = ("list", "few at once", "counted", "whole list")
OTHER_ROUTES: dict[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True},
    "/v1/messages": {"messages": CHAT, "max_tokens": TOKENS, "temperature": 0},
    "/v1/responses": {"input": f"Say this again: {LIST}", "max_output_tokens": TOKENS, "temperature": 0},
}


@dataclass
class Pair:
    """A prefill node, and two decode nodes of which one drafts."""

    cluster: Cluster
    model: Path
    stack: ExitStack
    nodes: dict[str, Node] = field(default_factory=dict)
    bodies: dict[str, Mapping[str, object]] = field(default_factory=dict)

    def start(self, name: str, *flags: str) -> None:
        """Starts a decode node, and returns when the proxy knows it."""
        more = (*FLAGS, *flags, *one_core(len(self.nodes)))
        started = start_node("decode", name, self.model, self.cluster, *more, module=drafting_node.MODULE, forked=True)
        process = self.stack.enter_context(started)
        self.nodes[name] = Node(name, process, process.listening().url)
        self.cluster.decode[:] = self.nodes.values()
        self.until_known()

    def lose(self, name: str) -> None:
        """Kills a node in the middle of what it does."""
        node = self.nodes.pop(name)
        break_node(node, signal.SIGKILL)
        node.process.reap()
        self.cluster.decode[:] = self.nodes.values()

    def until_known(self) -> None:
        urls = {node.url for node in (*self.cluster.prefill, *self.nodes.values())}
        eventually(lambda: {known["url"] for known in http(self.cluster.url + "/instances").json()} == urls)

    def asked(self, label: str, only: Collection[str] = ()) -> dict[str, Client]:
        """Asks for everything at once, streamed and whole, or for those in ``only``."""
        return {name: Client(self.cluster.url, label, name, self.bodies[name]) for name in only or self.bodies}

    def until_drafts_are_accepted(self, label: str, wanted: Mapping[str, Answer]) -> None:
        """Asks each node for one answer at a time, until the node that drafts has accepted some."""
        turn = 0

        def asked_again() -> bool:
            nonlocal turn
            turn += 1
            check(self.asked(f"{label}-{turn}", FEW[: len(self.nodes)]), wanted)
            return drafts(self.nodes["drafting"])[1] > 0

        eventually(asked_again, "drafts are accepted")

    def others(self) -> dict[str, Any]:
        """Returns what the other routes answer, without ids and times."""
        return {route: self._told(route, body) for route, body in OTHER_ROUTES.items()}

    def _told(self, route: str, body: Mapping[str, Any]) -> list[Any]:
        whole = http(self.cluster.url + route, {"model": MODEL, **body})
        streamed = http(self.cluster.url + route, {"model": MODEL, **body, "stream": True})
        assert (whole.status, streamed.status) == (200, 200), whole.body
        told = whole.json()
        said = told.get("choices") or told.get("content") or [item["content"] for item in told["output"]]
        text = "".join(_deltas(streamed.body))
        assert text
        assert json.dumps(text)[1:-1] in json.dumps(said)
        said = [one["message"]["content"] for one in said] if "choices" in told else json.dumps(said)
        # How much of the prompt was cached depends on who has asked before.
        usage = {name: count for name, count in told["usage"].items() if name in ("completion_tokens", "output_tokens")}
        return [said, usage, text]


def _deltas(body: bytes) -> Iterator[str]:
    """Yields the pieces of a streamed answer's text."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            delta = event.get("delta")
            if isinstance(delta, str):
                yield delta
            elif isinstance(delta, dict):
                yield delta.get("text", "")
            for choice in event.get("choices", ()):
                yield choice["delta"].get("content") or ""


def _in_one_piece(body: Mapping[str, object]) -> Mapping[str, object]:
    return {name: value for name, value in body.items() if not name.startswith("stream_")}


def drafts(node: Node) -> tuple[float, float]:
    """Returns how many drafts a node has checked and accepted."""
    return node.metric("spec_decode_num_draft_tokens_total"), node.metric("spec_decode_num_accepted_tokens_total")


def check(clients: Mapping[str, Client], wanted: Mapping[str, Answer]) -> None:
    for name, client in clients.items():
        client.answer().like(wanted[name])


@pytest.mark.timeout(600)
def test_nobody_can_tell_which_node_has_drafted(slow_tiny_model: Path) -> None:
    with cluster(slow_tiny_model, *FLAGS, *DRAFTS, decode=0, forked=True) as running, ExitStack() as stack:
        pair = Pair(running, slow_tiny_model, stack)
        pair.start("plain", *OFF)
        common = {"model": MODEL, "prompt": LIST, "max_tokens": TOKENS, "ignore_eos": True}
        bodies = {**STREAMED, **WHOLE, **MORE, **{f"whole {name}": _in_one_piece(each) for name, each in MORE.items()}}
        pair.bodies = {
            name: {**common, "stream": name not in WHOLE and not name.startswith("whole "), **body}
            for name, body in bodies.items()
        }
        answer = Client(running.url, "first", "list", pair.bodies["list"]).answer()
        text = answer.choices[0].text
        # It comes in the middle of what a step with drafts gives, wherever that is.
        stops = {f"stopped at {at}": text[at : at + 3] for at in range(len(text) // 2, len(text) // 2 + 5)}
        more = {"logprobs": 1, "return_token_ids": True, "stream_options": {"include_usage": True}}
        pair.bodies |= {name: {**pair.bodies["list"], **more, "stop": [stop]} for name, stop in stops.items()}
        wanted = {name: client.answer() for name, client in pair.asked("plain").items()}
        others = pair.others()
        assert drafts(pair.nodes["plain"]) == (0, 0)
        assert all(wanted[name].choices[0].finish == ["stop"] for name in stops)

        pair.start("drafting", *DRAFTS)
        pair.until_drafts_are_accepted("before", wanted)
        clients = pair.asked("lost-drafting", FEW)
        until_received(clients["list"], 2000)
        pair.lose("drafting")
        check(clients, wanted)

        pair.start("drafting", *DRAFTS)
        clients = pair.asked("lost-plain", FEW)
        until_received(clients["list"], 2000)
        pair.lose("plain")
        check(clients, wanted)

        check(pair.asked("drafting"), wanted)
        assert pair.others() == others
        pair.until_drafts_are_accepted("alone", wanted)
        assert "resumed" in running.proxy.output
        # A prefill node computes what others order, and drafts nothing of it.
        assert drafts(running.prefill[0]) == (0, 0)
        running.until_idle()
