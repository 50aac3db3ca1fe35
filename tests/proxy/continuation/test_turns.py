"""Without a number of its own, a process resumes as many streams at once as its share of the prefill nodes computes."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.wire.discovery import NodeHeartbeat, NodeInfo, NodeLoad, Register, Role
from pdserve.wire.ids import new_id
from pdserve_proxy.continuation.turns import RESUMES_A_NODE, ResumeLimit, ResumeTurns
from pdserve_proxy.registry.registry import Registry
from tests.proxy.cluster import eventually, node_info


def registered(*infos: NodeInfo) -> Registry:
    registry = Registry(1.0, 3)
    for info in infos:
        registry.handle(Register(info), 0.0)
    return registry


def prefill(count: int) -> list[NodeInfo]:
    return [node_info(f"p{number}", Role.PREFILL) for number in range(count)]


DECODE = node_info("d", Role.DECODE)


def test_a_number_that_is_given_counts() -> None:
    assert ResumeLimit(7, registered(DECODE, *prefill(3)), processes=4).now() == 7


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("nodes", [1, 5, 40])
def test_it_grows_with_the_prefill_nodes_and_processes_share_it(nodes: int, processes: int) -> None:
    registry = registered(*prefill(nodes), *(node_info(f"d{number}", Role.DECODE) for number in range(3)))
    assert ResumeLimit(0, registry, processes).now() == RESUMES_A_NODE * nodes // processes


def test_other_proxies_have_their_share() -> None:
    registry = registered(DECODE, *prefill(6))
    registry.handle(NodeHeartbeat(DECODE.boot_id, NodeLoad(), proxies=tuple(new_id() for _ in range(3))), 0.1)
    assert registry.live_proxies == 3
    assert ResumeLimit(0, registry, 2).now() == RESUMES_A_NODE


def test_nodes_that_compute_their_own_prompts_count_too() -> None:
    mixed = [node_info(f"m{number}", Role.MIXED) for number in range(3)]
    assert ResumeLimit(0, registered(*mixed), 1).now() == 3 * RESUMES_A_NODE
    lonely = registered(DECODE, *prefill(1))
    lonely.serving()
    lonely.mark_unreachable(prefill_of(lonely).boot_id)
    assert ResumeLimit(0, lonely, 1).now() == RESUMES_A_NODE, "the decode node computes them by itself"


def prefill_of(registry: Registry) -> NodeInfo:
    (info,) = (node.info for node in registry.snapshot().nodes if node.info.role is Role.PREFILL)
    return info


def test_an_empty_cluster_leaves_one_turn() -> None:
    assert ResumeLimit(0, registered(), 1).now() == 1


class Waiter:
    """A task that wants a turn, and keeps it until it is told."""

    def __init__(self, turns: ResumeTurns) -> None:
        self.has_turn = False
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run(turns))

    async def _run(self, turns: ResumeTurns) -> None:
        async with turns.turn():
            self.has_turn = True
            await self.may_end.wait()
        self.has_turn = False


async def test_turns_come_in_order_and_more_of_them_with_more_nodes() -> None:
    registry = registered(DECODE, *prefill(1))
    turns = ResumeTurns(ResumeLimit(0, registry, 1))
    registry.on_change(turns.give)
    waiters = [Waiter(turns) for _ in range(6)]

    def having() -> list[int]:
        return [number for number, waiter in enumerate(waiters) if waiter.has_turn]

    await eventually(lambda: having() == [0, 1], "two have a turn")
    assert turns.none_left
    waiters[0].may_end.set()
    await eventually(lambda: having() == [1, 2], "the next one follows")
    registry.handle(Register(node_info("another", Role.PREFILL)), 0.5)
    await eventually(lambda: having() == [1, 2, 3, 4], "a second node brings two more")
    for waiter in waiters:
        waiter.may_end.set()
    await asyncio.gather(*(waiter.task for waiter in waiters))
    assert not turns.none_left


async def test_the_turns_of_a_proxy_that_is_gone_go_to_those_who_wait_here() -> None:
    registry = registered(DECODE, *prefill(1))
    here, there = new_id(), new_id()
    registry.handle(NodeHeartbeat(DECODE.boot_id, NodeLoad(), proxies=(here, there)), 0.1)
    turns = ResumeTurns(ResumeLimit(0, registry, 1))
    registry.on_change(turns.give)
    registry.on_node(turns.heard)
    first, second = waiters = [Waiter(turns) for _ in range(2)]
    await eventually(lambda: first.has_turn, "the first has its turn")
    registry.handle(NodeHeartbeat(DECODE.boot_id, NodeLoad(), proxies=(here, there)), 0.2)
    await asyncio.sleep(0)
    assert not second.has_turn
    registry.handle(NodeHeartbeat(DECODE.boot_id, NodeLoad(), proxies=(here,)), 0.3)
    await eventually(lambda: second.has_turn, "a node says that there is one proxy only")
    for waiter in waiters:
        waiter.may_end.set()
    await asyncio.gather(*(waiter.task for waiter in waiters))


async def test_one_that_leaves_takes_no_turn_along() -> None:
    turns = ResumeTurns(ResumeLimit(1, registered(), 1))
    first, leaves, gets_it_and_leaves, last = waiters = [Waiter(turns) for _ in range(4)]
    await eventually(lambda: first.has_turn, "the first has its turn")
    leaves.task.cancel()
    first.may_end.set()
    await eventually(lambda: gets_it_and_leaves.has_turn, "the third has its turn")
    gets_it_and_leaves.task.cancel()
    await eventually(lambda: last.has_turn, "the last has its turn")
    last.may_end.set()
    ended = await asyncio.gather(*(waiter.task for waiter in waiters), return_exceptions=True)
    assert [type(end) for end in ended] == [type(None), asyncio.CancelledError, asyncio.CancelledError, type(None)]
    assert not turns.none_left


async def test_a_turn_that_comes_as_its_owner_is_cancelled_goes_to_the_next() -> None:
    turns = ResumeTurns(ResumeLimit(1, registered(), 1))
    async with turns.turn():
        second, third = Waiter(turns), Waiter(turns)
        await asyncio.sleep(0)  # both wait
    second.task.cancel()  # has the turn, and has not run since
    await eventually(lambda: third.has_turn, "the third has it")
    assert not second.has_turn
    third.may_end.set()
    await third.task
    assert not turns.none_left
