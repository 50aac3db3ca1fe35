"""Turns signals into events of a process's asyncio loop, or into an exception where no loop runs.

The first SIGTERM or SIGINT asks a process to drain, and a second one to hurry. SIGHUP makes a process read its files of
secrets, keys and certificates again, without a restart.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from pdserve.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StopSignals:
    """The signals that have come."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the first signal."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at a signal that comes when ``drain`` is set."""


@contextmanager
def stop_signals(*others: signal.Signals, apart_s: float = 0.0) -> Iterator[StopSignals]:
    """Within the block, SIGTERM, SIGINT and ``others`` set the events that it yields, and do nothing else.

    A second signal counts only if it comes ``apart_s`` after the first one or later.
    """
    signals = StopSignals()
    loop = asyncio.get_running_loop()
    first_s = -math.inf

    def received() -> None:
        nonlocal first_s
        if not signals.drain.is_set():
            first_s = loop.time()
            signals.drain.set()
        elif loop.time() - first_s >= apart_s:
            signals.hurry.set()

    numbers = (signal.SIGTERM, signal.SIGINT, *others)
    for number in numbers:
        loop.add_signal_handler(number, received)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Has SIGTERM and SIGHUP end the block as SystemExit, so that what it has started is ended, too."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Reread:
    """What SIGHUP has brought."""

    what: str
    """What was read, for the log."""
    new: bool
    """Whether any of it is not what there was before. The file of an orchestrator may come later than the signal."""


@contextmanager
def on_hangup(reread: Callable[[], Reread]) -> Iterator[None]:
    """Within the block, SIGHUP calls ``reread`` in the event loop that runs now.

    ``reread`` raises ConfigError if it has changed nothing because a file cannot be used.
    """
    loop = asyncio.get_running_loop()

    def received() -> None:
        try:
            read = reread()
            log.info("SIGHUP: read again%s: %s", "" if read.new else ", and nothing is new", read.what)
        except ConfigError as exc:
            log.error("SIGHUP: nothing is changed, because: %s", exc)

    loop.add_signal_handler(signal.SIGHUP, received)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        # The default would end the process, and requests under way with it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def ignore_hangup() -> None:
    """Ignores SIGHUP, in a process whose parent reads its files again and passes on what is new."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
