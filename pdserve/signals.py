"""Turns signals into events of a process's asyncio loop.

The first SIGTERM or SIGINT asks a node to drain, and a second one to hurry. SIGHUP makes a process read its files of
secrets, keys and certificates again, without a restart.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from pdserve.errors import ConfigError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context manager, within which SIGTERM and SIGINT set events and do nothing else."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.hurry = asyncio.Event()

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def _received(self) -> None:
        (self.hurry if self.drain.is_set() else self.drain).set()


log = logging.getLogger(__name__)


@contextmanager
def on_hangup(reread: Callable[[], str]) -> Iterator[None]:
    """Within the block, SIGHUP calls ``reread`` in the event loop that runs now.

    ``reread`` returns what it has read, for the log, or raises ConfigError and has changed nothing.
    """
    loop = asyncio.get_running_loop()

    def received() -> None:
        try:
            log.info("SIGHUP: read again: %s", reread())
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
