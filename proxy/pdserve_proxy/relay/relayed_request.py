"""One client request that is relayed to nodes, from its arrival to its last byte.

    OPENING ──▶ RELAYING ──▶ ENDED        a stream
    OPENING ───────────────▶ ENDED        a response in one piece, or an error

The task that handles the request owns its ``RelayedRequest``, inside ``with``: whatever way it leaves that, the
upstream response is closed and the request has ended, once.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from pdserve.errors import DeadlineExceeded, RequestError, Unavailable
from pdserve_proxy.routing.attempts import Attempt
from pdserve_proxy.routing.router import Route

LAST_WORDS_S = 5.0
"""Seconds that a client gets to take the bytes that are left, after its request was cut short."""


class RelayPhase(enum.Enum):
    OPENING = "opening"
    RELAYING = "relaying"
    ENDED = "ended"


# In names of their own: to look a member up on its class goes through that class's __getattr__, for every request.
_OPENING, _RELAYING, _ENDED = RelayPhase


class RelayOutcome(enum.StrEnum):
    OK = "ok"
    CLIENT_GONE = "client_gone"
    UPSTREAM_LOST = "upstream_lost"
    REFUSED = "refused"
    """Answered with an error: the request's own, or no node could take it."""
    TIMED_OUT = "timed_out"
    SHUT_DOWN = "shut_down"
    FAILED = "failed"
    """A defect of the proxy's."""


class CutReason(enum.Enum):
    """Why the proxy cut a request short."""

    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"

    @property
    def error(self) -> RequestError:
        if self is CutReason.DEADLINE:
            return DeadlineExceeded("the request took longer than it may", code="deadline_exceeded")
        return Unavailable("the proxy is shutting down", code="shutting_down", retry_after_s=1)

    @property
    def outcome(self) -> RelayOutcome:
        return RelayOutcome.TIMED_OUT if self is CutReason.DEADLINE else RelayOutcome.SHUT_DOWN


class Upstream(Protocol):
    """A response that a node has begun."""

    def close(self) -> None:
        """Close its connection now, and fail a read that is waiting on it."""


class RelayedRequest:
    """To be used as a context manager in the task that handles the request.

    A cut cancels that task while there is no response yet; ``absorbs_cancel`` tells it from a client that has left.
    """

    def __init__(
        self,
        task: asyncio.Task[None],
        request_id: str,
        path: str,
        timeout_s: float,
        on_end: Callable[[RelayedRequest], None],
    ) -> None:
        """``timeout_s`` from now somebody has to ``cut`` it."""
        self._task = task
        self._loop = task.get_loop()
        self._on_end = on_end
        self._started_s = self._loop.time()
        self._deadline_s = self._started_s + timeout_s
        self._ended_s = self._started_s
        self._last_words: asyncio.TimerHandle | None = None
        self._upstream: Upstream | None = None
        self.phase = _OPENING
        self.cut_short: CutReason | None = None
        self.request_id = request_id
        self.path = path
        self._route: Route | None = None
        self._attempt: Attempt | None = None
        self._release: Callable[[], None] | None = None
        self.status = 0
        self.outcome: RelayOutcome | None = None
        self.first_byte_s: float | None = None
        """Seconds from the start; None until a byte came of what the client gets."""
        self.relayed_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._last_words is not None:
            self._last_words.cancel()
        if self.phase is not _ENDED:
            self._fail(exc)

    @property
    def decode_name(self) -> str:
        return self._route.decode.name if self._route is not None else "-"

    @property
    def prefill_name(self) -> str:
        return self._route.prefill[0].name if self._route is not None and self._route.prefill else "-"

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline; never quite 0, since a node takes none that is."""
        return max(self._deadline_s - self._loop.time(), 0.001)

    @property
    def total_s(self) -> float:
        return self._ended_s - self._started_s

    def attach(self, upstream: Upstream) -> None:
        """Own ``upstream`` until the end, or until the next one is attached."""
        if self._upstream is not None:
            self._upstream.close()
        self._upstream = upstream

    def hold(self, release: Callable[[], None]) -> None:
        """Own a place among the requests under way: ``release`` is called at the end."""
        self._release = release

    def begin_attempt(self, route: Route, attempt: Attempt) -> None:
        """An attempt begins; the one before it, if any, is over."""
        self._end_attempt()
        self._route, self._attempt = route, attempt
        self.first_byte_s = None

    def got_byte(self) -> None:
        if self.first_byte_s is None:
            self.first_byte_s = self._loop.time() - self._started_s
            if self._route is not None and self._attempt is not None:
                self._attempt.end_at(*[info.boot_id for info in self._route.prefill])

    def begin_relaying(self, status: int) -> None:
        self.phase = _RELAYING
        self.status = status

    def end(self, outcome: RelayOutcome, status: int | None = None) -> None:
        """Ends the request; every call but the first does nothing."""
        if self.phase is _ENDED:
            return
        self.phase = _ENDED
        self.outcome = outcome
        self.status = status or self.status
        self._ended_s = self._loop.time()
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None
        self._end_attempt()
        if self._release is not None:
            self._release()
        self._on_end(self)

    def cut(self, why: CutReason) -> None:
        """Cuts it short: the client gets an error, or an error event. A client that does not take it is let go."""
        if self.phase is _ENDED or self.cut_short is not None:
            self._task.cancel()
            return
        self.cut_short = why
        self._last_words = self._loop.call_later(LAST_WORDS_S, self.cut, why)
        if self.phase is _OPENING:
            self._task.cancel()
        elif self._upstream is not None:
            self._upstream.close()

    def absorbs_cancel(self) -> bool:
        """Whether the cancellation that its task has just got comes from a cut and nothing else: it may go on then."""
        return self.cut_short is not None and self._task.uncancel() == 0

    def leave(self) -> None:
        """The client is gone: the task that handles its request is cancelled."""
        self._task.cancel()

    def _fail(self, exc: BaseException | None) -> None:
        """Ends the request as one whose task came to nothing, because of ``exc`` if there was one."""
        if isinstance(exc, asyncio.CancelledError):
            self.end(RelayOutcome.CLIENT_GONE if self.cut_short is None else self.cut_short.outcome, 499)
        elif _client_gone(exc):
            self.end(RelayOutcome.CLIENT_GONE, 499)
        else:
            self.end(RelayOutcome.FAILED, 500)

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.end_everywhere()
            self._attempt = None


def _client_gone(exc: BaseException | None) -> bool:
    """Whether a write failed because its connection is closed, for which uvloop has no exception type of its own."""
    return isinstance(exc, RuntimeError) and "the handler is closed" in str(exc)
