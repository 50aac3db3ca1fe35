"""Items that stay too long expire in order, with one timer; items that are added or taken out meanwhile do not."""

from __future__ import annotations

import asyncio

import pytest

from pdserve_proxy.upstream.expiry_queue import ExpiryQueue
from tests.proxy.cluster import eventually


async def test_what_stays_expires_in_order_and_what_was_taken_out_does_not() -> None:
    expired: list[str] = []
    queue: ExpiryQueue[str] = ExpiryQueue(0.02, expired.append)
    for item in "abcde":
        queue.add(item)
    queue.discard("b")
    queue.discard("never there")
    assert (queue.pop_oldest(), queue.pop_newest(), len(queue)) == ("a", "e", 2)
    await eventually(lambda: not queue, "all is out")
    assert expired == ["c", "d"]
    for take in (queue.pop_oldest, queue.pop_newest):
        with pytest.raises(KeyError):
            take()


async def test_each_item_has_its_own_time() -> None:
    loop = asyncio.get_running_loop()
    added_s: dict[int, float] = {}
    stayed_s: list[float] = []

    def expire(item: int) -> None:
        stayed_s.append(loop.time() - added_s[item])
        if item < 3:  # The callback does this again and again.
            add(item + 10)

    def add(item: int) -> None:
        added_s[item] = loop.time()
        queue.add(item)

    queue: ExpiryQueue[int] = ExpiryQueue(0.03, expire)
    for item in range(3):
        add(item)
        await asyncio.sleep(0.01)  # The items must come at different times.
    await eventually(lambda: len(stayed_s) == 6, "all have expired")
    assert min(stayed_s) >= 0.028


async def test_it_has_one_timer_and_none_when_closed_or_empty() -> None:
    queue: ExpiryQueue[int] = ExpiryQueue(0.01, lambda item: None)
    queue.add(0)
    timer = queue._timer
    for item in range(1, 100):
        queue.add(item)
    assert queue._timer is timer
    await eventually(lambda: queue._timer is None, "it is empty, and nothing wakes for it")
    queue.add(0)
    queue.close()
    assert (len(queue), queue._timer) == (0, None)


async def test_what_fails_to_expire_keeps_no_other_from_it() -> None:
    expired: list[int] = []
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))

    def expire(item: int) -> None:
        expired.append(item)
        if item == 0:
            raise ValueError("a defect")

    queue: ExpiryQueue[int] = ExpiryQueue(0.01, expire)
    queue.add(0)
    queue.add(1)
    await eventually(lambda: 1 in expired, "the other")
    assert expired == [0, 1]
    assert len(failures) == 1
