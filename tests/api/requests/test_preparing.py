"""Tests that long bodies are prepared beside the event loop: few at a time, few waiting, none without a client."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pdserve.api.requests import preparing
from pdserve.api.requests.preparing import HUGE_BYTES, INLINE_BYTES, WORKERS, Abandoned, Check, Preparer
from pdserve.errors import DeadlineExceeded, InvalidRequest, TooManyRequests, Unavailable

LONG = INLINE_BYTES + 1
HUGE = HUGE_BYTES + 1
WAIT_S = 20.0


class Held:
    """Work that goes on until a test lets it go or its client no longer waits for it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.abandoned = threading.Semaphore(0)
        self.count = 0

    def __call__(self, check: Check) -> int:
        self.count += 1
        self.begun.release()
        try:
            while not self.go_on.wait(0.005):
                check()
        except Abandoned:
            self.abandoned.release()
            raise
        return threading.get_ident()


async def acquired(semaphore: threading.Semaphore) -> None:
    assert await asyncio.to_thread(semaphore.acquire, timeout=WAIT_S)


async def until(probe: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not probe():  # noqa: ASYNC110  # a thread's doing
            await asyncio.sleep(0.005)


@asynccontextmanager
async def open_preparer(max_bytes: int = 10 * LONG) -> AsyncIterator[Preparer]:
    preparer = Preparer(max_bytes)
    try:
        async with asyncio.timeout(2 * WAIT_S):
            yield preparer
        await until(lambda: preparer.bytes_held == 0)
    finally:
        preparer.close()


async def test_short_bodies_are_prepared_here_and_long_ones_elsewhere() -> None:
    async with open_preparer() as preparer:
        here = threading.get_ident()
        assert await preparer.run(INLINE_BYTES, lambda check: threading.get_ident(), WAIT_S) == here
        assert await preparer.run(LONG, lambda check: threading.get_ident(), WAIT_S) != here


async def test_while_long_ones_take_for_ever_short_ones_and_the_loop_go_on() -> None:
    async with open_preparer() as preparer:
        held = Held()
        slow = [asyncio.create_task(preparer.run(LONG, held, WAIT_S)) for _ in range(WORKERS + 3)]
        for _ in range(WORKERS):
            await acquired(held.begun)
        for i in range(100):
            assert await preparer.run(1, lambda check, i=i: i, WAIT_S) == i  # type: ignore[misc]  # mypy loses the default
        assert held.count == WORKERS, "few threads, however many wait"
        held.go_on.set()
        assert len(set(await asyncio.gather(*slow))) <= WORKERS


async def test_huge_bodies_keep_out_no_others() -> None:
    async with open_preparer(max_bytes=4 * HUGE) as preparer:
        held = Held()
        slow = [asyncio.create_task(preparer.run(HUGE, held, WAIT_S, bytes([i]))) for i in range(4)]
        await acquired(held.begun)
        with pytest.raises(Unavailable):
            await preparer.run(HUGE, held, WAIT_S)
        for i in range(20):
            assert await preparer.run(LONG, lambda check, i=i: i, WAIT_S) == i  # type: ignore[misc]  # mypy loses the default
        assert held.count == 1, "one thread"
        held.go_on.set()
        await asyncio.gather(*slow)


async def test_a_body_waits_no_longer_than_its_deadline() -> None:
    async with open_preparer() as preparer:
        held, late = Held(), Held()
        slow = [asyncio.create_task(preparer.run(LONG, held, WAIT_S)) for _ in range(WORKERS)]
        for _ in range(WORKERS):
            await acquired(held.begun)
        with pytest.raises(DeadlineExceeded):
            await preparer.run(LONG, late, 0.01)
        held.go_on.set()
        await asyncio.gather(*slow)
        assert late.count == 0


async def test_no_more_bytes_wait_than_may_and_one_large_body_goes_alone() -> None:
    async with open_preparer() as preparer:
        held = Held()
        slow = [asyncio.create_task(preparer.run(LONG, held, WAIT_S, bytes([i]))) for i in range(10)]
        await acquired(held.begun)
        with pytest.raises(Unavailable) as refused:
            await preparer.run(LONG, held, WAIT_S, b"another")
        assert (refused.value.code, refused.value.retry_after_s) == ("overloaded", 1)
        held.go_on.set()
        await asyncio.gather(*slow)
        await until(lambda: preparer.bytes_held == 0)
        assert await preparer.run(100 * LONG, lambda check: 7, WAIT_S) == 7


async def test_one_client_holds_no_more_than_half_of_the_bytes() -> None:
    async with open_preparer() as preparer:
        held = Held()
        slow = [asyncio.create_task(preparer.run(LONG, held, WAIT_S, b"one")) for _ in range(5)]
        await acquired(held.begun)
        with pytest.raises(TooManyRequests) as refused:
            await preparer.run(LONG, held, WAIT_S, b"one")
        assert (refused.value.code, refused.value.retry_after_s) == ("rate_limit_exceeded", 1)
        other = asyncio.create_task(preparer.run(LONG, held, WAIT_S, b"other"))
        held.go_on.set()
        await asyncio.gather(*slow, other)
        assert await preparer.run(LONG, lambda check: 7, WAIT_S, b"one") == 7


async def test_clients_take_turns() -> None:
    done: list[bytes] = []

    def work(client: bytes) -> Callable[[Check], int]:
        def note(check: Check) -> int:
            done.append(client)
            return 0

        return note

    async with open_preparer(max_bytes=20 * HUGE) as preparer:
        held = Held()
        tasks = [asyncio.create_task(preparer.run(HUGE, held, WAIT_S, b"many"))]
        await acquired(held.begun)
        for client in (b"many", b"many", b"many", b"few", b"few"):
            tasks.append(asyncio.create_task(preparer.run(HUGE, work(client), WAIT_S, client)))
        await asyncio.sleep(0)
        held.go_on.set()
        await asyncio.gather(*tasks)
    assert done == [b"many", b"few", b"many", b"few", b"many"]


async def test_what_nobody_waits_for_is_not_begun_and_what_runs_ends_at_its_next_step() -> None:
    async with open_preparer() as preparer:
        held = Held()
        slow = [asyncio.create_task(preparer.run(LONG, held, WAIT_S, bytes([i]))) for i in range(WORKERS + 4)]
        for _ in range(WORKERS):
            await acquired(held.begun)
        # Those that wait are given up first: a thread that is free takes the next one that is not.
        for given_up in (slow[WORKERS:], slow[:WORKERS]):
            for task in given_up:
                task.cancel()
            await asyncio.gather(*given_up, return_exceptions=True)
        for _ in range(WORKERS):
            await acquired(held.abandoned)
        assert held.count == WORKERS


async def test_an_error_is_the_callers_and_frees_the_bytes() -> None:
    def fail(check: Check) -> None:
        raise InvalidRequest("no")

    async with open_preparer() as preparer:
        with pytest.raises(InvalidRequest):
            await preparer.run(LONG, fail, WAIT_S)


async def test_a_body_that_nobody_waits_for_is_not_kept() -> None:
    async with open_preparer() as preparer:
        held, body = Held(), Held()
        slow = [asyncio.create_task(preparer.run(LONG, held, WAIT_S)) for _ in range(WORKERS)]
        for _ in range(WORKERS):
            await acquired(held.begun)
        left = asyncio.create_task(preparer.run(LONG, body, WAIT_S))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        kept = weakref.ref(body)
        del left, body
        await asyncio.sleep(0)
        gc.collect()
        assert kept() is None, "though the threads are still busy"
        held.go_on.set()
        await asyncio.gather(*slow)


async def test_those_that_leave_a_long_queue_are_not_looked_for_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = 0

    def same(work: object, other: object) -> bool:
        nonlocal comparisons
        comparisons += 1
        return work is other

    monkeypatch.setattr(preparing._Work, "__eq__", same)

    async with open_preparer(max_bytes=100 * LONG) as preparer:
        held = Held()
        tasks = [asyncio.create_task(preparer.run(LONG, held, WAIT_S)) for _ in range(50)]
        for _ in range(WORKERS):
            await acquired(held.begun)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.wait(tasks)
        assert comparisons < len(tasks)


def test_a_process_ends_while_a_template_renders_for_ever() -> None:
    script = """if True:
        import asyncio, threading
        from pdserve.api.requests.preparing import Preparer

        async def main():
            preparer, begun = Preparer(), threading.Event()

            def render(check):
                begun.set()
                threading.Event().wait()

            task = asyncio.create_task(preparer.run(5_000, render, 60.0))
            await asyncio.to_thread(begun.wait)
            task.cancel()
            preparer.close()

        asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)
