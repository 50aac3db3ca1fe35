"""The queue never admits too many requests, admits them in their order, and loses no place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import RequestError, TooManyRequests, Unavailable
from pdserve.wire.terms import PRIORITY_S
from pdserve_proxy.requests.admission_queue import (
    AdmissionController,
    AdmissionEntry,
    AdmissionLimits,
    AdmissionQueue,
    share_of,
)

EVENTS = st.lists(
    st.tuples(
        st.just("enter"),
        st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 6), st.integers(-2, 2), st.floats(0, 2 * PRIORITY_S)),
    )
    | st.tuples(st.just("leave"), st.integers(0, 30)),
    max_size=60,
)


@given(EVENTS, st.integers(0, 8), st.integers(0, 8), st.integers(0, 3))
def test_limits_hold_and_requests_go_in_as_they_came_moved_by_their_priorities(
    events: list[tuple[str, tuple[str, int, int, float] | int]], in_flight: int, per_caller: int, waiting: int
) -> None:
    admission = AdmissionQueue(AdmissionLimits(in_flight, per_caller, waiting, wait_s=1.0))
    inside: list[AdmissionEntry] = []
    queue: list[AdmissionEntry] = []
    turns: dict[AdmissionEntry, float] = {}
    now = 0.0

    def has_room(places: int) -> bool:
        return not in_flight or sum(entry.places for entry in inside) + places <= in_flight

    def go_in() -> list[AdmissionEntry]:
        admitted = []
        while queue and has_room(queue[0].places):
            inside.append(queue.pop(0))
            admitted.append(inside[-1])
        return admitted

    for event, which in events:
        if event == "enter":
            assert isinstance(which, tuple)
            caller, answers, priority, passed = which
            now += passed
            turn = now + PRIORITY_S * priority
            first = all(turns[other] > turn for other in queue)
            places = min(answers, max(in_flight // 2, 1))
            mine = sum(entry.share for entry in inside + queue if entry.caller == caller)
            try:
                entry = admission.enter(caller, now, answers, priority)
            except TooManyRequests as exc:
                assert caller and per_caller and mine + min(answers, per_caller) > per_caller
                assert exc.retry_after_s
            except Unavailable as exc:
                assert not (first and has_room(places)) and len(queue) == waiting
                assert exc.retry_after_s
            else:
                assert entry.places == places
                assert not (caller and per_caller) or mine + entry.share <= per_caller
                turns[entry] = turn
                assert admission.is_admitted(entry) == (first and has_room(places))
                (inside if admission.is_admitted(entry) else queue).append(entry)
                queue.sort(key=turns.__getitem__)
        elif inside or queue:
            assert isinstance(which, int)
            entry = (inside + queue)[which % len(inside + queue)]
            (inside if entry in inside else queue).remove(entry)
            assert admission.leave(entry) == go_in()
            assert admission.leave(entry) == []
        assert (len(admission._admitted), admission.waiting) == (len(inside), len(queue))
        assert admission._places_taken == sum(entry.places for entry in inside)
        assert not in_flight or admission._places_taken <= in_flight
        assert not queue or not has_room(queue[0].places)
    for entry in inside + queue:
        admission.leave(entry)
    assert (len(admission._admitted), admission._places_taken, admission.waiting) == (0, 0, 0)
    assert not admission._answers_of_caller


def test_beside_the_largest_request_there_is_room_for_an_ordinary_one() -> None:
    for in_flight in (2, 64, 1024, 1088):
        admission = AdmissionQueue(AdmissionLimits(in_flight, per_caller=0, waiting=8, wait_s=1.0))
        assert admission.is_admitted(admission.enter("a", 0.0, answers=8 * 128))
        assert admission.is_admitted(admission.enter("b", 0.0))


def test_a_large_request_waits_for_its_room_and_is_not_passed_by_small_ones() -> None:
    admission = AdmissionQueue(AdmissionLimits(in_flight=8, per_caller=0, waiting=8, wait_s=1.0))
    small = [admission.enter("a", 0.0) for _ in range(6)]
    large, later = admission.enter("b", 0.0, answers=4), admission.enter("c", 0.0)
    assert not admission.is_admitted(large)
    assert not admission.is_admitted(later)
    assert admission.leave(small[0]) == []
    assert admission.leave(small[1]) == [large]
    assert admission.leave(small[2]) == [later]


def test_those_behind_a_large_request_that_gives_up_go_in() -> None:
    admission = AdmissionQueue(AdmissionLimits(in_flight=4, per_caller=0, waiting=8, wait_s=1.0))
    for _ in range(3):
        admission.enter("a", 0.0)
    large, later = admission.enter("b", 0.0, answers=4), admission.enter("c", 0.0)
    assert admission.leave(large) == [later]


class Room:
    """A controller and the requests that it admits."""

    def __init__(self, **limits: float) -> None:
        given = {"in_flight": 1, "per_caller": 0, "waiting": 8, "wait_s": 10.0} | limits
        self.controller = AdmissionController(
            AdmissionLimits(int(given["in_flight"]), int(given["per_caller"]), int(given["waiting"]), given["wait_s"])
        )
        self.entered: list[str] = []

    def send(self, name: str, until: asyncio.Event, priority: int = 0) -> asyncio.Task[None]:
        return asyncio.create_task(self._send(name, until, priority))

    async def _send(self, name: str, until: asyncio.Event, priority: int) -> None:
        releases: list[Callable[[], None]] = []
        try:
            await self.controller.admit(name, 1, releases.append, priority)
            self.entered.append(name)
            await until.wait()
        finally:
            for release in releases:
                release()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_waiting_requests_are_admitted_in_turn_without_those_that_left() -> None:
    room, go = Room(), asyncio.Event()
    tasks = [room.send(name, go) for name in "abcd"]
    await settle()
    assert room.entered == ["a"]
    tasks[1].cancel()
    await settle()
    go.set()
    await asyncio.gather(tasks[0], *tasks[2:])
    assert room.entered == ["a", "c", "d"]


async def test_a_lower_priority_is_admitted_before_those_that_came_a_little_earlier() -> None:
    room, go = Room(), asyncio.Event()
    tasks = [room.send(name, go, priority) for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", -100))]
    await settle()
    go.set()
    await asyncio.gather(*tasks)
    assert room.entered == ["a", "d", "c", "b"]


async def test_one_that_is_cancelled_just_when_its_turn_came_passes_it_on() -> None:
    room, first, rest = Room(), asyncio.Event(), asyncio.Event()
    tasks = [room.send("a", first), room.send("b", rest), room.send("c", rest)]
    await settle()
    first.set()
    await tasks[0]  # It is b's turn, but b has not run yet.
    tasks[1].cancel()
    await settle()
    assert room.entered[-1] == "c"
    rest.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_turn_that_does_not_come_in_time_is_a_503() -> None:
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


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_the_shares_of_all_proxies_are_the_limit_up_to_rounding(limit: int, proxies: int) -> None:
    share = share_of(limit, proxies)
    assert share >= 1
    assert limit <= proxies * share < limit + proxies


def test_a_caller_has_its_part_at_each_proxy_and_more_again_when_one_is_gone() -> None:
    live = 2
    admission = AdmissionQueue(AdmissionLimits(0, per_caller=4, waiting=0, wait_s=1.0), lambda: live)
    entries = [admission.enter("a", 0.0) for _ in range(2)]
    with pytest.raises(TooManyRequests, match="2 answers under way at each of 2 proxies"):
        admission.enter("a", 0.0)
    admission.enter("", 0.0)
    live = 1
    entries += [admission.enter("a", 0.0) for _ in range(2)]
    live = 3
    with pytest.raises(TooManyRequests):
        admission.enter("a", 0.0)
    for entry in entries:
        admission.leave(entry)
    admission.enter("a", 0.0)
