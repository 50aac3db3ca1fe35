"""The clients of a soak at servers that a test makes up: what they take for right, wrong and lost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from lab.soak.answers import Answer, BrokenAnswer, ErrorEvent, Events, add_event, difference, prefix_difference
from lab.soak.catalogue import Ask, catalogue
from lab.soak.clients import Cause, Client, Door, Manner, Outcome, Tally, connections

ASK = Ask("stream-0", "/v1/completions", {"model": "soak", "prompt": [5], "stream": True})


def chunk(text: str, finish: str | None = None) -> bytes:
    shown = {"index": 0, "text": text, "token_ids": [len(text)], "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [shown]}).encode() + b"\n\n"


EVENTS = [chunk("one "), chunk("two ", "length"), b"data: [DONE]\n\n"]


def answer_of(*events: bytes) -> Answer:
    answer = Answer()
    for event in Events().feed(b"".join(events)):
        add_event(answer, event)
    return answer


RIGHT = answer_of(*EVENTS)


@dataclass
class NoFaults:
    """Faults as a test says that they were."""

    broken_proxy: bool = False
    broken_nodes: int = 0
    disturbed_nodes: int = 0
    """Nodes with faults with which they lose nothing."""

    def hit(self, server: str, since: float) -> bool:
        return self.broken_proxy

    def hits_on_nodes(self, since: float) -> int:
        return max(self.broken_nodes, self.disturbed_nodes)

    def lost_nodes(self, since: float) -> int:
        return self.broken_nodes


@dataclass
class Script:
    """A server that answers its requests, one after the other, as ``answers`` say."""

    answers: list[Callable[[web.BaseRequest], Any]]
    asked: list[web.BaseRequest] = field(default_factory=list)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request)
        response: web.StreamResponse = await self.answers[len(self.asked) - 1](request)
        return response


def streams(*events: bytes, breaks: bool = False) -> Callable[[web.BaseRequest], Any]:
    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        if breaks:
            assert request.transport is not None
            request.transport.close()
        return response

    return stream


def refuses(status: int, **headers: str) -> Callable[[web.BaseRequest], Any]:
    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=status, text='{"error": {"message": "no"}}', headers=headers)

    return refuse


@asynccontextmanager
async def served(script: Script) -> AsyncIterator[Door]:
    runner = web.ServerRunner(web.Server(script.handle))
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield Door("proxy-0", f"http://{host}:{port}")
    finally:
        await runner.cleanup()


async def one(script: Script, manner: Manner, faults: NoFaults) -> Tally:
    """Returns what became of one request of a client that behaves in this manner."""
    tally, began = Tally(), time.monotonic()
    async with served(script) as door, connections() as session, asyncio.timeout(30.0):
        client = Client(0, 1, [door], "key", [ASK], [], {ASK.name: RIGHT}, faults, tally, began)
        await client.ask_once(session, manner)
    return tally


GOOD = streams(*EVENTS)
ERROR = b'event: error\ndata: {"error": {"message": "no", "code": "upstream_lost"}}\n\n'
DEFECT = ERROR.replace(b"upstream_lost", b"engine_error")


@pytest.mark.parametrize(
    ("answers", "faults", "outcome", "cause"),
    [
        ([GOOD], NoFaults(), Outcome.RIGHT, None),
        ([streams(chunk("one "), chunk("too ", "length"), EVENTS[2])], NoFaults(), Outcome.WRONG, None),
        ([streams(*EVENTS, chunk("more"))], NoFaults(), Outcome.WRONG, None),
        ([streams(EVENTS[0], EVENTS[2])], NoFaults(), Outcome.WRONG, None),
        ([streams(*EVENTS[:2])], NoFaults(), Outcome.LOST, None),
        ([streams(EVENTS[0], ERROR)], NoFaults(), Outcome.LOST, None),
        ([streams(EVENTS[0], ERROR)], NoFaults(broken_nodes=1), Outcome.LOST, None),
        ([streams(EVENTS[0], ERROR), GOOD], NoFaults(broken_nodes=2), Outcome.RIGHT, Cause.TWO_NODES),
        ([streams(EVENTS[0], ERROR)], NoFaults(disturbed_nodes=2), Outcome.LOST, None),
        ([streams(EVENTS[0], DEFECT)], NoFaults(broken_nodes=2), Outcome.LOST, None),
        ([streams(EVENTS[0], DEFECT)], NoFaults(broken_proxy=True), Outcome.LOST, None),
        ([streams(EVENTS[0])], NoFaults(broken_nodes=2), Outcome.LOST, None),
        ([streams(EVENTS[0], breaks=True)], NoFaults(broken_nodes=2), Outcome.LOST, None),
        ([refuses(502)], NoFaults(disturbed_nodes=2), Outcome.LOST, None),
        ([refuses(502), GOOD], NoFaults(broken_nodes=2), Outcome.RIGHT, Cause.TWO_NODES),
        ([streams(b"data: {}\n\n")], NoFaults(), Outcome.WRONG, None),
        ([streams(b"data: []\n\n")], NoFaults(), Outcome.WRONG, None),
        ([streams(b"id: none\n" + EVENTS[0])], NoFaults(), Outcome.WRONG, None),
        ([streams(EVENTS[0], breaks=True)], NoFaults(), Outcome.LOST, None),
        ([streams(EVENTS[0], breaks=True), GOOD], NoFaults(broken_proxy=True), Outcome.RIGHT, Cause.PROXY_LOST),
        ([streams(chunk("zero "), breaks=True), GOOD], NoFaults(broken_proxy=True), Outcome.WRONG, None),
        ([refuses(500)], NoFaults(), Outcome.LOST, None),
        ([refuses(400)], NoFaults(broken_proxy=True), Outcome.LOST, None),
        ([refuses(503)], NoFaults(broken_proxy=True), Outcome.LOST, None),
        ([refuses(503, **{"retry-after": "0"})], NoFaults(), Outcome.LOST, None),
        ([refuses(503, **{"retry-after": "0"}), GOOD], NoFaults(broken_nodes=1), Outcome.RIGHT, Cause.COME_AGAIN),
    ],
)
async def test_what_a_client_makes_of_an_answer(
    answers: list[Callable[[web.BaseRequest], Any]],
    faults: NoFaults,
    outcome: Outcome,
    cause: Cause | None,
) -> None:
    tally = await one(Script(answers), Manner.PATIENT, faults)
    assert dict(tally.outcomes) == {outcome: 1}
    assert list(tally.causes) == ([] if cause is None else [cause])
    assert len(tally.findings) == (outcome in (Outcome.WRONG, Outcome.LOST))


async def test_a_client_with_a_key_goes_on_behind_the_event_that_it_has() -> None:
    numbered = [b"id: answer.%d\n%b" % pair for pair in enumerate(EVENTS, 1)]
    script = Script([streams(numbered[0], breaks=True), streams(*numbered[1:])])
    tally = await one(script, Manner.KEYED, NoFaults(broken_proxy=True))
    assert dict(tally.outcomes) == {Outcome.RIGHT: 1}
    assert [request.headers.get("last-event-id") for request in script.asked] == [None, "answer.1"]
    away = Script([streams(numbered[0], breaks=True), refuses(502), streams(*numbered[1:])])
    tally = await one(away, Manner.KEYED, NoFaults(broken_proxy=True, broken_nodes=1))
    assert dict(tally.outcomes) == {Outcome.RIGHT: 1}
    assert list(tally.causes) == [Cause.PROXY_LOST, Cause.NOT_ASKED]
    twice = Script([streams(numbered[0], breaks=True), streams(*numbered)])
    tally = await one(twice, Manner.KEYED, NoFaults(broken_proxy=True))
    assert dict(tally.outcomes) == {Outcome.WRONG: 1}, "an event came twice"


@pytest.mark.parametrize("faults", [NoFaults(), NoFaults(disturbed_nodes=1)])
async def test_an_answer_may_be_given_up_after_a_fault(faults: NoFaults) -> None:
    # The proxy is lost while the client reads; the node may give its answer up, with others that nobody reads.
    faults.broken_proxy = True
    script = Script([streams(b"id: answer.1\n" + EVENTS[0], breaks=True), refuses(410), GOOD])
    assert dict((await one(script, Manner.KEYED, faults)).outcomes) == {Outcome.RIGHT: 1}


@pytest.mark.parametrize(
    ("status", "faults", "outcome"),
    [
        (200, NoFaults(), Outcome.RIGHT),
        (503, NoFaults(), Outcome.LOST),
        (503, NoFaults(disturbed_nodes=1), Outcome.RIGHT),
        (500, NoFaults(broken_proxy=True, broken_nodes=2), Outcome.LOST),
    ],
)
async def test_a_page_is_unavailable_only_after_a_fault(status: int, faults: NoFaults, outcome: Outcome) -> None:
    assert dict((await one(Script([refuses(status)]), Manner.LOOKING, faults)).outcomes) == {outcome: 1}


def test_answers_are_the_same_up_to_ids_and_rounding() -> None:
    text = {"choices": [{"index": 0, "text": "a", "logprobs": {"tokens": ["a"], "text_offset": [0]}}], "id": "x"}

    def scored(logprob: float) -> Answer:
        text["choices"][0]["logprobs"]["token_logprobs"] = [logprob]  # type: ignore[index]
        return answer_of(b"data: " + json.dumps(text).encode() + b"\n\n")

    assert not difference(scored(-1.0), scored(-1.0001))
    assert "logprobs" in difference(scored(-1.0), scored(-1.1))
    assert "text" in difference(RIGHT, answer_of(chunk("one "), chunk("too ", "length"), EVENTS[2]))
    assert not prefix_difference(answer_of(EVENTS[0]), RIGHT)
    assert "text" in prefix_difference(answer_of(chunk("One ")), RIGHT)
    with pytest.raises(ErrorEvent, match="upstream_lost"):
        answer_of(ERROR)
    with pytest.raises(BrokenAnswer, match="behind the end"):
        answer_of(*EVENTS, EVENTS[0])


def test_a_seed_decides_the_requests() -> None:
    assert catalogue(3, 49_152, 2) == catalogue(3, 49_152, 2)
    assert catalogue(3, 49_152, 2) != catalogue(4, 49_152, 2)
    names = [ask.name for ask in catalogue(3, 49_152, 2)]
    assert len(set(names)) == len(names)
