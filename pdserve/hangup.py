"""SIGHUP: files of secrets, keys and certificates are read again, without a restart."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdserve.errors import ConfigError

log = logging.getLogger(__name__)


@contextmanager
def on_hangup(reread: Callable[[], str]) -> Iterator[None]:
    """While this is entered, SIGHUP calls ``reread`` in the event loop that runs now.

    It returns what it has read, for the log, or raises ConfigError and has changed nothing.
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
        # Not the default, which ends the process: what is under way is ended in order.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def ignore_hangup() -> None:
    """For a process whose parent reads again on SIGHUP, and tells it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
