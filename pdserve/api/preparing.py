"""Request bodies to engine requests without holding up the tokens of others: long ones in threads, in turn and bounded.

Templates are Python, and a thread that runs them takes every other turn of the interpreter from the event loop. So
there are few threads, whose queue is bounded by the bytes of the bodies in it; and what nobody waits for any more is
not begun, or is given up at the next step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from pdserve.errors import Unavailable

INLINE_BYTES = 3_072
"""Longer bodies are prepared in a thread: above this they take longer than the switch."""
WORKERS = 2
MAX_BYTES = 64 * 2**20
RETRY_AFTER_S = 1

T = TypeVar("T")

Check: TypeAlias = Callable[[], None]
"""Called between the steps of some work; raises ``Abandoned`` if nobody waits for its result any more."""


class Abandoned(Exception):
    """Ends work in its thread; nobody sees it."""


class Preparer:
    """Of one node. ``close`` ends its threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="preparing")

    @property
    def bytes_held(self) -> int:
        """Of bodies that wait for a thread, or are in one."""
        return self._bytes

    async def run(self, size: int, work: Callable[[Check], T]) -> T:
        """What ``work`` makes of a body of so many bytes. Raises Unavailable if too many of them wait."""
        if size <= INLINE_BYTES:
            return work(_go_on)
        self._take(size)
        abandoned = threading.Event()

        def check() -> None:
            if abandoned.is_set():
                raise Abandoned

        def ended(_: Future[T]) -> None:
            with self._lock:
                self._bytes -= size

        future = self._pool.submit(work, check)
        future.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(future)
        finally:
            abandoned.set()

    def _take(self, size: int) -> None:
        with self._lock:
            # One that is larger than all that may wait goes alone.
            if self._bytes and self._bytes + size > self._max_bytes:
                raise Unavailable(
                    "too many long prompts wait to be read", code="overloaded", retry_after_s=RETRY_AFTER_S
                )
            self._bytes += size

    def close(self) -> None:
        """What waits is dropped, what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _go_on() -> None:
    pass
