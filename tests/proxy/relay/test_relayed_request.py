"""A relayed request ends once, whatever ends it; and a lost stream keeps what came before the loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pdserve_proxy.relay import relayed_request
from pdserve_proxy.relay.event_stream import EventStream
from pdserve_proxy.relay.outcomes import CutReason, RelayOutcome
from pdserve_proxy.relay.relayed_request import RelayedRequest, RelayPhase
from pdserve_proxy.upstream.node_pool import NodePool
from tests.proxy.cluster import eventually
from tests.proxy.fake_node import Exchange, FakeNode


class Closable:
    """A node's response that can only be closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1

    def after_next(self, within_s: float, callback: Callable[[], None]) -> None:
        raise AssertionError("nothing here waits for the next bytes")


class Seen:
    """Every end that was reported, and the relayed requests that tasks made."""

    def __init__(self) -> None:
        self.ends: list[tuple[RelayOutcome | None, int]] = []
        self.relayed: list[RelayedRequest] = []

    def start(self, handler: Callable[[RelayedRequest], Awaitable[None]]) -> asyncio.Task[None]:
        async def task() -> None:
            current = asyncio.current_task()
            assert current is not None
            with RelayedRequest(
                current, "r", "/v1/x", 60.0, lambda ended: self.ends.append((ended.outcome, ended.status))
            ) as made:
                self.relayed.append(made)
                await handler(made)

        return asyncio.create_task(task())


async def for_ever(_: RelayedRequest) -> None:
    await asyncio.Event().wait()


async def test_every_end_but_the_first_is_ignored() -> None:
    async def handler(made: RelayedRequest) -> None:
        made.end(RelayOutcome.OK, 200)
        made.end(RelayOutcome.UPSTREAM_LOST, 502)

    seen = Seen()
    await seen.start(handler)
    await asyncio.sleep(0)
    assert seen.ends == [(RelayOutcome.OK, 200)]
    assert seen.relayed[0].phase is RelayPhase.ENDED


async def test_a_cancelled_task_is_a_client_that_left_and_its_upstream_is_closed() -> None:
    seen, upstream = Seen(), Closable()
    task = seen.start(for_ever)
    await asyncio.sleep(0)
    seen.relayed[0].own_response(upstream)
    task.cancel()
    await asyncio.wait([task])
    await eventually(lambda: seen.ends == [(RelayOutcome.CLIENT_GONE, 499)], "the end")
    assert upstream.closed == 1


async def test_a_task_that_fails_or_forgets_does_not_keep_its_upstream() -> None:
    async def forget(made: RelayedRequest) -> None:
        pass

    async def fail(made: RelayedRequest) -> None:
        raise ValueError("a defect")

    for handler in (forget, fail):
        seen = Seen()
        await asyncio.wait([task := seen.start(handler)])
        task.exception()
        await eventually(lambda seen=seen: seen.ends == [(RelayOutcome.FAILED, 500)], "the end")


async def test_a_new_upstream_closes_the_one_before_it() -> None:
    async def handler(made: RelayedRequest) -> None:
        first, second = Closable(), Closable()
        made.own_response(first)
        made.own_response(second)
        assert (first.closed, second.closed) == (1, 0)
        made.end(RelayOutcome.OK, 200)
        assert (first.closed, second.closed) == (1, 1)

    await Seen().start(handler)


@pytest.mark.parametrize("cut", CutReason)
async def test_a_cut_interrupts_what_is_waited_for_and_its_task_goes_on(cut: CutReason) -> None:
    async def handler(made: RelayedRequest) -> None:
        asyncio.get_running_loop().call_soon(made.cut, cut)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        assert made.takes_cancel_as_cut()
        assert made.cut_short is cut
        await asyncio.sleep(0)
        made.end(cut.outcome, cut.error.status)

    seen = Seen()
    await seen.start(handler)
    assert seen.ends == [(cut.outcome, cut.error.status)]


async def test_a_client_that_leaves_as_its_request_is_cut_has_left() -> None:
    async def handler(made: RelayedRequest) -> None:
        made.cut(CutReason.DEADLINE)
        task.cancel()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert not made.takes_cancel_as_cut()
            raise

    seen = Seen()
    task = seen.start(handler)
    await asyncio.wait([task])
    assert task.cancelled()
    assert seen.ends == [(RelayOutcome.TIMED_OUT, 499)]


async def test_a_client_that_takes_nothing_after_a_cut_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_request, "CUT_GRACE_S", 0.05)

    async def stuck(made: RelayedRequest) -> None:
        made.begin_relaying(200)
        await asyncio.Event().wait()

    seen = Seen()
    task = seen.start(stuck)
    await asyncio.sleep(0)
    seen.relayed[0].cut(CutReason.DEADLINE)
    async with asyncio.timeout(5):
        await asyncio.wait([task])
    assert task.cancelled()
    await eventually(lambda: seen.ends == [(RelayOutcome.TIMED_OUT, 499)], "the end")


async def test_what_came_before_a_loss_is_still_delivered() -> None:
    events = [b"data: %d\n\n" % n for n in range(3)]
    go_on = asyncio.Event()

    async def produce_and_die(at: Exchange) -> None:
        await at.begin_stream()
        await at.chunk(events[0])
        await go_on.wait()
        await at.chunk(events[1])
        await at.chunk(events[2] + b"data: half")
        at.die()

    async def handler(url: str, made: RelayedRequest) -> None:
        pool = NodePool(connect_timeout_s=5.0, max_connections=1)
        response = await pool.post(url, "/", {}, b"", silence_s=None)
        made.own_response(response)
        stream = EventStream(made, response)
        await stream.open()
        go_on.set()
        # As with a slow client, nothing is read until the node is dead.
        await eventually(lambda: response._error is not None, "the loss")
        first = stream.first
        rest: list[bytes] = []

        def taken(data: bytes) -> bool:
            rest.append(data)
            return True

        while not stream.over:
            rest.append(await stream.next(taken))
        assert first == events[0]
        assert b"".join(rest).startswith(events[1] + events[2] + b'event: error\ndata: {"error":')
        assert b"half" not in b"".join(rest)

    seen = Seen()
    async with FakeNode(produce_and_die) as node:
        await seen.start(lambda made: handler(node.url, made))
    assert [outcome for outcome, _ in seen.ends] == [RelayOutcome.UPSTREAM_LOST]
