"""A prefill node that has nothing to prefill answers requests through a running proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

import pytest

from pdserve.config import PrefillAnswers
from pdserve.wire.discovery import NodeLoad, Role
from pdserve.wire.ids import new_id
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
    loads: tuple[NodeLoad, NodeLoad] | None = None,
    prefill_does: Callable[[Exchange], Awaitable[None]] | None = None,
) -> AsyncIterator[Pair]:
    """Yields the nodes, whose heartbeats have these ``loads``. Without any, there is no heartbeat in the next 30 s."""
    begin, end = asyncio.Event(), asyncio.Event()

    async def stream(exchange: Exchange) -> None:
        await begin.wait()
        await exchange.begin_stream()
        await exchange.chunk(EVENTS[0])
        await end.wait()
        await exchange.chunk(b"".join(EVENTS[1:]) + DONE)
        await exchange.finish()

    config = proxy_config(prefill_answers=answers)
    if loads is None:
        config = replace(config, registry=replace(config.registry, heartbeat_ms=60_000))
    async with (
        FakeNode(prefill_does or stream) as prefill,
        FakeNode(stream) as decode,
        cluster(config) as running,
    ):
        for role, node, load in zip(
            (Role.PREFILL, Role.DECODE), (prefill, decode), loads or (NodeLoad(),) * 2, strict=True
        ):
            await running.add(node_info(role.value, role, node.url, answers="same", boot_id=_late()), load=load)
        await running.ready()  # who has met others says its load once more
        if loads is not None:
            await _heard(running, loads)
        yield Pair(running, prefill, decode, begin, end)


def _late() -> bytes:
    """Returns a boot id whose node sends its first heartbeat in the second half of the first interval."""
    return next(boot_id for boot_id in iter(new_id, None) if Random(boot_id).random() < 0.5)


async def _heard(running: Cluster, loads: tuple[NodeLoad, NodeLoad]) -> None:
    """Waits until the proxy has a heartbeat of each node."""
    wanted = [(load.running, load.queue_s) for load in loads]

    async def heard() -> bool:
        async with running.http.get("/instances") as response:
            return [(node["load"]["running"], node["load"]["queue_s"]) for node in await response.json()] == wanted

    await eventually(heard, "the proxy has heard of the nodes' loads")


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
        assert not ticket_of(nodes.prefill).terms.prefill
        assert ticket_of(nodes.decode).terms.prefill


@pytest.mark.parametrize(
    ("answers", "queue_s", "itself"),
    [(PrefillAnswers.ON, 0.0, True), (PrefillAnswers.ON, 0.1, False), (PrefillAnswers.OFF, 0.0, False)],
)
async def test_it_only_prefills_where_others_have_prompts_for_it_or_it_may_not_answer(
    answers: PrefillAnswers, queue_s: float, itself: bool
) -> None:
    async with pair(answers, (NodeLoad(free_blocks=1, queue_s=queue_s), NodeLoad(running=1))) as nodes:
        nodes.begin.set()
        nodes.end.set()
        assert await nodes.ask().answer == ANSWER
        assert (len(nodes.prefill.requests), len(nodes.decode.requests)) == ((1, 0) if itself else (0, 1))


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
