"""The streams of a node that drains move to other nodes, and their clients see a pause only."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest

from pdserve.control.journal import cut
from pdserve.http.guard import HALF_CLOSED_S
from pdserve.wire.discovery import NodeInfo, Role
from pdserve.wire.terms import Prepared
from pdserve_proxy.continuation import move, resume
from pdserve_proxy.relay.outcomes import MoveReason
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.routing.router import Route
from tests.proxy.cluster import Cluster, cluster, eventually, metric, node_info
from tests.proxy.continuation.test_resume import broken, config, nothing_is_left, resumes, shown
from tests.proxy.fake_node import Behaviour, Exchange, FakeNode, Received
from tests.proxy.journaling_nodes import (
    ANSWER,
    SHOWN,
    answer_up_to,
    begin_and_die,
    complete,
    die_at_once,
    hangs_at,
    refuses,
    split,
    ticket_in,
)
from tests.proxy.relay import test_complete_answer
from tests.proxy.shared_proxy import SharedProxy

BEGUN = 2
"""The events that a client has before its node drains."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "NEXT_EVENT_S", 0.05)
    monkeypatch.setattr(move, "LOOK_S", 0.01)
    monkeypatch.setattr(move, "RETRY_AFTER_S", 0.05)


async def moves(running: Cluster, outcome: str) -> float:
    return await metric(running, f'pdserve_proxy_moves_total{{outcome="{outcome}"}}')


async def moved(running: Cluster, outcome: str, count: int = 1) -> None:
    async def counted() -> bool:
        return await moves(running, outcome) == count

    await eventually(counted, f"{count} answers are {outcome}")


async def prepare(exchange: Exchange) -> None:
    announced = ticket_in(exchange.request).terms.resume
    assert announced is not None
    assert announced.prepare
    await exchange.answer(200, b'{"prepared":true}')


@dataclass
class Slow:
    """A node that sends the first events of an answer, and the others when its test says so."""

    more: bytes = b""
    """The bytes that follow the first events."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the proxy has closed the connection."""
    then: bytes | None = None
    """What it sends then. If it is None, it sends the rest of the answer, and ends it."""

    async def __call__(self, exchange: Exchange) -> None:
        await answer_up_to(exchange, BEGUN, more=self.more)
        gone, going_on = asyncio.create_task(exchange.gone()), asyncio.create_task(self.go_on.wait())
        await asyncio.wait([gone, going_on], return_when=asyncio.FIRST_COMPLETED)
        if going_on.done():
            await exchange.chunk(b"".join(ANSWER[BEGUN:]) if self.then is None else self.then)
            if self.then is None:
                await exchange.finish()
        going_on.cancel()
        await gone
        self.left.set()


@dataclass
class Hanging:
    """A node that says nothing."""

    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the proxy has closed the connection."""

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.gone()
        self.left.set()


@dataclass
class Others:
    """The nodes beside the one that drains, of which whichever is asked behaves as the next of ``behaviours``."""

    behaviours: list[Behaviour]
    asked: list[Received] = field(default_factory=list)

    async def behave(self, exchange: Exchange) -> None:
        self.asked.append(exchange.request)
        await self.behaviours.pop(0)(exchange)

    @property
    def journals(self) -> list[bytes]:
        return [split(request)[1] for request in self.asked]


def fetchable(name: str, node: FakeNode, max_running: int = 4) -> NodeInfo:
    info = node_info(name, Role.MIXED, node.url, max_running=max_running)
    return msgspec.structs.replace(info, control="tcp://127.0.0.1:9")


@dataclass
class Draining:
    """A node that drains while clients have begun to read its streams."""

    running: Cluster
    old: NodeInfo
    node: FakeNode
    others: Others

    async def add(self, count: int, max_running: int = 4) -> None:
        """Adds nodes that have one request already."""
        for number in range(count):
            node = await self.running.nodes.enter_async_context(FakeNode(self.others.behave))
            await self.running.add(fetchable(f"n{number}", node, max_running))

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields a stream of which the client has read the first events."""
        async with self.running.chat(stream=True) as response:
            assert await response.content.readexactly(len(shown(BEGUN))) == shown(BEGUN)
            yield response

    def drain(self) -> None:
        self.running.registrations[self.old.boot_id].drain()


@asynccontextmanager
async def draining(running: Cluster, old: Behaviour, *others: Behaviour) -> AsyncIterator[Draining]:
    async with FakeNode(old) as node:
        info = fetchable("old", node)
        await running.add(info)
        yield Draining(running, info, node, Others(list(others)))


def entries(count: int) -> bytes:
    return cut(b"".join(ANSWER[:count]))[1]


async def test_a_stream_moves_to_a_node_that_is_prepared(proxy: SharedProxy) -> None:
    slow = Slow()

    async def go_on(exchange: Exchange) -> None:
        await slow.left.wait()  # the old connection is closed before the new node is asked for the stream
        await complete(exchange)

    async with proxy.cluster() as running, draining(running, slow, prepare, go_on) as old, old.stream() as response:
        await old.add(1)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        tickets = [ticket_in(request) for request in old.others.asked]
        assert [ticket.attempt for ticket in tickets] == [1, 1]
        assert [[holder.name for holder in ticket.terms.holders] for ticket in tickets] == [["old"]] * 2
        assert [ticket.terms.resume is not None and ticket.terms.resume.prepare for ticket in tickets] == [True, False]
        assert tickets[0].terms.answer == tickets[1].terms.answer is not None
        assert old.others.journals == [entries(BEGUN)] * 2
        assert await moves(running, "moved") == 1
        assert await metric(running, 'pdserve_proxy_resume_gap_seconds_count{kind="moved"}') == 1
        assert await metric(running, 'pdserve_proxy_resume_gap_seconds_count{kind="lost"}') == 0
        assert await resumes(running, "resumed") == 0
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="ok"}') == 1
        assert await metric(running, "pdserve_proxy_relayed_bytes_total") == len(SHOWN)
        await nothing_is_left(running)


async def test_it_is_prepared_again_when_a_block_is_full(proxy: SharedProxy) -> None:
    """The first token that comes fills the block, and the node has to replay one token only."""
    slow = Slow(then=b"".join(ANSWER[BEGUN : BEGUN + 1]))

    async def prepare_first(exchange: Exchange) -> None:
        await exchange.answer(200, msgspec.json.encode(Prepared(True, 8, {0: 8})))
        slow.go_on.set()

    nodes = (prepare_first, prepare, complete)
    async with proxy.cluster() as running, draining(running, slow, *nodes) as old, old.stream() as response:
        await old.add(1)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert old.others.journals == [entries(BEGUN), entries(BEGUN + 1), entries(BEGUN + 1)]
        assert await moves(running, "moved") == 1
        await nothing_is_left(running)


async def test_where_much_has_come_it_is_prepared_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "MAX_LATER_BYTES", 0)
    slow = Slow(then=b"".join(ANSWER[BEGUN : BEGUN + 1]))

    async def prepare_first(exchange: Exchange) -> None:
        await exchange.answer(200, msgspec.json.encode(Prepared(True, 64, {0: 9})))
        slow.go_on.set()

    nodes = (prepare_first, prepare, complete)
    async with cluster() as running, draining(running, slow, *nodes) as old, old.stream() as response:
        await old.add(1)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert old.others.journals == [entries(BEGUN), entries(BEGUN + 1), entries(BEGUN + 1)]


@pytest.mark.parametrize("says", [b"", b"[]", b'{"prepared":true,"lacking":{"0":-1}}', b"{" * 2**21])
async def test_a_node_that_does_not_say_what_it_lacks_is_prepared(proxy: SharedProxy, says: bytes) -> None:
    async def prepare_oddly(exchange: Exchange) -> None:
        await exchange.answer(200, says)

    async with (
        proxy.cluster() as running,
        draining(running, Slow(), prepare_oddly, complete) as old,
        old.stream() as response,
    ):
        await old.add(1)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]


async def test_a_block_that_does_not_become_full_in_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "FULL_BLOCK_S", 0.02)

    async def lack_much(exchange: Exchange) -> None:
        await exchange.answer(200, msgspec.json.encode(Prepared(True, 8, {0: 7})))

    async with cluster() as running, draining(running, Slow(), lack_much, complete) as old, old.stream() as response:
        await old.add(1)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert await moves(running, "moved") == 1


@pytest.mark.parametrize("half", [b"", ANSWER[4][:1], ANSWER[4][:-1]])
@pytest.mark.parametrize("more", [b"", ANSWER[2][:4], ANSWER[2] + ANSWER[3][:-1]])
async def test_it_is_cut_exactly_between_events(more: bytes, half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old node goes on while the new one prepares, and is left behind what comes next."""
    monkeypatch.setattr(resume, "NEXT_EVENT_S", 0.3)
    slow = Slow(more, then=b"".join(ANSWER[2:4]).removeprefix(more) + half)

    async def prepare_first(exchange: Exchange) -> None:
        await prepare(exchange)
        slow.go_on.set()

    async with cluster() as running, draining(running, slow, prepare_first, complete) as old, old.stream() as response:
        await old.add(1)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        before, after = old.others.journals
        assert before in (entries(2), entries(3))
        assert after == entries(4)
        assert await moves(running, "moved") == 1


async def test_the_end_of_a_stream_that_comes_meanwhile_is_its_end(proxy: SharedProxy) -> None:
    slow, left = Slow(), asyncio.Event()

    async def hang(exchange: Exchange) -> None:
        slow.go_on.set()
        await exchange.gone()
        left.set()

    async with proxy.cluster() as running, draining(running, slow, hang) as old, old.stream() as response:
        await old.add(1)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        await left.wait()
        assert await moves(running, "ended") == 1
        await nothing_is_left(running)


async def test_a_client_that_leaves_while_a_node_prepares_frees_both(proxy: SharedProxy) -> None:
    slow, hanging = Slow(), Hanging()
    async with proxy.cluster() as running, draining(running, slow, hanging) as old:
        async with old.stream() as response:
            await old.add(1)
            old.drain()
            await eventually(lambda: bool(old.others.asked), "the new node prepares")
            response.close()
        async with asyncio.timeout(5 + 2 * HALF_CLOSED_S):
            await slow.left.wait()
            await hanging.left.wait()
            await nothing_is_left(running)
        assert await moves(running, "ended") == 1


async def test_a_client_that_leaves_at_the_cut_frees_both(proxy: SharedProxy) -> None:
    slow, hanging = Slow(), Hanging()
    async with proxy.cluster() as running, draining(running, slow, prepare, hanging) as old:
        async with old.stream() as response:
            await old.add(1)
            old.drain()
            await slow.left.wait()
            await eventually(lambda: len(old.others.asked) == 2, "the new node has it")
            response.close()
        async with asyncio.timeout(5 + 2 * HALF_CLOSED_S):
            await hanging.left.wait()
            await nothing_is_left(running)
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="client_gone"}') == 1


@pytest.mark.parametrize("first", [refuses(503), refuses(500), refuses(413), die_at_once])
async def test_a_node_that_does_not_prepare_is_passed_over(proxy: SharedProxy, first: Behaviour) -> None:
    async with (
        proxy.cluster() as running,
        draining(running, Slow(), first, prepare, complete) as old,
        old.stream() as response,
    ):
        await old.add(2)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        declined, prepared, resumed = (ticket_in(request).node for request in old.others.asked)
        assert declined != prepared == resumed
        assert await moves(running, "moved") == 1


@pytest.mark.parametrize("behaviours", [[die_at_once, die_at_once], [refuses(400)]])
async def test_an_answer_that_no_node_can_take_stays_where_it_is(
    proxy: SharedProxy, behaviours: list[Behaviour]
) -> None:
    slow = Slow()
    async with proxy.cluster() as running, draining(running, slow, *behaviours) as old, old.stream() as response:
        await old.add(3)
        old.drain()
        await moved(running, "stayed")
        slow.go_on.set()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert len(old.others.asked) == len(behaviours)
        assert [await moves(running, outcome) for outcome in ("moved", "ended")] == [0, 0]
        await nothing_is_left(running)


async def test_a_node_that_takes_too_long_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move, "PREPARE_S", 0.1)
    async with (
        cluster() as running,
        draining(running, Slow(), hangs_at(0), prepare, complete) as old,
        old.stream() as response,
    ):
        await old.add(2)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]


async def test_a_stream_waits_for_a_node_that_comes(proxy: SharedProxy) -> None:
    async with (
        proxy.cluster() as running,
        draining(running, Slow(), prepare, complete) as old,
        old.stream() as response,
    ):
        old.drain()
        await eventually(lambda: _said(running, "old", "state", "draining"), "the proxy knows that it drains")
        await old.add(1)
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert await moves(running, "moved") == 1


async def test_a_stream_stays_while_no_other_node_has_room(proxy: SharedProxy) -> None:
    async with (
        proxy.cluster() as running,
        draining(running, Slow(), prepare, complete) as old,
        old.stream() as response,
    ):
        await _add_full(running, old)
        old.drain()
        await eventually(lambda: _said(running, "old", "state", "draining"), "the proxy knows that it drains")
        roomy = await _add_roomy(running, old)
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert {ticket_in(request).node for request in old.others.asked} == {roomy}


async def test_after_the_cut_a_stream_goes_to_a_node_without_room_if_need_be(proxy: SharedProxy) -> None:
    async with (
        proxy.cluster() as running,
        draining(running, Slow(), prepare, refuses(503), complete) as old,
        old.stream() as response,
    ):
        await _add_full(running, old)
        roomy = await _add_roomy(running, old)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        prepared, refused, resumed = (ticket_in(request).node for request in old.others.asked)
        assert prepared == refused == roomy != resumed


async def _add_full(running: Cluster, old: Draining) -> None:
    """Adds a node whose only place is taken, and waits until the proxy knows that."""
    await old.add(1, max_running=1)
    await eventually(lambda: _said(running, "n0", "running", 1), "the proxy knows its load")


async def _add_roomy(running: Cluster, old: Draining) -> bytes:
    """Adds a node with free places, and returns its boot id."""
    known = set(running.registrations)
    await old.add(1)
    (roomy,) = running.registrations.keys() - known
    return roomy


async def _said(running: Cluster, name: str, what: str, value: object) -> bool:
    """Returns whether the proxy says this of a node."""
    async with running.http.get("/instances") as response:
        (node,) = [entry for entry in await response.json() if entry["name"] == name]
    return bool({**node, **node["load"]}[what] == value)


async def _count(running: Cluster, state: str, count: int) -> bool:
    """Returns whether the proxy says of so many nodes that they are in this state."""
    async with running.http.get("/instances") as response:
        return [entry["state"] for entry in await response.json()].count(state) == count


async def test_new_requests_go_elsewhere(proxy: SharedProxy) -> None:
    slow = Slow()
    wanted = [complete] * 4
    async with proxy.cluster() as running, draining(running, slow, prepare, complete, *wanted) as old:
        async with old.stream() as response:
            await old.add(1)
            old.drain()
            assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        for _ in wanted:
            async with running.chat(stream=True) as response:
                assert await response.read() == SHOWN
        assert len(old.others.asked) == 2 + len(wanted)


@pytest.mark.parametrize("second", [begin_and_die, refuses(503), refuses(500)])
async def test_a_node_that_is_lost_after_the_cut_is_the_first_one(proxy: SharedProxy, second: Behaviour) -> None:
    """As after any loss, another node goes on; the old one is left already."""
    async with (
        proxy.cluster() as running,
        draining(running, Slow(), prepare, second, complete) as old,
        old.stream() as response,
    ):
        await old.add(2)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        prepared, lost, resumed = (ticket_in(request).node for request in old.others.asked)
        assert prepared == lost != resumed
        await nothing_is_left(running)


async def test_a_stream_that_no_node_takes_after_the_cut_ends_with_an_error() -> None:
    wanted = config(resume_wait_s=0.05)
    async with (
        cluster(wanted) as running,
        draining(running, Slow(), prepare, begin_and_die) as old,
        old.stream() as response,
    ):
        await old.add(1)
        old.drain()
        assert broken(shown(BEGUN) + await response.read(), BEGUN) == "upstream_lost"
        assert await resumes(running, "no_node") == 1
        await nothing_is_left(running)


async def test_a_node_that_dies_while_another_one_prepares_is_lost_as_always(proxy: SharedProxy) -> None:
    dying, left = asyncio.Event(), asyncio.Event()

    async def die(exchange: Exchange) -> None:
        await answer_up_to(exchange, BEGUN)
        await dying.wait()
        exchange.die()

    async def hang(exchange: Exchange) -> None:
        dying.set()
        await left.wait()
        await prepare(exchange)

    async with proxy.cluster() as running, draining(running, die, hang, complete) as old, old.stream() as response:
        await old.add(1)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        left.set()
        prepared, resumed = (ticket_in(request).terms.holders for request in old.others.asked)
        assert [holder.name for holder in prepared] == ["old"]
        assert resumed == (), "no node asks one that is lost"
        assert await resumes(running, "resumed") == 1
        await nothing_is_left(running)
        assert await moves(running, "moved") == 0


async def go_on_for_now(exchange: Exchange) -> None:
    """Sends one more event, and hangs."""
    announced = split(exchange.request)[1].count(b"\n")
    await exchange.begin_stream()
    await exchange.chunk(ANSWER[announced])
    await exchange.gone()


async def stays(exchange: Exchange) -> None:
    """Waits for as long as the proxy may take to leave the node, and checks that it does not."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(4 * resume.NEXT_EVENT_S):
            await exchange.gone()


async def test_a_stream_that_is_resumed_while_a_node_prepares_stays_where_it_is(proxy: SharedProxy) -> None:
    dying, prepared, resumed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def die(exchange: Exchange) -> None:
        await answer_up_to(exchange, BEGUN)
        await dying.wait()
        exchange.die()

    async def prepare_late(exchange: Exchange) -> None:
        dying.set()
        await resumed.wait()
        await prepare(exchange)
        prepared.set()

    async def go_on(exchange: Exchange) -> None:
        await answer_up_to(exchange, BEGUN + 1)
        resumed.set()
        await prepared.wait()
        await stays(exchange)
        await exchange.chunk(b"".join(ANSWER[BEGUN + 1 :]))
        await exchange.finish()

    async with (
        proxy.cluster() as running,
        draining(running, die, prepare_late, go_on, complete) as old,
        old.stream() as response,
    ):
        await old.add(2)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert len(old.others.asked) == 2
        assert await resumes(running, "resumed") == 1
        assert await moves(running, "moved") == 0
        await nothing_is_left(running)


async def test_a_node_that_begins_to_drain_while_it_prepares_does_not_get_the_stream(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running:

        async def drain(exchange: Exchange) -> None:
            boot_id = ticket_in(exchange.request).node
            running.registrations[boot_id].drain()
            await eventually(lambda: _count(running, "draining", 2), "the proxy knows that it drains too")
            await prepare(exchange)

        async with draining(running, Slow(), drain, prepare, complete) as old, old.stream() as response:
            await old.add(2)
            old.drain()
            assert await response.read() == SHOWN[len(shown(BEGUN)) :]
            left, prepared, resumed = (ticket_in(request).node for request in old.others.asked)
            assert left != prepared == resumed


async def test_a_loss_before_the_cut_is_a_loss_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cutting, move_to = asyncio.Event(), resume.Resumption.move_to

    def noted(
        resumption: resume.Resumption, route: Route, reason: MoveReason
    ) -> asyncio.Future[resume.Declined | None]:
        cutting.set()
        return move_to(resumption, route, reason)

    monkeypatch.setattr(resume.Resumption, "move_to", noted)

    async def die(exchange: Exchange) -> None:
        await answer_up_to(exchange, BEGUN)
        await cutting.wait()
        exchange.die()

    async def go_on_late(exchange: Exchange) -> None:
        await stays(exchange)
        await answer_up_to(exchange, BEGUN + 1)
        exchange.die()

    async with (
        cluster() as running,
        draining(running, die, prepare, go_on_late, complete) as old,
        old.stream() as response,
    ):
        await old.add(2)
        old.drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert await resumes(running, "resumed") == 2
        assert await moves(running, "moved") == 0


async def test_a_stream_that_is_cut_is_not_prepared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client reads slowly, so that the proxy has bytes of the old node left when the turn is over."""
    monkeypatch.setattr(move, "CUT_OVER_S", 0.05)
    left, again = asyncio.Event(), asyncio.Event()
    leave_node = RelayedRequest.leave_node
    leaving = []

    def note(relayed: RelayedRequest) -> None:
        leaving.append(relayed)
        left.set()

    monkeypatch.setattr(RelayedRequest, "leave_node", note)

    async def finish(exchange: Exchange) -> None:
        again.set()
        await complete(exchange)

    async with cluster() as running, draining(running, Slow(), prepare, finish) as old, old.stream() as response:
        await old.add(1)
        old.drain()
        await left.wait()
        asked_again, _ = await asyncio.wait([asyncio.create_task(again.wait())], timeout=0.4)
        assert not asked_again
        leave_node(leaving[0])
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert await moves(running, "moved") == 1
        pause_s = await metric(running, 'pdserve_proxy_resume_gap_seconds_sum{kind="moved"}')
        assert pause_s > 0.3, "it counts from the last event of the old node"


async def test_an_answer_that_was_kept_at_a_node_moves_from_the_next_one(proxy: SharedProxy) -> None:
    dying = asyncio.Event()

    async def die(exchange: Exchange) -> None:
        await answer_up_to(exchange, BEGUN)
        await dying.wait()
        exchange.die()

    async with (
        proxy.cluster() as running,
        draining(running, die, refuses(400), go_on_for_now, prepare, complete) as old,
        old.stream() as response,
    ):
        await old.add(2)
        old.drain()
        await moved(running, "stayed")
        dying.set()
        await eventually(lambda: len(old.others.asked) == 2, "another node goes on")
        running.registrations[ticket_in(old.others.asked[1]).node].drain()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert await moves(running, "moved") == 1


async def test_so_many_move_at_a_time() -> None:
    go_on, preparing, most = asyncio.Event(), 0, 0

    async def behave(exchange: Exchange) -> None:
        nonlocal preparing, most
        announced = ticket_in(exchange.request).terms.resume
        assert announced is not None
        if not announced.prepare:
            await complete(exchange)
            return
        preparing += 1
        most = max(most, preparing)
        await go_on.wait()
        preparing -= 1
        await prepare(exchange)

    async with (
        cluster(config(max_moves=2)) as running,
        draining(running, Slow(), *[behave] * 10) as old,
        old.stream() as one,
        old.stream() as two,
        old.stream() as three,
    ):
        await old.add(2)
        old.drain()
        await eventually(lambda: preparing == 2, "two prepare")
        go_on.set()
        for response in (one, two, three):
            assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert most == 2
        assert await moves(running, "moved") == 3


async def test_a_stream_moves_as_often_as_its_nodes_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MAX_RESUMES_OF_ONE", 1)

    behaviours = [prepare, go_on_for_now, prepare, go_on_for_now, prepare, complete]
    async with cluster() as running, draining(running, Slow(), *behaviours) as old, old.stream() as response:
        known = {old.old.boot_id}
        for number in range(3):
            await old.add(1)
            (newest,) = running.registrations.keys() - known
            old.drain()
            await moved(running, "moved", number + 1)
            known.add(newest)
            old.old = msgspec.structs.replace(old.old, boot_id=newest)
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]


async def test_a_journaled_answer_in_one_piece_moves_too(proxy: SharedProxy) -> None:
    async with (
        proxy.cluster() as running,
        draining(running, test_complete_answer.hangs_at(2), prepare, test_complete_answer.complete) as old,
    ):
        asked = asyncio.create_task(running.ask())
        await eventually(lambda: bool(old.node.requests), "the node has it")
        await old.add(1)
        old.drain()
        assert await asked == (200, test_complete_answer.BODY)
        assert await moves(running, "moved") == 1
        await nothing_is_left(running)


async def test_the_log_says_from_where_to_where(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdserve_proxy.continuation")
    async with cluster() as running, draining(running, Slow(), prepare, complete) as old, old.stream() as response:
        await old.add(1)
        old.drain()
        await response.read()
    said = [record.getMessage() for record in caplog.records]
    assert not [line for line in said if "lost" in line]
    (line,) = [line for line in said if " moved " in line]
    assert re.fullmatch(r"request_id=[0-9a-f]{32} moved from=old to=n0 events=2 gap_s=\d+\.\d{3}: drain", line)
