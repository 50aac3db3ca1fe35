"""Tests the progress line of a load."""

from __future__ import annotations

import pytest

from pdserve.bench.load import LoadRun, Target
from pdserve.bench.load_benchmark import Progress
from tests.bench.reports import stream


def run_with(answered: int, failed: int, running: int) -> LoadRun:
    run = LoadRun(Target("http://127.0.0.1:9", "m"), running=running)
    for _ in range(answered):
        run.tally.add(stream(0.0, [1.0]))
    for _ in range(failed):
        broken = stream(0.0, [1.0])
        broken.fail("status 503", "full")
        run.tally.add(broken)
    return run


@pytest.mark.parametrize(
    ("sends_for_s", "elapsed_s", "left"),
    [
        # 40 of 100 have ended in 20 s, so 60 take 30 s.
        (None, 20.0, ", 30 s left"),
        (200.0, 20.0, ", 3 min 00 s left"),
        # The last request is sent. What is left follows from the answers.
        (15.0, 20.0, ", 30 s left"),
    ],
)
def test_the_time_left(sends_for_s: float | None, elapsed_s: float, left: str) -> None:
    line = Progress("rate 5/s", 100, sends_for_s).line(run_with(30, 10, 7), elapsed_s)
    assert line == f"rate 5/s: 30 of 100 answered, 10 failed, 7 running, 1.5 answers/s{left}"


def test_before_the_first_answer_and_after_the_last() -> None:
    assert Progress("x", 2).line(run_with(0, 0, 2), 0.0) == "x: 0 of 2 answered, 0 failed, 2 running, 0 answers/s"
    assert Progress("x", 2).line(run_with(1, 1, 0), 1.0) == "x: 1 of 2 answered, 1 failed, 0 running, 1 answers/s"
