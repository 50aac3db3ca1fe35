"""A prefill node that has nothing to prefill answers requests through a running proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pdserve.config import PrefillAnswers
from pdserve.wire.discovery import NodeLoad, Role
from tests.proxy.cluster import Cluster, cluster, eventually, node_info, proxy_config, ticket_of
from tests.proxy.fake_node import DONE, EVENTS, Exchange, FakeNode

ANSWER = b"".join(EVENTS) + DONE


class Asked:
    """A request that is under way."""

    def __init__(self, running: Cluster, headers: dict[str, str]) -> None:
        self.begun = asyncio.Event()
        """Set when the answer has begun."""
        self.answer = asyncio.create_task(self._ask(running, headers))

    async def _ask(self, running: Cluster, headers: dict[str, str]) -> bytes:
        body = {"model": "m", "stream": True}
        async with running.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            first = await response.content.readany()
            self.begun.set()
            return first + await response.read()


@dataclass
class Pair:
    """A proxy with a prefill and a decode node, whose answers begin and end when they are told."""

    running: Cluster
    prefill: FakeNode
    decode: FakeNode
    begin: asyncio.Event
    end: asyncio.Event

    def ask(self, **headers: str) -> Asked:
        return Asked(self.running, headers)

    async def asked(self, prefill: int, decode: int) -> None:
        """Waits until the nodes have so many requests."""

        async def have() -> bool:
            return (len(self.prefill.requests), len(self.decode.requests)) == (prefill, decode)

        await eventually(have, f"the prefill node has {prefill} requests and the decode node {decode}")


@asynccontextmanager
async def pair(
    answers: PrefillAnswers = PrefillAnswers.ON,
    load: NodeLoad = NodeLoad(),  # noqa: B008  # frozen
    prefill_does: Callable[[Exchange], Awaitable[None]] | None = None,
) -> AsyncIterator[Pair]:
    """Yields the nodes. The prefill node's heartbeats have this ``load``."""
    begin, end = asyncio.Event(), asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await begin.wait()
        await exchange.begin_stream()
        await exchange.chunk(EVENTS[0])
        await end.wait()
        await exchange.chunk(b"".join(EVENTS[1:]) + DONE)
        await exchange.finish()

    async with (
        FakeNode(prefill_does or stream) as prefill,
        FakeNode(stream) as decode,
        cluster(proxy_config(prefill_answers=answers)) as running,
    ):
        await running.add(node_info("p", Role.PREFILL, prefill.url, answers="same"), load=load)
        await running.add(node_info("d", Role.DECODE, decode.url, answers="same"), load=NodeLoad())
        yield Pair(running, prefill, decode, begin, end)


async def test_it_answers_when_it_has_no_prompt_and_the_decode_node_has_more_to_do() -> None:
    async with pair() as nodes:
        asked = [nodes.ask()]
        await nodes.asked(0, 1)
        asked.append(nodes.ask())  # the prefill node is to compute the prompt of the first one
        await nodes.asked(0, 2)
        nodes.begin.set()
        for one in asked:
            await one.begun.wait()
        asked.append(nodes.ask())
        await nodes.asked(1, 2)
        nodes.end.set()
        assert [await one.answer for one in asked] == [ANSWER] * 3
        # It computes the prompt itself: its ticket names no prefill node.
        assert not ticket_of(nodes.prefill).prefill
        assert ticket_of(nodes.decode).prefill


async def test_it_only_prefills_where_others_have_prompts_for_it_or_it_may_not_answer() -> None:
    for answers, load in ((PrefillAnswers.ON, NodeLoad(queue_s=0.1)), (PrefillAnswers.OFF, NodeLoad())):
        async with pair(answers, load) as nodes:
            nodes.begin.set()
            first = nodes.ask()
            await first.begun.wait()
            nodes.end.set()
            assert [await first.answer, await nodes.ask().answer] == [ANSWER] * 2
            assert len(nodes.decode.requests) == 2


async def test_a_client_that_may_ask_again_gets_its_own_node() -> None:
    async with pair() as nodes:
        nodes.begin.set()
        first = nodes.ask()
        await first.begun.wait()
        second = nodes.ask(**{"Idempotency-Key": "k"})
        await second.begun.wait()
        nodes.end.set()
        assert {await first.answer, await second.answer} == {ANSWER}
        assert not nodes.prefill.requests


async def test_a_request_whose_prefill_node_dies_with_it_goes_to_the_decode_node() -> None:
    async def die(exchange: Exchange) -> None:
        exchange.die()

    async with pair(prefill_does=die) as nodes:
        nodes.begin.set()
        first = nodes.ask()
        await first.begun.wait()
        second = nodes.ask()
        await nodes.asked(1, 2)
        nodes.end.set()
        assert [await first.answer, await second.answer] == [ANSWER] * 2
