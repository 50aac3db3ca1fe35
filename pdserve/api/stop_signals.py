"""SIGTERM and SIGINT as something to wait for. The first asks to drain, a second one to hurry."""

from __future__ import annotations

import asyncio
import signal
from types import TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context manager: while it is entered, the signals do nothing else."""

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
