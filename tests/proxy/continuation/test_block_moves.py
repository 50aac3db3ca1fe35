"""An answer whose node runs out of blocks goes on at a node that has some, and stays where it is if there is none."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec
import pytest

from pdserve.control.journal import move_block, move_line
from pdserve.wire.cache_groups import Keep
from pdserve.wire.discovery import GroupCapacity, NodeLoad
from pdserve.wire.terms import Prepared
from pdserve_proxy.continuation import move, resume
from tests.proxy.cluster import Cluster, cluster, eventually, metric
from tests.proxy.continuation.test_move import BEGUN, Others, draining, entries, fetchable, prepare
from tests.proxy.continuation.test_move import moves as drain_moves
from tests.proxy.continuation.test_resume import config, nothing_is_left, resumes, shown
from tests.proxy.fake_node import Behaviour, Exchange, FakeNode
from tests.proxy.journaling_nodes import ANSWER, SHOWN, answer_up_to, complete, die_at_once, refuses, ticket_in
from tests.proxy.relay import test_complete_answer

TOKENS = 100
"""Seven blocks of 16 tokens."""
ROOMY = NodeLoad(running=1, free_blocks=9)
"""After seven blocks, a node keeps two of its 16."""
NODE = "old"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "NEXT_EVENT_S", 0.05)


@dataclass
class Crowded:
    """A node that sends the first events of an answer, says when told that it has no room, and sends the rest."""

    crowded: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the proxy has closed the connection."""

    async def __call__(self, exchange: Exchange) -> None:
        await answer_up_to(exchange, BEGUN)
        await self.crowded.wait()
        await exchange.chunk(move_block(TOKENS))
        gone, going_on = asyncio.create_task(exchange.gone()), asyncio.create_task(self.go_on.wait())
        await asyncio.wait([gone, going_on], return_when=asyncio.FIRST_COMPLETED)
        if going_on.done() and not gone.done():
            await exchange.chunk(b"".join(ANSWER[BEGUN:]))
            await exchange.finish()
        going_on.cancel()
        await gone
        self.left.set()


async def block_moves(running: Cluster, outcome: str) -> float:
    return await metric(running, f'pdserve_proxy_block_moves_total{{outcome="{outcome}"}}')


async def ended(running: Cluster, outcome: str, count: int = 1) -> None:
    async def counted() -> bool:
        return await block_moves(running, outcome) == count

    await eventually(counted, f"{count} answers are {outcome}")


async def add(
    running: Cluster, others: Others, *loads: NodeLoad, groups: tuple[GroupCapacity, ...] = ()
) -> list[bytes]:
    """Adds a node for each of ``loads``, and waits until the proxy has heard of these loads. Returns their boot ids."""
    infos = []
    for number, load in enumerate(loads):
        node = await running.nodes.enter_async_context(FakeNode(others.behave))
        info = fetchable(f"n{number}", node)
        capacity = msgspec.structs.replace(info.capacity, groups=groups)
        infos.append(msgspec.structs.replace(info, capacity=capacity))
        await running.add(infos[-1], load=load)

    async def heard() -> bool:
        async with running.http.get("/instances") as response:
            said = {node["name"]: node["load"] for node in await response.json()}
        return all(
            (said[f"n{number}"]["free_blocks"], said[f"n{number}"]["waiting"]) == (load.free_blocks, load.waiting)
            for number, load in enumerate(loads)
        )

    await eventually(heard, "the proxy knows the loads")
    return [info.boot_id for info in infos]


async def test_a_stream_moves_to_a_node_with_free_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdserve_proxy.continuation")
    node = Crowded()

    async def go_on(exchange: Exchange) -> None:
        await node.left.wait()  # the old connection is closed before the new node is asked for the stream
        await complete(exchange)

    async with cluster() as running, draining(running, node, prepare, go_on) as old, old.stream() as response:
        await add(running, old.others, ROOMY)
        node.crowded.set()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        tickets = [ticket_in(request) for request in old.others.asked]
        assert [ticket.terms.resume is not None and ticket.terms.resume.prepare for ticket in tickets] == [True, False]
        assert [[holder.name for holder in ticket.terms.holders] for ticket in tickets] == [[NODE]] * 2
        assert old.others.journals == [entries(BEGUN)] * 2, "the wish is no entry of the journal"
        assert await block_moves(running, "moved") == 1
        assert await drain_moves(running, "moved") == 0
        assert await resumes(running, "resumed") == 0
        assert await metric(running, 'pdserve_proxy_resume_gap_seconds_count{kind="moved"}') == 1
        await nothing_is_left(running)
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if line.endswith(f"is to leave {NODE} for want of blocks: to=n0 tokens={TOKENS}")]
    assert [line for line in said if f"moved from={NODE} to=n0" in line]


@pytest.mark.parametrize(
    "load",
    [NodeLoad(running=1, free_blocks=8), NodeLoad(running=4, free_blocks=16), NodeLoad(waiting=1, free_blocks=16)],
)
async def test_a_stream_stays_where_no_other_node_has_room(load: NodeLoad) -> None:
    """It has too few blocks, no place, or requests that wait for a place."""
    node = Crowded()
    async with cluster() as running, draining(running, node) as old, old.stream() as response:
        await add(running, old.others, load)
        node.crowded.set()
        await ended(running, "stayed")
        node.go_on.set()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert old.others.asked == []
        await nothing_is_left(running)


async def test_of_two_nodes_the_one_with_room_is_asked() -> None:
    node = Crowded()
    async with cluster() as running, draining(running, node, prepare, complete) as old, old.stream() as response:
        _, roomy = await add(running, old.others, NodeLoad(free_blocks=2), ROOMY)
        node.crowded.set()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert [ticket_in(request).node for request in old.others.asked] == [roomy] * 2


GROUPS = (
    GroupCapacity("whole contexts", Keep.ALL, 16, 4096),
    GroupCapacity("window 32", Keep.WINDOW, 16, 4096, 32),
    GroupCapacity("state", Keep.LATEST, 16, 4096),
)
"""An answer of seven blocks has four in the window, and two states. A node keeps two of its 16 of each."""


@pytest.mark.parametrize(
    ("free", "outcome"), [((6, 4), "moved"), ((5, 4), "stayed"), ((6, 3), "stayed"), ((), "moved")]
)
async def test_a_stream_moves_only_where_windows_and_states_have_room(free: tuple[int, ...], outcome: str) -> None:
    node = Crowded()
    load = msgspec.structs.replace(ROOMY, bounded_free_blocks=free)
    async with cluster() as running, draining(running, node, prepare, complete) as old, old.stream() as response:
        await add(running, old.others, load, groups=GROUPS)
        node.crowded.set()
        await ended(running, outcome)
        node.go_on.set()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        await nothing_is_left(running)


async def lacks_all(exchange: Exchange) -> None:
    """A node that had no room for the blocks after all."""
    await exchange.answer(200, msgspec.json.encode(Prepared(True, 16, {0: 33})))


@pytest.mark.parametrize("first", [refuses(503), refuses(400), die_at_once, lacks_all])
async def test_a_stream_stays_where_the_other_node_does_not_prepare(first: Behaviour) -> None:
    """Nothing has changed, and the next wish may succeed."""
    node = Crowded()
    async with cluster() as running, draining(running, node, first) as old, old.stream() as response:
        await add(running, old.others, ROOMY)
        node.crowded.set()
        await ended(running, "stayed")
        node.go_on.set()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert len(old.others.asked) == 1
        await nothing_is_left(running)


async def test_a_stream_goes_back_where_the_other_node_declines_it_after_the_cut() -> None:
    """The old node is no worse than before, and there is no other one."""
    node, asked = Crowded(), 0

    async def behave(exchange: Exchange) -> None:
        nonlocal asked
        asked += 1
        await (node(exchange) if asked == 1 else complete(exchange))

    async with cluster() as running, draining(running, behave, prepare, refuses(503)) as old, old.stream() as response:
        await add(running, old.others, ROOMY)
        node.crowded.set()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert asked == 2
        assert [await block_moves(running, outcome) for outcome in ("moved", "stayed")] == [0, 1]
        await nothing_is_left(running)


async def test_a_stream_moves_for_room_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all nodes are short of blocks, it would go around."""
    monkeypatch.setattr(move, "MAX_MOVES_FOR_BLOCKS", 1)
    node, has_moved, go_on = Crowded(), asyncio.Event(), asyncio.Event()

    async def crowded_too(exchange: Exchange) -> None:
        await answer_up_to(exchange, BEGUN + 1)
        await has_moved.wait()
        await exchange.chunk(move_block(TOKENS))
        await go_on.wait()
        await exchange.chunk(b"".join(ANSWER[BEGUN + 1 :]))
        await exchange.finish()

    async with cluster() as running, draining(running, node, prepare, crowded_too) as old, old.stream() as response:
        await add(running, old.others, ROOMY, ROOMY)
        node.crowded.set()
        await ended(running, "moved")
        has_moved.set()
        await ended(running, "stayed")
        go_on.set()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert [await block_moves(running, outcome) for outcome in ("moved", "stayed")] == [1, 1]


async def test_a_wish_while_all_turns_are_taken_is_dropped() -> None:
    """What drains comes first, and nobody waits for a turn to make room."""
    node, preparing, go_on = Crowded(), asyncio.Event(), asyncio.Event()

    async def prepare_late(exchange: Exchange) -> None:
        preparing.set()
        await go_on.wait()
        await prepare(exchange)

    wanted = config(max_moves=1)
    async with (
        cluster(wanted) as running,
        draining(running, node, prepare_late, complete) as old,
        old.stream() as one,
        old.stream() as two,
    ):
        await add(running, old.others, ROOMY)
        node.crowded.set()  # both wish to move
        await preparing.wait()
        await ended(running, "stayed")
        go_on.set()
        node.go_on.set()
        for response in (one, two):
            assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert await block_moves(running, "moved") + await block_moves(running, "ended") == 1


async def test_a_node_that_drains_after_a_wish_in_vain_is_left() -> None:
    node, refusing, drains = Crowded(), asyncio.Event(), asyncio.Event()

    async def refuse(exchange: Exchange) -> None:
        refusing.set()
        await drains.wait()
        await refuses(503)(exchange)

    drains = asyncio.Event()
    async with (
        cluster() as running,
        draining(running, node, refuse, prepare, complete) as old,
        old.stream() as response,
    ):
        await add(running, old.others, ROOMY, ROOMY)
        node.crowded.set()
        await refusing.wait()
        old.drain()
        await eventually(lambda: _drains(running), "the proxy knows that it drains")
        drains.set()
        assert await response.read() == SHOWN[len(shown(BEGUN)) :]
        assert await block_moves(running, "stayed") == 1
        assert await drain_moves(running, "moved") == 1
        await nothing_is_left(running)


async def _drains(running: Cluster) -> bool:
    async with running.http.get("/instances") as response:
        return "draining" in [entry["state"] for entry in await response.json()]


async def test_an_answer_in_one_piece_moves_too() -> None:
    crowded_now = asyncio.Event()

    async def hang(exchange: Exchange) -> None:
        await test_complete_answer.answer_up_to_part(exchange, 2)
        await crowded_now.wait()
        await exchange.chunk(test_complete_answer.LINES[2] + move_line(TOKENS))
        await exchange.gone()

    async with cluster() as running, draining(running, hang, prepare, test_complete_answer.complete) as old:
        asked = asyncio.create_task(running.ask())
        await eventually(lambda: bool(old.node.requests), "the node has it")
        await add(running, old.others, ROOMY)
        crowded_now.set()
        assert await asked == (200, test_complete_answer.BODY)
        assert old.others.journals[-1] == b"".join(test_complete_answer.LINES[:3]).replace(b":", b"")
        assert await block_moves(running, "moved") == 1
        await nothing_is_left(running)
