"""Makes engine requests out of request bodies without holding up the tokens of other requests.

Long bodies are prepared in threads. Templates are Python, and a thread that runs them takes every other turn of the
interpreter from the event loop. So there are few threads, and the bytes of the bodies in their queues are bounded, and
those of one client to half of that. Clients take turns. Work whose client is gone is not begun, or is given up at its
next step. Huge bodies have a thread and a queue of their own, so that they keep out nothing but each other.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeAlias, TypeVar

from pdserve.errors import DeadlineExceeded, TooManyRequests, Unavailable
from pdserve.grammars.client_turns import WaitingTurns

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

    async def run(self, size: int, work: Callable[[Check], T], timeout_s: float, client: bytes = b"") -> T:
        """Returns what ``work`` makes of a body of ``size`` bytes. ``client`` is in whose turn it is done.

        Raises TooManyRequests if too many bytes of the client wait, Unavailable if too many of all clients do, and
        DeadlineExceeded if it is not done in time.
        """
        if size <= INLINE_BYTES:
            return work(_go_on)
        threads = self._long if size <= HUGE_BYTES else self._huge
        try:
            async with asyncio.timeout(timeout_s):
                return await threads.run(size, work, client)
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
        self._held = Counter[bytes]()
        """The bytes that each client has in ``bytes_held``."""
        self._waiting: WaitingTurns[_Work[Any]] = WaitingTurns()
        self._changing = threading.Lock()

    async def run(self, size: int, work: Callable[[Check], T], client: bytes) -> T:
        waiting = _Work(size, work, client)
        self._put(waiting)
        try:
            return await asyncio.wrap_future(waiting.result)
        finally:
            self._abandon(waiting)

    def close(self) -> None:
        self._closed = True
        self._waiting.end()

    def _put(self, work: _Work[Any]) -> None:
        self._hold(work)
        self._waiting.put(work.client, work)
        starting, self._started = not self._started, True
        for _ in range(self._workers if starting else 0):
            threading.Thread(target=self._serve, name="preparing", daemon=True).start()

    def _hold(self, work: _Work[Any]) -> None:
        with self._changing:
            # One that is larger than all that may wait goes alone.
            if self._closed or (self.bytes_held and self.bytes_held + work.size > self._max_bytes):
                raise Unavailable(
                    "too many long prompts wait to be read", code="overloaded", retry_after_s=RETRY_AFTER_S
                )
            held = self._held[work.client]
            if held and held + work.size > self._max_bytes // 2:
                raise TooManyRequests(
                    "too many long prompts of this client wait to be read",
                    code="rate_limit_exceeded",
                    retry_after_s=RETRY_AFTER_S,
                )
            self.bytes_held += work.size
            self._held[work.client] += work.size

    def _let_go(self, work: _Work[Any]) -> None:
        with self._changing:
            self.bytes_held -= work.size
            self._held[work.client] -= work.size
            if not self._held[work.client]:
                del self._held[work.client]

    def _abandon(self, work: _Work[Any]) -> None:
        """Ends the interest in ``work``. If it was not begun, it is let go, and its body with it."""
        work.abandoned.set()
        if self._waiting.discard(work.client, work):
            self._let_go(work)

    def _serve(self) -> None:
        while (work := self._waiting.take()) is not None:
            work.do()
            self._let_go(work)
            del work  # its body is freed before the next one comes


class _Work(Generic[T]):
    def __init__(self, size: int, work: Callable[[Check], T], client: bytes) -> None:
        self.size, self.client = size, client
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
