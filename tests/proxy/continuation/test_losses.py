"""A request with which two nodes were lost is refused for a while: it may be what killed them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from pdserve.config import RelayConfig
from pdserve.errors import InvalidRequest, PrefillLost
from pdserve.tracing.tracing import RecentParts
from pdserve.wire.discovery import Role
from pdserve.wire.proxy_workers import Credentials
from pdserve.wire.terms import Ticket
from pdserve_proxy.continuation.losses import LOOKS, MAX_SUSPECTS, Suspects
from pdserve_proxy.credentials import LiveCredentials
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry.registry import Registry, RegistryMirror
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.workers.worker import SupervisorChannel
from pdserve_proxy.workers.worker_channel import WorkerChannel
from tests.proxy.cluster import (
    SECRET,
    Cluster,
    cancelled,
    cluster,
    error_of,
    eventually,
    heard,
    node_info,
    proxy_config,
)
from tests.proxy.fake_node import Behaviour, Exchange, FakeNode, answer_ok
from tests.proxy.journaling_nodes import (
    SHOWN,
    Nodes,
    complete,
    die_at_once,
    dies_at,
    lose_engine,
    nodes,
    ticket_in,
)


def test_only_the_same_request_is_refused_and_only_for_a_while() -> None:
    now = 100.0
    suspects = Suspects(60.0, lambda: now)
    told = suspects.add("/v1/completions", b"{}", "first", ["node a died", "node b died"])
    assert "2 nodes were lost with this request, first: node a died; node b died" in told.message
    with pytest.raises(InvalidRequest, match=r"the request first, .*another 60 s, .*: node a died; node b") as caught:
        suspects.check("/v1/completions", b"{}")
    assert caught.value.code == "suspected_request"
    suspects.check("/v1/completions", b'{"seed": 1}')
    suspects.check("/v1/chat/completions", b"{}")
    now = 160.0
    suspects.check("/v1/completions", b"{}")


def test_the_list_is_bounded_and_can_be_off() -> None:
    suspects = Suspects(60.0, lambda: 0.0)
    for number in range(MAX_SUSPECTS + 1):
        suspects.add("/v1/completions", str(number).encode(), "id", ["node"])
    suspects.check("/v1/completions", b"0")
    with pytest.raises(InvalidRequest):
        suspects.check("/v1/completions", b"1")
    off = Suspects(0.0, lambda: 0.0)
    off.add("/v1/completions", b"", "id", ["node"])
    off.check("/v1/completions", b"")


def test_only_its_own_client_hears_the_id_of_a_request() -> None:
    suspects = Suspects(60.0, lambda: 0.0)
    suspects.add("/v1/completions", b"{}", "secret-id", ["node a of secret-id", "node b"], b"alice")
    with pytest.raises(InvalidRequest, match="secret-id"):
        suspects.check("/v1/completions", b"{}", b"alice")
    with pytest.raises(InvalidRequest, match="a request that was the same as this one") as caught:
        suspects.check("/v1/completions", b"{}", b"bob")
    assert "secret-id" not in caught.value.message
    assert caught.value.code == "suspected_request"


def test_bodies_of_other_sizes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    suspects, looked = Suspects(60.0, lambda: 0.0), []
    suspects.add("/v1/completions", b"{}", "r", [])
    monkeypatch.setattr("pdserve_proxy.continuation.losses._fingerprint", lambda path, body: looked.append(body))
    suspects.check("/v1/completions", b"{ }")
    suspects.check("/v1/completions", b"[]")
    assert looked == [b"[]"]


async def test_what_one_worker_finds_others_refuse_too_also_those_that_start_later(tmp_path: Path) -> None:
    names, address = [b"0.1", b"1.1", b"2.1"], f"ipc://{tmp_path}/channel"
    finder, other, late = known = [Suspects(60.0) for _ in names]
    with (
        WorkerChannel(address, Registry(1.0, 3), ProxyMetrics("supervisor")) as hub,
        ExitStack() as stack,
    ):
        running = [asyncio.create_task(hub.run())]

        def start(number: int) -> None:
            hub.expect(names[number])
            mirror, metrics = RegistryMirror(Attempts()), ProxyMetrics(f"worker-{number}")
            credentials = LiveCredentials(Credentials(SECRET, ()))
            channel = stack.enter_context(
                SupervisorChannel(address, names[number], mirror, metrics, credentials, RecentParts(0), known[number])
            )
            running.append(asyncio.create_task(channel.run()))

        try:
            start(0)
            start(1)
            await eventually(lambda: len(hub._workers) == 2, "both workers")
            finder.add("/v1/completions", b"{}", "r", ["node a", "node b"], b"alice")
            await eventually(lambda: bool(other.refused()), "the news")
            start(2)
            await eventually(lambda: bool(late.refused()), "what was found before")
            for suspects in known:
                with pytest.raises(InvalidRequest, match="the request r, which was the same"):
                    suspects.check("/v1/completions", b"{}", b"alice")
        finally:
            for task in running:
                await cancelled(task)


@pytest.mark.parametrize(
    "behaviours",
    [[die_at_once, die_at_once], [dies_at(2), die_at_once], [lose_engine, lose_engine], [dies_at(2), lose_engine]],
)
async def test_a_request_that_kills_nodes_takes_two_along_and_no_third(behaviours: list[Behaviour]) -> None:
    async with cluster() as running, nodes(running, *behaviours, *[complete] * 8, count=4) as found:
        async with running.chat(stream=True) as response:
            assert b"[DONE]" not in await response.read()
        assert len(found.asked) == 2
        async with running.chat(stream=True) as response:
            assert response.status == 400
            error = error_of(await response.read())
        assert error["code"] == "suspected_request"
        assert len(found.asked) == 2
        async with running.chat(stream=True, seed=7) as response:
            assert b"[DONE]" in await response.read()


async def test_a_node_that_loses_its_engine_before_it_answers_is_replaced_as_one_that_dies() -> None:
    async with cluster() as running, nodes(running, lose_engine, complete) as found:
        async with running.chat(stream=True) as response:
            assert (response.status, await response.read()) == (200, SHOWN)
        assert [ticket.attempt for ticket in found.tickets] == [0, 1]


async def test_a_request_that_lost_one_node_may_come_again() -> None:
    config = dataclasses.replace(proxy_config(), relay=RelayConfig(resume_wait_s=0.0))
    async with cluster(config) as running, nodes(running, die_at_once, *[complete] * 4, count=2) as found:
        for _ in range(2):
            async with running.chat(stream=True) as response:
                assert b"[DONE]" in await response.read()
        assert len(found.asked) == 3


async def give_back(exchange: Exchange) -> None:
    """Does what a decode node does that has lost its prefill node, or the link to it."""
    assert ticket_in(exchange.request).terms.gives_back
    error = {"message": "prefill node p was lost with this request", "type": "server_error", "param": "p"}
    await exchange.answer(PrefillLost.status, msgspec.json.encode({"error": error}), connection="close")


async def give_back_in_another_form(exchange: Exchange) -> None:
    """Gives a request back in an answer that has no place for the prefill node's name, as Anthropic's form has none."""
    error = b'{"type": "error", "error": {"message": "prefill node p was lost with this request"}}'
    await exchange.answer(PrefillLost.status, error, connection="close")


async def die_after_the_prefill_node(exchange: Exchange) -> None:
    exchange.die()


async def says_that_its_engine_is_lost(exchange: Exchange) -> None:
    await exchange.answer(503, b'{"status": "engine lost"}')


async def hangs(exchange: Exchange) -> None:
    await exchange.gone()


@asynccontextmanager
async def with_prefill_node(running: Cluster, *looks: Behaviour) -> AsyncIterator[FakeNode]:
    """Registers a prefill node ``p``, which answers whoever asks whether it lives as the first of ``looks``, and so on.

    When all of them are used up, it dies.
    """
    left = list(looks)

    async def behave(exchange: Exchange) -> None:
        assert exchange.request.path == "/health"
        await (left.pop(0) if left else die_at_once)(exchange)

    async with FakeNode(behave) as node:
        await running.add(node_info("p", Role.PREFILL, node.url))
        yield node


DEATHS: list[list[Behaviour]] = [[says_that_its_engine_is_lost], [answer_ok], [answer_ok, lose_engine], [hangs]]
"""What prefill nodes answer that are lost."""


async def test_a_prefill_node_of_which_two_nodes_tell_counts_once() -> None:
    async with (
        cluster() as running,
        with_prefill_node(running),
        nodes(running, give_back, give_back, complete, count=2, role=Role.DECODE) as found,
    ):
        async with running.chat(stream=True) as response:
            assert (response.status, await response.read()) == (200, SHOWN)
        assert len(found.asked) == 3


async def test_a_prefill_node_counts_among_the_two() -> None:
    """It is the decode node that says so, and the same node may be asked again: it is not lost."""
    async with (
        cluster() as running,
        with_prefill_node(running),
        nodes(running, give_back, die_after_the_prefill_node, *[complete] * 4, count=1, role=Role.DECODE) as found,
    ):
        async with running.chat(stream=True) as response:
            assert response.status == 502
            error = error_of(await response.read())
        assert error["code"] == "upstream_lost"
        assert "prefill node p was lost with this request" in str(error["message"])
        assert len(found.asked) == 2
        async with running.chat(stream=True) as response:
            assert response.status == 400
            assert "prefill node p" in str(error_of(await response.read())["message"])
        assert len(found.asked) == 2


@pytest.mark.parametrize("looks", DEATHS)
async def test_a_prefill_node_that_dies_between_looks_or_hangs_is_lost_too(
    looks: list[Behaviour], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve_proxy.continuation.losses.LOOK_S", 0.3)
    async with (
        cluster() as running,
        with_prefill_node(running, *looks),
        nodes(running, give_back, die_at_once, count=1, role=Role.DECODE) as found,
    ):
        async with running.chat(stream=True) as response:
            assert response.status == 502
        assert [ticket.terms.gives_back for ticket in found.tickets] == [True, True]


async def test_a_prefill_node_that_the_proxy_has_dropped_is_lost_whoever_answers_at_its_address() -> None:
    async with cluster() as running, FakeNode(answer_ok) as successor, AsyncExitStack() as stack:
        silent = await stack.enter_async_context(
            heard(node_info("p", Role.PREFILL, successor.url), running.addresses.control)
        )

        async def give_back_when_it_is_dropped(exchange: Exchange) -> None:
            silent.set()
            await running.dropped("p")
            await give_back(exchange)

        behaviours = [give_back_when_it_is_dropped, die_at_once]
        await stack.enter_async_context(nodes(running, *behaviours, count=1, role=Role.DECODE))
        async with running.chat(stream=True) as response:
            assert response.status == 502
        assert not successor.requests


@pytest.mark.parametrize("back", [give_back, give_back_in_another_form])
async def test_a_broken_link_between_two_nodes_that_live_is_no_loss(back: Behaviour) -> None:
    """The decode node is asked once more, without this prefill node, and computes the prompt itself."""
    async with (
        cluster() as running,
        with_prefill_node(running, *[answer_ok] * LOOKS),
        nodes(running, back, die_at_once, complete, complete, count=2, role=Role.DECODE) as found,
    ):
        for _ in range(2):
            async with running.chat(stream=True) as response:
                assert (response.status, await response.read()) == (200, SHOWN)
        assert [names_of(ticket) for ticket in found.tickets] == [["p"], [], [], ["p"]]


def names_of(ticket: Ticket) -> list[str]:
    """Returns the names of the prefill nodes that may be asked."""
    return [target.name for target in ticket.terms.prefill]


async def give_back_for_the_first(exchange: Exchange) -> None:
    """Does what a decode node does that has lost the first prefill node of its ticket, or the link to it."""
    name = ticket_in(exchange.request).terms.prefill[0].name
    error = msgspec.json.encode({"error": {"message": f"prefill node {name} was lost", "param": name}})
    await exchange.answer(PrefillLost.status, error, connection="close")


@asynccontextmanager
async def four_prefill_nodes(
    running: Cluster, decode: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Nodes, dict[str, AsyncExitStack]]]:
    """Yields one decode node that does ``decode``, and the prefill nodes, each of which ends with its stack."""
    monkeypatch.setattr("pdserve_proxy.continuation.losses.BETWEEN_LOOKS_S", 0.0)
    async with AsyncExitStack() as stack:
        ends = {name: await stack.enter_async_context(AsyncExitStack()) for name in "pqrs"}
        for name, end in ends.items():
            node = await end.enter_async_context(FakeNode(answer_ok))
            await running.add(node_info(name, Role.PREFILL, node.url))
        yield await stack.enter_async_context(nodes(running, *[decode] * 4, count=1, role=Role.DECODE)), ends


async def test_a_broken_link_does_not_hide_the_prefill_nodes_that_die_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a request that kills nodes would go on to further prefill nodes, and its decode nodes would be next."""

    async def lose_all_but_the_first(exchange: Exchange) -> None:
        if len(found.tickets) > 1:
            await ends[ticket_in(exchange.request).terms.prefill[0].name].aclose()
        await give_back_for_the_first(exchange)

    async with cluster() as running, four_prefill_nodes(running, lose_all_but_the_first, monkeypatch) as (found, ends):
        async with running.chat(stream=True) as response:
            assert response.status == 502
        asked = [names_of(ticket) for ticket in found.tickets]
        assert len({names[0] for names in asked}) == len(asked) == 3
        assert asked[0][0] not in asked[1] + asked[2]


async def test_a_request_that_has_lost_two_links_goes_without_a_prefill_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose_links(exchange: Exchange) -> None:
        await (give_back_for_the_first if names_of(ticket_in(exchange.request)) else complete)(exchange)

    async with cluster() as running, four_prefill_nodes(running, lose_links, monkeypatch) as (found, _):
        async with running.chat(stream=True) as response:
            assert (response.status, await response.read()) == (200, SHOWN)
        first, second, third = map(names_of, found.tickets)
        assert first[0] != second[0]
        assert third == []


async def test_a_stream_that_goes_on_outlives_a_broken_link_too() -> None:
    """Without the look at the prefill node, the lost decode node and two broken links would be one loss too many."""
    behaviours = [dies_at(2), give_back, dies_at(3), complete, complete]
    async with (
        cluster() as running,
        with_prefill_node(running, *[answer_ok] * LOOKS),
        nodes(running, *behaviours, count=4, role=Role.DECODE) as found,
    ):
        for _ in range(2):
            async with running.chat(stream=True) as response:
                assert (response.status, await response.read()) == (200, SHOWN)
        assert [names_of(ticket) for ticket in found.tickets] == [["p"], ["p"], [], [], ["p"]]


async def test_a_request_whose_prefill_node_is_lost_is_asked_for_again_at_the_same_node() -> None:
    async with cluster() as running, nodes(running, give_back, complete, count=1) as found:
        async with running.chat(stream=True) as response:
            assert b"[DONE]" in await response.read()
        assert len(found.asked) == 2


async def test_a_stream_that_goes_on_survives_the_loss_of_one_prefill_node_and_not_of_two() -> None:
    for back, whole in ((1, True), (2, False)):
        behaviours = [dies_at(2), *[give_back] * back, complete]
        async with cluster() as running, nodes(running, *behaviours, *[complete] * 4, count=4) as found:
            async with running.chat(stream=True) as response:
                assert (b"[DONE]" in await response.read()) is whole
            assert len(found.asked) == 3
