"""Tests that a pause of this process is not taken for the silence of what it waits for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

import pytest
import uvloop

from pdserve.models.tp.rank_board import RankBoard
from pdserve.patience import LAST_LOOK_S, LOOKS, MOST_LOOK_S, PatientTimeout, PatientTimer, PatientWait
from tests.eventually import eventually

PATIENCE_S = 0.4
T = TypeVar("T")


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[None, None, T]], T]:
    def run_there(scenario: Coroutine[None, None, T]) -> T:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(scenario)

    return run_there


def stand_still() -> None:
    """Keeps the event loop from all else for longer than anything here is waited for."""
    time.sleep(2 * PATIENCE_S)


def test_a_timer_is_due_in_its_time_and_never_after_it_was_cancelled(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        due: asyncio.Future[float] = loop.create_future()
        cancelled = PatientTimer(loop, PATIENCE_S / 2, lambda: pytest.fail("it was cancelled"))
        loop.call_later(PATIENCE_S / 4, cancelled.cancel)
        began_s = time.monotonic()
        PatientTimer(loop, PATIENCE_S, lambda: due.set_result(time.monotonic()))
        assert await due - began_s >= PATIENCE_S - LOOKS * 0.001  # uvloop counts in milliseconds

    run(scenario())


def test_a_pause_of_the_loop_is_no_more_than_one_part_of_the_time(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        due: asyncio.Future[None] = loop.create_future()
        PatientTimer(loop, PATIENCE_S, lambda: due.set_result(None))
        stand_still()
        went_on_s = time.monotonic()
        await due
        assert time.monotonic() - went_on_s >= PATIENCE_S * (LOOKS - 2) / LOOKS

    run(scenario())


def test_what_came_in_a_pause_at_the_very_end_is_seen_first(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        came, due = asyncio.Event(), asyncio.Event()
        ours, theirs = os.pipe()
        timer = PatientTimer(loop, PATIENCE_S, due.set)

        def hear() -> None:
            timer.cancel()
            came.set()

        loop.add_reader(ours, hear)

        def pause_in_the_last_part() -> None:
            os.write(theirs, b"x")
            stand_still()

        loop.call_later(PATIENCE_S * (LOOKS - 0.5) / LOOKS, pause_in_the_last_part)
        try:
            await came.wait()
            assert not due.is_set()
        finally:
            loop.remove_reader(ours)
            os.close(ours)
            os.close(theirs)

    run(scenario())


def test_a_timeout_ends_what_takes_too_long_and_may_be_ended_before(run: Callable[..., None]) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with PatientTimeout(0.01):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with PatientTimeout(600.0) as timeout:
                timeout.expire()
                timeout.expire()
                await asyncio.Event().wait()
        async with PatientTimeout(LAST_LOOK_S) as timeout:
            stand_still()
        timeout.expire()

    run(scenario())


def test_a_wait_counts_a_pause_once() -> None:
    times = iter([100.0, 100.05, 100.1, 160.1, 160.2])
    wait = PatientWait(clock=lambda: next(times))
    waited = [wait.look() for _ in range(4)]
    assert waited == pytest.approx([0.05, 0.1, 0.1 + MOST_LOOK_S, 0.2 + MOST_LOOK_S])


RANK = """
import sys, torch
from pdserve.models.tp.rank_board import RankBoard
from pdserve.models.tp.tp_groups import SharedMemoryGroup
group = SharedMemoryGroup(RankBoard(int(sys.argv[1])), 0, 2, 0.5)
print("ready", flush=True)
sys.stdin.readline()
print(group.all_reduce(torch.ones(2)).tolist(), flush=True)
"""


@pytest.mark.integration
def test_a_rank_that_was_stopped_does_not_take_the_others_for_hung() -> None:
    board = RankBoard.create(2)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    argv = [sys.executable, "-c", RANK, str(board.descriptor)]
    with subprocess.Popen(argv, pass_fds=(board.descriptor,), **pipes) as rank:  # type: ignore[call-overload]  # pipes
        try:
            assert rank.stdin is not None and rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
            rank.stdin.write(b"\n")
            rank.stdin.flush()
            eventually(lambda: board.progress(0) == 1, "rank 0 waits for rank 1")
            rank.send_signal(signal.SIGSTOP)
            stand_still()
            looked = naps(rank.pid)
            rank.send_signal(signal.SIGCONT)
            eventually(lambda: naps(rank.pid) > looked + 1 or rank.poll() is not None, "rank 0 has looked again")
            board.advance(1)
            assert rank.stdout.readline() == b"[1.0, 1.0]\n"
        finally:
            rank.kill()
            board.close()


def naps(pid: int) -> int:
    """Returns how often a process has gone to sleep."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
