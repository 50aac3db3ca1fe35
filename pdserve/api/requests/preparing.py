"""Makes engine requests out of request bodies without holding up the tokens of other requests.

Long bodies are prepared in threads. Templates are Python, and a thread that runs them takes every other turn of the
interpreter from the event loop. So there are few threads, and the bytes of the bodies in their queues are bounded. Work
whose client is gone is not begun, or is given up at its next step. Huge bodies have a thread and a queue of their own,
so that they keep out nothing but each other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeAlias, TypeVar

from pdserve.errors import DeadlineExceeded, Unavailable

INLINE_BYTES = 3_072
"""Longer bodies are prepared in a thread. Shorter ones take less time than the switch to a thread."""
HUGE_BYTES = 131_072
WORKERS = 2
"""How many threads prepare long bodies. One prepares huge ones."""
MAX_BYTES = 64 * 2**20
RETRY_AFTER_S = 1

T = TypeVar("T")

Check: TypeAlias = Callable[[], None]
"""Work calls it between its steps. It raises ``Abandoned`` if no request waits for the result any more."""


class Abandoned(Exception):
    """Ends abandoned work in its thread, and goes no further."""


class Preparer:
    """Prepares the request bodies of one node. ``close`` ends its threads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Long bodies of ``max_bytes`` together may be held, and as many bytes of huge ones."""
        self._long = _Threads(WORKERS, max_bytes)
        self._huge = _Threads(1, max_bytes)

    @property
    def bytes_held(self) -> int:
        """How many bytes the bodies have that wait for a thread, or are in one."""
        return self._long.bytes_held + self._huge.bytes_held

    async def run(self, size: int, work: Callable[[Check], T], timeout_s: float) -> T:
        """Returns what ``work`` makes of a body of ``size`` bytes.

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
        """Begins none of the work that waits. What runs ends by itself, or with the process."""
        self._long.close()
        self._huge.close()


class _Threads:
    """Some threads and their queue. The process does not wait for them when it ends: a template may take for ever."""

    def __init__(self, workers: int, max_bytes: int) -> None:
        self.bytes_held = 0
        self._workers = workers
        self._max_bytes = max_bytes
        self._started = self._closed = False
        self._waiting: OrderedDict[_Work[Any], None] = OrderedDict()
        """The work that waits, in the order in which it came. Thousands may wait, and leave in any order."""
        self._changed = threading.Condition()

    async def run(self, size: int, work: Callable[[Check], T]) -> T:
        waiting = _Work(size, work)
        self._put(waiting)
        try:
            return await asyncio.wrap_future(waiting.result)
        finally:
            self._abandon(waiting)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, work: _Work[Any]) -> None:
        with self._changed:
            # One that is larger than all that may wait goes alone.
            if self._closed or (self.bytes_held and self.bytes_held + work.size > self._max_bytes):
                raise Unavailable(
                    "too many long prompts wait to be read", code="overloaded", retry_after_s=RETRY_AFTER_S
                )
            self.bytes_held += work.size
            self._waiting[work] = None
            self._changed.notify()
            starting, self._started = not self._started, True
        for _ in range(self._workers if starting else 0):
            threading.Thread(target=self._serve, name="preparing", daemon=True).start()

    def _abandon(self, work: _Work[Any]) -> None:
        """Ends the interest in ``work``. If it was not begun, it is let go, and its body with it."""
        work.abandoned.set()
        with self._changed:
            if work in self._waiting:
                del self._waiting[work]
                self.bytes_held -= work.size

    def _serve(self) -> None:
        while (work := self._next()) is not None:
            work.do()
            with self._changed:
                self.bytes_held -= work.size
            del work  # its body is not kept until the next one comes

    def _next(self) -> _Work[Any] | None:
        """Returns the work that is next, or None once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._waiting.popitem(last=False)[0]


class _Work(Generic[T]):
    def __init__(self, size: int, work: Callable[[Check], T]) -> None:
        self.size = size
        self.result: Future[T] = Future()
        self.abandoned = threading.Event()
        self._work = work

    def do(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            result = self._work(self._check)
        except BaseException as exc:
            self.result.set_exception(exc)
        else:
            self.result.set_result(result)

    def _check(self) -> None:
        if self.abandoned.is_set():
            raise Abandoned


def _go_on() -> None:
    pass
