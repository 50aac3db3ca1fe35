"""Request bodies to engine requests without holding up the tokens of others: long ones in threads, in turn and bounded.

Templates are Python, and a thread that runs them takes every other turn of the interpreter from the event loop. So
there are few threads, whose queues are bounded by the bytes of the bodies in them; and what nobody waits for any more
is not begun, or is given up at the next step. Huge bodies have a thread and a queue of their own, so that they keep
out each other alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from pdserve.errors import DeadlineExceeded, Unavailable

INLINE_BYTES = 3_072
"""Longer bodies are prepared in a thread: above this they take longer than the switch."""
HUGE_BYTES = 131_072
WORKERS = 2
"""Threads for long bodies; there is one for huge ones."""
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
        """``max_bytes`` of long bodies may be held, and as many of huge ones."""
        self._long = _Threads(WORKERS, max_bytes)
        self._huge = _Threads(1, max_bytes)

    @property
    def bytes_held(self) -> int:
        """Of bodies that wait for a thread, or are in one."""
        return self._long.bytes_held + self._huge.bytes_held

    async def run(self, size: int, work: Callable[[Check], T], timeout_s: float) -> T:
        """What ``work`` makes of a body of so many bytes.

        Raises Unavailable if too many bytes wait, and DeadlineExceeded if it is not done in time.
        """
        if size <= INLINE_BYTES:
            return work(_go_on)
        threads = self._long if size <= HUGE_BYTES else self._huge
        try:
            async with asyncio.timeout(timeout_s):
                return await threads.run(size, work)
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's deadline passed before its body was read", code="deadline_exceeded"
            ) from None

    def close(self) -> None:
        """What waits is dropped, what runs ends by itself."""
        self._long.close()
        self._huge.close()


class _Threads:
    """Some threads and their queue."""

    def __init__(self, workers: int, max_bytes: int) -> None:
        self.bytes_held = 0
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="preparing")

    async def run(self, size: int, work: Callable[[Check], T]) -> T:
        self._take(size)
        abandoned = threading.Event()

        def check() -> None:
            if abandoned.is_set():
                raise Abandoned

        def ended(_: Future[T]) -> None:
            with self._lock:
                self.bytes_held -= size

        future = self._pool.submit(work, check)
        future.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(future)
        finally:
            abandoned.set()

    def _take(self, size: int) -> None:
        with self._lock:
            # One that is larger than all that may wait goes alone.
            if self.bytes_held and self.bytes_held + size > self._max_bytes:
                raise Unavailable(
                    "too many long prompts wait to be read", code="overloaded", retry_after_s=RETRY_AFTER_S
                )
            self.bytes_held += size

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _go_on() -> None:
    pass
