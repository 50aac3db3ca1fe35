"""A client that asks by an event's id waits for a node that could not be asked, if that may have the answer."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from pdserve.config import AdmissionConfig, ProxyConfig
from pdserve.wire.discovery import NodeInfo, Role
from pdserve.wire.replay import event_id_start
from pdserve_proxy.relay import attempt_rule, route_wait
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.relay.route_wait import NodeWaits
from pdserve_proxy.routing.router import Route
from pdserve_proxy.upstream import node_connection
from tests.proxy.cluster import (
    Cluster,
    cluster,
    error_of,
    eventually,
    heard,
    metric,
    node_info,
    proxy_config,
    registered,
)
from tests.proxy.fake_node import Exchange, FakeNode
from tests.proxy.journaling_nodes import SHOWN, complete, die_at_once, nodes, refuses

BODY = b'{"model": "m", "prompt": "p", "stream": true}'
ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"
EVENT_ID = (event_id_start(b"k" * 16, "0a1b") + b"7").decode()


@pytest.fixture(autouse=True)
def pauses_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_connection, "SUSPECTED_S", 0.05)
    monkeypatch.setattr(attempt_rule, "RETRY_AFTER_S", 0.05)
    monkeypatch.setattr(route_wait, "PAUSE_S", 0.01)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Route | None]:
    """What each look for a node found."""
    found = list[Route | None]()
    choose = NodeWaits._choose

    def note(*args: Any) -> Route | None:
        found.append(choose(*args))
        return found[-1]

    monkeypatch.setattr(NodeWaits, "_choose", note)
    return found


def config(base: ProxyConfig | None = None, *, wait_s: float = 10.0) -> ProxyConfig:
    base = base or proxy_config()
    relay = dataclasses.replace(base.relay, resume_wait_s=wait_s)
    return dataclasses.replace(base, relay=relay)


async def ask(running: Cluster, *, event_id: str | None = EVENT_ID, api_key: str = "") -> tuple[int, bytes]:
    headers = {"content-type": "application/json"} | ({} if event_id is None else {"last-event-id": event_id})
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    async with running.http.post("/v1/completions", data=BODY, headers=headers) as response:
        return response.status, await response.read()


def node_of(fake: FakeNode) -> NodeInfo:
    """Returns a node that is stopped later. It keeps answers, and says so itself: ``heard`` does not."""
    return node_info("stopped", Role.MIXED, fake.url)


async def test_networks_that_break_twice_make_no_suspect_of_a_request_that_nobody_computes() -> None:
    async with cluster() as running, nodes(running, die_at_once, die_at_once, complete, count=2) as made:
        assert await ask(running) == (200, SHOWN)
        first, second, again = made.tickets
        assert first.node != second.node
        assert again.node in (first.node, second.node)


async def hang(exchange: Exchange) -> None:
    await exchange.gone()


async def test_a_node_whose_connection_was_cut_is_asked_once_more_when_no_other_has_the_answer() -> None:
    async with cluster() as running, nodes(running, die_at_once, refuses(410), complete, count=2) as made:
        assert await ask(running) == (200, SHOWN)
        first, other, again = made.tickets
        assert again.node == first.node != other.node
        assert [request.body for request in made.asked] == [b""] * 3


async def test_an_answer_that_the_node_does_not_have_when_it_is_back_is_gone() -> None:
    async with cluster() as running, nodes(running, die_at_once, refuses(410), refuses(410), count=2) as made:
        assert (await ask(running))[0] == 410
        assert len(made.asked) == 3


async def test_a_stopped_node_gives_its_answer_when_it_goes_on(looks: list[Route | None]) -> None:
    behaviours = [hang, complete]

    async def behave(exchange: Exchange) -> None:
        await behaviours.pop(0)(exchange)

    async with FakeNode(behave) as node, FakeNode(refuses(410)) as other, cluster(config(wait_s=600.0)) as running:
        stopped = node_of(node)
        async with heard(stopped, running.addresses.control) as silent:
            asked = asyncio.create_task(ask(running))
            await eventually(lambda: bool(node.requests), "the node has it")
            await running.add(node_info("other", Role.MIXED, other.url))
            silent.set()
            await eventually(lambda: bool(other.requests), "the other node was asked")
            await eventually(lambda: len(looks) > 3, "it waits")
        async with registered(stopped, running.addresses.control):
            assert await asked == (200, SHOWN)


async def test_a_node_whose_process_is_gone_is_not_waited_for() -> None:
    async def end(exchange: Exchange) -> None:
        ended.set()
        exchange.die()

    ended = asyncio.Event()
    async with FakeNode(end) as node, cluster(config(wait_s=600.0)) as running:
        await running.add(node_info("killed", Role.MIXED, node.url))
        asked = asyncio.create_task(ask(running))
        await ended.wait()
        await node.stop()
        status, body = await asked
        assert (status, error_of(body)["code"]) == (503, "upstream_unreachable")


@pytest.mark.parametrize(("wait_s", "waits", "least", "most"), [(0.1, 32, 2, 3), (0.0, 32, 1, 1), (10.0, 0, 1, 1)])
async def test_the_wait_ends(wait_s: float, waits: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that breaks every connection is asked again only now and then. Where none may wait, too many do."""
    monkeypatch.setattr(route_wait, "MAX_WAITS", waits)
    async with cluster(config(wait_s=wait_s)) as running, FakeNode(die_at_once) as node:
        await running.add(node_info("cut", Role.MIXED, node.url))
        status, body = await ask(running)
        assert (status, error_of(body)["code"]) == (502, "upstream_lost")
        assert least <= len(node.requests) <= most


async def test_one_client_does_not_take_the_waits_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, choose = set[str](), NodeWaits._choose

    def note(waits: NodeWaits, relayed: RelayedRequest, *args: Any) -> Route | None:
        waiting.add(relayed.request_id)
        return choose(waits, relayed, *args)

    monkeypatch.setattr(NodeWaits, "_choose", note)
    monkeypatch.setattr(route_wait, "MAX_WAITS_OF_ONE", 2)
    monkeypatch.setattr(attempt_rule, "RETRY_AFTER_S", 600.0)
    base = dataclasses.replace(proxy_config(timeout_s=600.0), admission=AdmissionConfig(api_keys=(ALICE, BOB)))
    async with cluster(config(base, wait_s=600.0)) as running, FakeNode(die_at_once) as node:
        await running.add(node_info("cut", Role.MIXED, node.url))
        asked = [asyncio.create_task(ask(running, api_key=ALICE)) for _ in range(2)]
        await eventually(lambda: len(waiting) == 2, "her two requests wait")
        async with asyncio.timeout(20):
            assert (await ask(running, api_key=ALICE))[0] == 502
        asked.append(asyncio.create_task(ask(running, api_key=BOB)))
        await eventually(lambda: len(waiting) == 3, "his waits, too")
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)


async def test_a_request_that_may_be_computed_is_not_asked_of_a_lost_node_again() -> None:
    async with cluster(config(wait_s=0.5)) as running, nodes(running, die_at_once) as made:
        status, body = await ask(running, event_id=None)
        assert (status, error_of(body)["code"]) == (502, "upstream_lost")
        assert len(made.asked) == 1


async def test_a_request_that_waits_leaves_its_place_to_others_and_ends_with_its_client(
    looks: list[Route | None],
) -> None:
    base = dataclasses.replace(proxy_config(timeout_s=600.0), admission=AdmissionConfig(max_in_flight=1, max_queued=0))
    async with cluster(config(base, wait_s=600.0)) as running, FakeNode(hang) as stopped, FakeNode(complete) as other:
        async with heard(node_of(stopped), running.addresses.control) as silent:
            waits = asyncio.create_task(ask(running))
            await eventually(lambda: bool(stopped.requests), "the node has it")
            assert (await ask(running, event_id=None))[0] == 503, "the only place is taken"
            silent.set()
            await running.dropped("stopped")
        await running.add(node_info("other", Role.PREFILL, other.url, fingerprint="another"))

        async def admitted() -> bool:
            status, body = await ask(running, event_id=None)
            return (status, error_of(body)["code"]) == (503, "no_route")

        await eventually(admitted, "another request gets the place")
        await eventually(lambda: len(looks) > 3, "it looks again whenever a node is heard")
        assert await metric(running, "pdserve_proxy_requests_in_flight") == 1
        waits.cancel()

        async def ended() -> bool:
            return await metric(running, "pdserve_proxy_requests_in_flight") == 0

        await eventually(ended, "its client has left")


async def test_a_wait_ends_at_the_deadline(looks: list[Route | None]) -> None:
    async with cluster(config(proxy_config(timeout_s=3.0), wait_s=600.0)) as running, FakeNode(hang) as node:
        async with heard(node_of(node), running.addresses.control) as silent:
            asked = asyncio.create_task(ask(running))
            await eventually(lambda: bool(node.requests), "the node has it")
            silent.set()
            status, body = await asked
        assert looks, "it waits"
        assert not any(looks)
        assert (status, error_of(body)["code"]) == (504, "deadline_exceeded")
