"""One client request that is relayed to nodes, from its arrival to its last byte.

    OPENING ──▶ RELAYING ───────────────▶ ENDED     a stream
                  │  ▲                      ▲
                  ▼  │                      │
                RESUMING ───────────────────┘       its node was lost; another one goes on, or none
    OPENING ────────────────────────────▶ ENDED     a response in one piece, or an error
      │  ▲                                  ▲
      ▼  │                                  │
    RESUMING ───────────────────────────────┘       its node was lost behind a journal

The task that handles the request enters its ``RelayedRequest`` with ``with``. However the task leaves it, the node's
response is closed, its journal is freed, and the request has ended exactly once.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import msgspec

from pdserve.errors import RequestError
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.status import Pause
from pdserve.wire.timeline import Moment, MomentKind, TraceContext, new_span_id
from pdserve_proxy.records.relay_record import Detours, RelayRecord, RequestSpan, attempt_phase
from pdserve_proxy.relay.outcomes import CutReason, RelayOutcome
from pdserve_proxy.routing.attempts import Attempt
from pdserve_proxy.routing.router import Route

CUT_GRACE_S = 5.0
"""Seconds that a client has for the bytes that are left, after the proxy has cut its request short."""


_LEAST_S = 0.001
MAX_PAUSES = 16
"""The number of pauses of one answer that are remembered."""


class RelayPhase(enum.Enum):
    OPENING = "opening"
    RELAYING = "relaying"
    RESUMING = "resuming"
    ENDED = "ended"


# The members have names of their own because a look-up on the enum's class costs a call for every request.
_OPENING, _RELAYING, _RESUMING, _ENDED = RelayPhase


class Closable(Protocol):
    """A response that a node has begun, as far as a relayed request needs to know it."""

    def close(self) -> None:
        """Closes its connection now, and fails a read that waits on it."""

    def after_next(self, within_s: float, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once: after the next bytes have been relayed, or ``within_s`` from now at the latest."""


class Freeable(Protocol):
    """The journal of a stream, as far as a relayed request needs to know it."""

    def free(self) -> None:
        """Frees the memory that it takes."""


def _ignore(node: NodeInfo) -> None:
    pass


class RelayedRequest:
    """One request, used as a context manager in the task that handles it.

    While there is no response, because none has come yet or its node was lost, a cut cancels that task;
    ``takes_cancel_as_cut`` tells a cut from a client that has left. Times are seconds on the monotonic clock.
    """

    # Without slots, an object with more than 30 attributes costs several times as much to make.
    __slots__ = (
        "_attempt",
        "_attempt_began_s",
        "_deadline_s",
        "_detours",
        "_grace_timer",
        "_journal",
        "_leave_place",
        "_loop",
        "_on_end",
        "_on_loss",
        "_pause_began_s",
        "_response",
        "_span",
        "_task",
        "admitted_s",
        "answered_by",
        "attempts",
        "broken_links",
        "cut_short",
        "ended_s",
        "error",
        "first_byte_at_s",
        "node_first_byte_s",
        "outcome",
        "path",
        "pauses",
        "phase",
        "prompt_done_s",
        "read_s",
        "relayed_bytes",
        "request_id",
        "route",
        "sent_s",
        "started_s",
        "status",
        "tells_first_token",
        "trace",
    )

    def __init__(
        self,
        task: asyncio.Task[None],
        request_id: str,
        path: str,
        timeout_s: float,
        on_end: Callable[[RelayedRequest], None],
        trace: TraceContext | None = None,
        *,
        exports: bool = False,
        on_loss: Callable[[NodeInfo], None] = _ignore,
    ) -> None:
        """The caller has to ``cut`` the request ``timeout_s`` from now.

        Its span hangs from ``trace``, if this process ``exports`` spans. Otherwise the nodes' spans do. ``on_loss`` is
        called with each node that is lost after it has begun to answer.
        """
        self._task = task
        self._loop = task.get_loop()
        self._on_end = on_end
        self._on_loss = on_loss
        self.started_s = now_s = time.monotonic()
        self._deadline_s = now_s + timeout_s
        self.read_s: float | None = None
        """When the body was there."""
        self.admitted_s: float | None = None
        self.ended_s: float | None = None
        self._grace_timer: asyncio.TimerHandle | None = None
        self._response: Closable | None = None
        self._journal: Freeable | None = None
        self.phase = _OPENING
        self.cut_short: CutReason | None = None
        self.request_id = request_id
        self.path = path
        self.route: Route | None = None
        """The nodes of the last attempt that has begun."""
        self._attempt: Attempt | None = None
        self.attempts = 0
        """The number of attempts that have begun."""
        self.broken_links: frozenset[bytes] = frozenset()
        """The boot ids of the prefill nodes that live, and to which a decode node lost the link with this request."""
        self.sent_s: float | None = None
        """When the first attempt began."""
        self._attempt_began_s: float | None = None
        """When the present attempt began; None before the first one, and after one that has failed or was left."""
        self.prompt_done_s: float | None = None
        """When the node needed its prefill node no more."""
        self.tells_first_token = False
        """Whether the node's first bytes come with its first token, and not with its complete answer."""
        self.pauses: tuple[Pause, ...] = ()
        self._pause_began_s: float | None = None
        self._leave_place: Callable[[], None] | None = None
        self.status = 0
        self.outcome: RelayOutcome | None = None
        self.error: RequestError | None = None
        """What the client was told, if the proxy itself told it of a failure."""
        self.first_byte_at_s: float | None = None
        """When the first byte for the client came; None before that."""
        self.answered_by: NodeInfo | None = None
        """The node from which that byte came."""
        self.node_first_byte_s = 0.0
        """Seconds from the beginning of its attempt to that byte."""
        self.relayed_bytes = 0
        self._detours: Detours | None = None
        self.trace = trace
        self._span: RequestSpan | None = None
        if exports and trace is not None and trace.sampled:
            self._span = RequestSpan(trace, new_span_id(), b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        if self.phase is not _ENDED:
            self._fail(exc)

    @property
    def decode_name(self) -> str:
        return self.route.decode.name if self.route is not None else "-"

    @property
    def prefill_name(self) -> str:
        return self.route.prefill[0].name if self.route is not None and self.route.prefill else "-"

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline; always above 0, since a node refuses a deadline of 0."""
        left_s = self._deadline_s - time.monotonic()
        return left_s if left_s > _LEAST_S else _LEAST_S

    @property
    def resuming(self) -> bool:
        """Whether its client gets nothing, because its node was lost or left."""
        return self._pause_began_s is not None

    @property
    def first_byte_s(self) -> float | None:
        """Seconds from the start to the first byte for the client; None before that byte has come."""
        return None if self.first_byte_at_s is None else self.first_byte_at_s - self.started_s

    @property
    def attempt_trace(self) -> TraceContext | None:
        """What hangs from the present attempt; None if nobody exports it."""
        span = self._span
        if span is None or self._attempt_began_s is None:
            return self.trace
        return span.parent.child(span.attempt_id)

    def record(self) -> RelayRecord:
        """Returns what is remembered of the request, as it is now."""
        return RelayRecord(
            self.request_id,
            self.path,
            self.started_s,
            self.sent_s,
            self.prompt_done_s,
            self.tells_first_token,
            self.pauses,
            self.attempts,
            self.ended_s,
            self.outcome or "",
            self.status,
            read_s=self.read_s,
            admitted_s=self.admitted_s,
            attempt_began_s=self._attempt_began_s,
            first_byte_at_s=self.first_byte_at_s,
            nodes=self.route,
            resuming=self.resuming,
            detours=self._detours,
            span=self._span,
        )

    def queued(self) -> None:
        """Notes that the body is there, and the request waits for its place."""
        self.read_s = time.monotonic()

    def attempt_failed(self, why: str) -> None:
        """Notes that the present attempt is over before the request is."""
        began_s, self._attempt_began_s = self._attempt_began_s, None
        if began_s is not None and self.route is not None:
            span_id = b"" if self._span is None else self._span.attempt_id
            self._unusual().add_attempt(attempt_phase(self.route, began_s, time.monotonic(), why, span_id))

    def note(self, kind: MomentKind, gap_s: float | None = None) -> None:
        """Notes what has just happened to the attempt that has begun last."""
        self._unusual().add_moment(Moment(kind=kind, at_s=time.monotonic(), node=self.decode_name, gap_s=gap_s))

    def _unusual(self) -> Detours:
        if self._detours is None:
            self._detours = Detours()
        return self._detours

    def own_response(self, response: Closable) -> None:
        """Closes ``response`` at the end, or when the next one is passed."""
        if self._response is not None:
            self._response.close()
        self._response = response

    def own_journal(self, journal: Freeable | None) -> None:
        """Frees ``journal``, if there is one, at the end, or when the next one or None is passed."""
        if self._journal is not None:
            self._journal.free()
        self._journal = journal

    def hold_place(self, release: Callable[[], None]) -> None:
        """Holds a place among the admitted requests until the end, which calls ``release``."""
        self._leave_place = release
        self.admitted_s = time.monotonic()

    def release_place(self) -> None:
        """Leaves its place to others and ends its attempt: it waits for a node, and nothing is computed for it."""
        if self._attempt is not None:
            self._end_attempt()
        release, self._leave_place = self._leave_place, None
        if release is not None:
            release()

    def after_next_event(self, within_s: float, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once if there is a response: after its next event, or after ``within_s``."""
        if self._response is not None:
            self._response.after_next(within_s, callback)

    async def next_event(self, within_s: float) -> None:
        """Waits for the next event of the response, or for ``within_s``."""
        came = self._loop.create_future()

        def note() -> None:
            if not came.done():
                came.set_result(None)

        self.after_next_event(within_s, note)
        await asyncio.wait([came], timeout=within_s)

    def leave_node(self) -> None:
        """Closes the response, so that whoever reads it goes on with another node as after a loss."""
        if self._response is not None:
            self._response.close()

    def begin_attempt(self, route: Route, attempt: Attempt) -> None:
        """Ends the attempt before this one, if there is one, and begins ``attempt``."""
        if self._attempt is not None:
            self._end_attempt()
        if self._attempt_began_s is not None:
            self.attempt_failed("")
        self.route, self._attempt = route, attempt
        self.attempts += 1
        self._attempt_began_s = now_s = time.monotonic()
        if self.sent_s is None:
            self.sent_s = now_s
        if self._span is not None:
            self._span = msgspec.structs.replace(self._span, attempt_id=new_span_id())
        if self.phase is _OPENING:
            if self.first_byte_at_s is not None:
                self._unusual().add_moment(Moment(kind=MomentKind.FIRST_BYTE, at_s=self.first_byte_at_s))
            self.first_byte_at_s = self.prompt_done_s = None
            self.tells_first_token = False

    def got_byte(self) -> None:
        """Notes that bytes for the client came from the node, which needs its prefill node no more."""
        if self.first_byte_at_s is None:
            self.first_byte_at_s = now_s = time.monotonic()
            if self.route is not None:
                self.answered_by = self.route.decode
            if self._attempt_began_s is not None:
                self.node_first_byte_s = now_s - self._attempt_began_s
        elif self.phase is not _RESUMING:
            return
        self.prompt_computed()

    def prompt_computed(self) -> None:
        """Notes that the node needs its prefill node no more."""
        if self.prompt_done_s is None:
            self.prompt_done_s = self.first_byte_at_s or time.monotonic()
        if self._attempt is not None:
            self._attempt.prompt_computed()

    def node_lost(self) -> None:
        """Notes that the node of the present attempt was lost, from which the answer came."""
        if self.route is not None:
            self._on_loss(self.route.decode)

    def begin_relaying(self, status: int) -> None:
        self.phase = _RELAYING
        self.status = status
        if self._pause_began_s is not None:
            self._end_pause()

    def open_again(self) -> None:
        """Waits for a response in one piece once more, of which the client has nothing yet."""
        self.phase = _OPENING
        self.prompt_computed()
        self._end_pause()

    def begin_resuming(self, outcome: str = "left") -> None:
        """Closes the node's response, so that nothing it still says is relayed. ``outcome`` is that of the attempt."""
        self.phase = _RESUMING
        if self._pause_began_s is None:
            self._pause_began_s = time.monotonic()
        if self._response is not None:
            self._response.close()
            self._response = None
        self.attempt_failed(outcome)
        self._end_attempt()

    def end(self, outcome: RelayOutcome, status: int | None = None) -> None:
        """Ends the request; every call but the first does nothing."""
        if self.phase is _ENDED:
            return
        self.phase = _ENDED
        self.outcome = outcome
        self.status = status or self.status
        self.ended_s = time.monotonic()
        if self._response is not None:
            self._response.close()
            self._response = None
        if self._journal is not None:
            self._journal.free()
            self._journal = None
        self.release_place()
        self._on_end(self)

    def cut(self, why: CutReason) -> None:
        """Cuts the request short: the client gets an error, or an error event.

        A second call cancels the task, and with it a client that does not take the rest.
        """
        if self.phase is _ENDED or self.cut_short is not None:
            self._task.cancel()
            return
        self.cut_short = why
        self._grace_timer = self._loop.call_later(CUT_GRACE_S, self.cut, why)
        if self.phase is not _RELAYING:
            self._task.cancel()
        elif self._response is not None:
            self._response.close()

    def takes_cancel_as_cut(self) -> bool:
        """Returns whether only a cut has cancelled the task just now, and takes the cancellation back then."""
        return self.cut_short is not None and self._task.uncancel() == 0

    def _fail(self, exc: BaseException | None) -> None:
        """Ends the request of a task that ended without a response, because of ``exc`` if there was one."""
        if isinstance(exc, asyncio.CancelledError):
            self.end(RelayOutcome.CLIENT_GONE if self.cut_short is None else self.cut_short.outcome, 499)
        elif _client_gone(exc):
            self.end(RelayOutcome.CLIENT_GONE, 499)
        else:
            self.end(RelayOutcome.FAILED, 500)

    def _end_pause(self) -> None:
        if self._pause_began_s is not None:
            if len(self.pauses) < MAX_PAUSES:
                self.pauses += (Pause(self._pause_began_s, time.monotonic()),)
            self._pause_began_s = None

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.end_everywhere()
            self._attempt = None


def _client_gone(exc: BaseException | None) -> bool:
    """Returns whether a write failed on a closed connection, for which uvloop has no exception type of its own."""
    return isinstance(exc, RuntimeError) and "the handler is closed" in str(exc)
