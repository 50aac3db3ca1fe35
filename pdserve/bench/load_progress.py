"""Shows how far a load is: on a terminal in one line that changes, elsewhere in a line now and then."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from pdserve.bench.load_run import LoadRun

_TERMINAL_S = 0.5
_LINES_S = 10.0
_CLEAR = "\r\x1b[2K"


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a load before it runs."""

    name: str
    total: int
    """The number of its requests."""
    sends_for_s: float | None = None
    """How long requests are sent for; None if that follows from the answers."""

    def line(self, run: LoadRun, elapsed_s: float) -> str:
        tally = run.tally
        rate = tally.succeeded / elapsed_s if elapsed_s > 0 else 0.0
        left_s = self._left_s(run, elapsed_s)
        left = "" if left_s is None else f", {_duration(left_s)} left"
        return (
            f"{self.name}: {tally.succeeded} of {self.total} answered, {tally.failed} failed, {run.running} running, "
            f"{rate:.3g} answers/s{left}"
        )

    def _left_s(self, run: LoadRun, elapsed_s: float) -> float | None:
        if run.ended >= self.total:
            return None
        by_answers = elapsed_s * (self.total - run.ended) / run.ended if run.ended else None
        if self.sends_for_s is None or elapsed_s > self.sends_for_s:
            return by_answers
        return self.sends_for_s - elapsed_s


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@asynccontextmanager
async def shown(progress: Progress, run: LoadRun, out: TextIO) -> AsyncIterator[None]:
    """Shows the progress of ``run`` inside the block, and how it ended."""
    terminal = out.isatty()
    began = time.perf_counter()

    async def show() -> None:
        while True:
            await asyncio.sleep(_TERMINAL_S if terminal else _LINES_S)
            _print(out, progress.line(run, time.perf_counter() - began), "" if terminal else "\n")

    showing = asyncio.create_task(show())
    try:
        yield
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing
        _print(out, progress.line(run, time.perf_counter() - began), "\n")


def _print(out: TextIO, line: str, end: str) -> None:
    if out.isatty():
        # A line that wraps could not be taken away.
        line = _CLEAR + line[: shutil.get_terminal_size().columns - 1]
    # A reader that is gone does not end the measurement.
    with suppress(OSError):
        print(line, file=out, end=end, flush=True)
