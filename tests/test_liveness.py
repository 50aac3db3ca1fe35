"""Tests how a loop that hangs is told from one that is slow, that waits its turn, or whose watcher is late itself."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count

import pytest

from pdserve.liveness import BUSY_TIMES, LifeBoard, LifeWatch, Motion, Silence, loop_names, motion_of, unseen_sign
from tests.eventually import eventually

SILENCE_S = 5.0
BUSY_S = 60.0
LOOK_S = 1.0

LOOP = """
import sys, time
from pdserve.liveness import LifeBoard
sign = LifeBoard(int(sys.argv[1])).sign(0)
with sign.shown_by_this_thread():
    while True:
        sign.show()
        time.sleep(0.05)
"""
"""A loop that shows life in another process."""


class Looks:
    """Looks at one loop once a second."""

    def __init__(self) -> None:
        self._silence = Silence(SILENCE_S, BUSY_S)
        self._now = 100.0

    def look(self, sign: float, motion: Motion | None, passed_s: float = LOOK_S) -> bool:
        self._now += LOOK_S
        return self._silence.look(sign, self._now, motion, passed_s)

    def until_hung(self, sign: float, motions: Iterator[Motion | None]) -> float:
        """Returns after how many seconds a loop counts as hung that shows nothing more than ``sign``."""
        assert not self.look(sign, next(motions))
        return next(number * LOOK_S for number in count(1) if self.look(sign, next(motions)))


def still() -> Iterator[Motion]:
    while True:
        yield Motion(7.0, wants_core=False)


def running() -> Iterator[Motion]:
    return (Motion(ran / 100, wants_core=False) for ran in count(1))


def starved() -> Iterator[Motion]:
    while True:
        yield Motion(7.0, wants_core=True)


def untold() -> Iterator[None]:
    while True:
        yield None


def test_a_loop_that_shows_life_never_hangs() -> None:
    looks = Looks()
    assert not any(looks.look(sign, Motion(7.0, wants_core=False)) for sign in range(100))


def test_a_loop_that_neither_shows_life_nor_runs_hangs_after_the_silence() -> None:
    assert Looks().until_hung(100.0, still()) == SILENCE_S


@pytest.mark.parametrize("motions", [running, starved])
def test_a_thread_that_runs_or_waits_for_a_core_has_longer(motions: type[Iterator[Motion]]) -> None:
    assert Looks().until_hung(100.0, motions()) == BUSY_S


def test_announced_work_excuses_a_thread_that_computes_only_while_it_does() -> None:
    assert Looks().until_hung(100.0 + 600.0, running()) > 600.0
    assert Looks().until_hung(100.0 + 600.0, still()) == SILENCE_S


def test_announced_work_excuses_a_thread_of_which_nobody_can_tell_whether_it_works() -> None:
    """One that waits for a GPU spins or sleeps, whatever the GPU does."""
    assert Looks().until_hung(100.0 + 30.0, untold()) == pytest.approx(30.0 + SILENCE_S, abs=LOOK_S)


def test_a_watcher_that_stood_still_looks_again_before_it_blames_a_loop() -> None:
    with closing(LifeBoard.create(len(loop_names(1)))) as board:
        watch = LifeWatch(board, loop_names(1), SILENCE_S, lambda process, thread: Motion(7.0, wants_core=False))
        with board.sign(0).shown_by_this_thread():
            assert watch.hanging() is None
            watch._looked = -math.inf  # the watcher was stopped for very long, and the loop with it
            assert watch.hanging() is None


def test_only_a_loop_that_runs_is_watched() -> None:
    with closing(LifeBoard.create(2)) as board:
        sign = board.sign(1)
        assert board.shown(1) is None
        with sign.shown_by_this_thread(computes=False):
            shown = board.shown(1)
            assert shown is not None
            assert (shown.process, shown.thread, shown.computes) == (os.getpid(), threading.get_native_id(), False)
            assert board.shown(0) is None
        assert board.shown(1) is None
    with unseen_sign().shown_by_this_thread():
        pass


@contextmanager
def looping(board: LifeBoard) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", LOOP, str(board.descriptor)]
    with subprocess.Popen(command, pass_fds=[board.descriptor]) as process:
        try:
            eventually(lambda: board.shown(0), "the loop runs")
            yield process
        finally:
            process.kill()


def test_a_stopped_process_hangs_and_nothing_else_of_it_has_to_end() -> None:
    with closing(LifeBoard.create(1)) as board, looping(board) as process:
        watch = LifeWatch(board, {0: "the loop"}, 1.0, motion_of)
        ticks = threading.Event()
        for _ in range(8):
            ticks.wait(watch.every_s)  # the time between two looks
            assert watch.hanging() is None
        process.send_signal(signal.SIGSTOP)

        def hanging() -> str | None:
            ticks.wait(watch.every_s)
            return watch.hanging()

        assert eventually(hanging, "the loop hangs") == "the loop"


def test_the_kernel_tells_whether_a_thread_runs() -> None:
    own = (os.getpid(), threading.get_native_id())
    first = motion_of(*own)
    assert first is not None
    assert first.wants_core

    def ran_on() -> bool:
        now = motion_of(*own)
        return now is not None and now.ran > first.ran

    eventually(ran_on, "this thread runs")
    assert motion_of(2**22 + 1, 1) is None
    waiting = threading.Event()
    thread = threading.Thread(target=waiting.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        eventually(lambda: (seen := motion_of(own[0], thread.native_id or 0)) is not None and not seen.wants_core)
    finally:
        waiting.set()
        thread.join()


def test_a_busy_loop_has_more_than_a_minute_by_default() -> None:
    assert BUSY_TIMES * SILENCE_S == BUSY_S
