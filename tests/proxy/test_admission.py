"""Who goes in, whatever comes in whatever order: never too many, first come, first in, and no place is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import RequestError, TooManyRequests, Unavailable
from pdserve_proxy.admission import Admission, Limits, Visit
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.turnstile import Turnstile
from tests.proxy.cluster import run_async

EVENTS = st.lists(
    st.tuples(st.just("ask"), st.sampled_from(["", "a", "b"])) | st.tuples(st.just("leave"), st.integers(0, 30)),
    max_size=60,
)


@given(EVENTS, st.integers(0, 4), st.integers(0, 4), st.integers(0, 3))
def test_limits_hold_and_the_first_to_come_is_the_first_to_go_in(
    events: list[tuple[str, str | int]], in_flight: int, per_caller: int, waiting: int
) -> None:
    admission = Admission(Limits(in_flight, per_caller, waiting, wait_s=1.0))
    inside: list[Visit] = []
    queue: list[Visit] = []
    for event, which in events:
        if event == "ask":
            caller = str(which)
            mine = sum(visit.caller == caller for visit in inside + queue)
            try:
                visit = admission.ask(caller, 0.0)
            except TooManyRequests as exc:
                assert caller and per_caller and mine == per_caller
                assert exc.retry_after_s
            except Unavailable as exc:
                assert in_flight and len(inside) == in_flight and len(queue) == waiting
                assert exc.retry_after_s
            else:
                assert not (caller and per_caller) or mine < per_caller
                (inside if admission.is_inside(visit) else queue).append(visit)
        elif inside or queue:
            visit = (inside + queue)[int(which) % len(inside + queue)]
            following = admission.leave(visit)
            assert admission.leave(visit) is None
            if visit in queue:
                queue.remove(visit)
                assert following is None
            else:
                inside.remove(visit)
                assert following is (queue[0] if queue else None)
                if following is not None:
                    inside.append(queue.pop(0))
        assert (admission.inside, admission.waiting) == (len(inside), len(queue))
        assert not in_flight or len(inside) <= in_flight
        assert not queue or len(inside) == in_flight
    for visit in inside + queue:
        admission.leave(visit)
    assert (admission.inside, admission.waiting) == (0, 0)
    assert not admission._of_caller


class Room:
    """A turnstile, and requests that go through it."""

    def __init__(self, **limits: float) -> None:
        given = {"in_flight": 1, "per_caller": 0, "waiting": 8, "wait_s": 10.0} | limits
        self.turnstile = Turnstile(
            Limits(int(given["in_flight"]), int(given["per_caller"]), int(given["waiting"]), given["wait_s"]),
            ProxyMetrics(),
        )
        self.entered: list[str] = []

    def send(self, name: str, until: asyncio.Event) -> asyncio.Task[None]:
        return asyncio.create_task(self._send(name, until))

    async def _send(self, name: str, until: asyncio.Event) -> None:
        releases: list[Callable[[], None]] = []
        try:
            await self.turnstile.enter(name, releases.append)
            self.entered.append(name)
            await until.wait()
        finally:
            for release in releases:
                release()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_those_who_wait_go_in_by_turn_and_those_who_gave_up_are_passed_over() -> None:
    async def scenario() -> None:
        room, go = Room(), asyncio.Event()
        tasks = [room.send(name, go) for name in "abcd"]
        await settle()
        assert room.entered == ["a"]
        tasks[1].cancel()
        await settle()
        go.set()
        await asyncio.gather(tasks[0], *tasks[2:])
        assert room.entered == ["a", "c", "d"]

    run_async(scenario())


def test_one_that_is_cancelled_just_when_its_turn_came_passes_it_on() -> None:
    async def scenario() -> None:
        room, first, rest = Room(), asyncio.Event(), asyncio.Event()
        tasks = [room.send("a", first), room.send("b", rest), room.send("c", rest)]
        await settle()
        first.set()
        await tasks[0]  # b has its turn, and has not run yet
        tasks[1].cancel()
        await settle()
        assert room.entered[-1] == "c"
        rest.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_async(scenario())


def test_a_turn_that_does_not_come_in_time_is_a_503() -> None:
    async def scenario() -> None:
        room, go = Room(wait_s=0.05), asyncio.Event()
        first = room.send("a", go)
        await settle()
        with pytest.raises(RequestError) as caught:
            await room.send("b", go)
        assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
        go.set()
        await first
        await room.send("c", go)
        assert room.entered == ["a", "c"]

    run_async(scenario())
