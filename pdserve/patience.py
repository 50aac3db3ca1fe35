"""Timers that do not blame others for a pause of the process that they run in.

A process that was stopped, or whose event loop had thousands of callbacks to run, finds all its timers due at once. It
has not yet read what came meanwhile, so an ordinary timer would take a client or a node for silent that is not.

A patient timer divides its time into ``LOOKS`` parts and starts each part when the one before is over. The process
reads what has come between any two parts, and a pause of any length counts as one part at most. Behind the last part
the timer waits for ``LAST_LOOK_S`` more, because a pause may have ended just then. Use it for every deadline by which
this process judges what another one does. A deadline that a client has set is real time, and needs none of this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

LOOKS = 8
LAST_LOOK_S = 0.02
MOST_LOOK_S = 0.1


class PatientTimer:
    """Calls ``callback`` after ``seconds`` at the soonest, unless it is cancelled before."""

    __slots__ = ("_callback", "_handle", "_left", "_loop", "_part_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        self._part_s = seconds / LOOKS
        self._left = LOOKS
        self._handle = loop.call_later(self._part_s, self._look)

    def cancel(self) -> None:
        self._handle.cancel()

    def _look(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._callback()
        else:
            self._handle = self._loop.call_later(self._part_s if self._left else LAST_LOOK_S, self._look)


class PatientTimeout:
    """A context manager that does what ``asyncio.timeout`` does, with a patient timer."""

    __slots__ = ("_seconds", "_timeout", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._timer = PatientTimer(asyncio.get_running_loop(), self._seconds, self.expire)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(exc_type, exc, traceback)

    def expire(self) -> None:
        """Ends the time now. Does nothing if it is over."""
        with suppress(RuntimeError):
            self._timeout.reschedule(0.0)


class PatientWait:
    """Measures how long a thread without an event loop has waited, which looks at least every ``MOST_LOOK_S``.

    A pause of the process counts as ``MOST_LOOK_S``.
    """

    __slots__ = ("_clock", "_looked_s", "_waited_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._waited_s = 0.0

    def look(self) -> float:
        """Returns the seconds for which the thread has waited."""
        now = self._clock()
        self._waited_s += min(now - self._looked_s, MOST_LOOK_S)
        self._looked_s = now
        return self._waited_s
