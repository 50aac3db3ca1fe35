"""Makes OpenTelemetry spans of timelines, and sends them to a collector, from a thread of its own.

A part is a span, each of its phases is a child of that, and its moments are events. Chunks are events of their prompt's
``prefill``. Names of attributes are OpenTelemetry's where it has some (HTTP, generative AI), and else begin with
``pdserve.``. No attribute has anything of a prompt or an answer.

The spans are made when all is over, with the times and ids that were noted: nothing of OpenTelemetry runs beside a
request, which costs an entry in a queue. When that is full, because the collector is gone or too slow, parts are
dropped and counted. Only a process that exports spans imports this.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from pdserve.log_format import LogThrottle
from pdserve.metrics import installed
from pdserve.tracing.tracing import SpanCounts
from pdserve.wire.timeline import Moment, Phase, PhaseKind, ProcessKind, TimelinePart, new_span_id

log = logging.getLogger(__name__)

Value = str | int | float | tuple[str, ...]

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
_CALLS = (PhaseKind.ATTEMPT, PhaseKind.FETCH, PhaseKind.REUSE)
"""The phases in which another process works for this one."""
_FAILURES = frozenset(
    {
        *("error", "failed", "upstream_lost", "upstream_failed", "timed_out", "shut_down"),
        *("deadline", "lost", "unreachable"),
        *("misfit", "peer_lost", "lease_expired", "overloaded", "corrupt", "stalled"),
    }
)
_NO_PARENT = bytes(8)

MAX_ANSWER_BYTES = 64 * 1024
MAX_QUEUED = 2048
"""The most parts that wait for the thread."""
BATCH = 64
"""The most parts whose spans leave in one message."""
LINGER_S = 0.5
"""A part waits for so long for others that leave with it."""
EXPORT_S = 5.0
"""How long the collector gets for a message, further attempts included."""
WARN_EVERY_S = 60.0
TRACES_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class SpanMaker:
    """Makes the spans of one process."""

    resource: Resource
    scope: InstrumentationScope

    def spans(self, part: TimelinePart, unix_ns: int) -> Iterator[ReadableSpan]:
        """Yields the spans of a part, which has a trace. ``unix_ns`` is what the monotonic clock lags behind 1970."""
        assert part.trace is not None and part.end_s is not None
        trace_id, own_id = part.trace.trace_id, part.span_id
        own = _context(trace_id, own_id)

        def at(seconds: float) -> int:
            return unix_ns + int(seconds * 1e9)

        chunks = [phase for phase in part.phases if phase.kind is PhaseKind.CHUNK]
        has_prefill = any(phase.kind is PhaseKind.PREFILL for phase in part.phases)
        chunk_events = [Event("chunk", _given(_chunk_attributes(chunk)), at(chunk.end_s)) for chunk in chunks]
        events = [
            Event(moment.kind.value, _given(_moment_attributes(moment)), at(moment.at_s)) for moment in part.moments
        ]
        yield ReadableSpan(
            name=_name(part),
            context=own,
            parent=None if part.trace.span_id == _NO_PARENT else _context(trace_id, part.trace.span_id, remote=True),
            resource=self.resource,
            attributes=_given(_part_attributes(part)),
            events=events if has_prefill else events + chunk_events,
            kind=SpanKind.INTERNAL if part.process is ProcessKind.ENGINE else SpanKind.SERVER,
            status=_status(part.outcome if part.status < 500 else "failed"),
            start_time=at(part.start_s),
            end_time=at(part.end_s),
            instrumentation_scope=self.scope,
        )
        attempt_before: SpanContext | None = None
        for phase in part.phases:
            if phase.kind is PhaseKind.CHUNK:
                continue
            context = _context(trace_id, phase.span_id or new_span_id())
            links = []
            if phase.kind is PhaseKind.ATTEMPT:
                if attempt_before is not None:
                    links.append(Link(attempt_before, {"pdserve.link": "previous_attempt"}))
                attempt_before = context
            yield ReadableSpan(
                name=phase.kind.value,
                context=context,
                parent=own,
                resource=self.resource,
                attributes=_given(_phase_attributes(part, phase)),
                events=chunk_events if phase.kind is PhaseKind.PREFILL else (),
                links=links,
                kind=SpanKind.CLIENT if phase.kind in _CALLS else SpanKind.INTERNAL,
                status=_status(phase.outcome),
                start_time=at(phase.start_s),
                end_time=at(max(phase.start_s, phase.end_s)),
                instrumentation_scope=self.scope,
            )


def _name(part: TimelinePart) -> str:
    match part.process:
        case ProcessKind.PROXY:
            return f"POST {part.route}"
        case ProcessKind.API:
            return f"{_OPERATIONS.get(part.route, 'answer')} {part.model}"
        case ProcessKind.ENGINE:
            return "engine"
        case ProcessKind.PREFILL_ENGINE:
            return "prefill engine"


def _part_attributes(part: TimelinePart) -> dict[str, Value | None]:
    attributes: dict[str, Value | None] = {
        "pdserve.request_id": part.request_id,
        "pdserve.process": part.process.value,
        "pdserve.node": part.node,
        "pdserve.outcome": part.outcome,
        "pdserve.left_out": part.left_out,
        "gen_ai.request.model": part.model,
        "gen_ai.usage.input_tokens": part.prompt_tokens,
        "gen_ai.usage.output_tokens": part.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": part.cached_tokens,
        "pdserve.drafts": part.drafts or None,
        "pdserve.accepted_drafts": part.accepted_drafts if part.drafts else None,
    }
    if part.process is ProcessKind.PROXY:
        attributes |= {"http.route": part.route, "http.response.status_code": part.status}
    if part.process is ProcessKind.API:
        attributes |= {
            "gen_ai.operation.name": _OPERATIONS.get(part.route),
            "gen_ai.provider.name": "pdserve",
            "gen_ai.response.model": part.model,
            "gen_ai.response.finish_reasons": tuple(part.outcome.split("+")),
            "pdserve.attempt": part.attempt,
        }
    if part.gaps is not None:
        attributes["pdserve.gaps.count"] = sum(part.gaps.counts)
        attributes["pdserve.gaps.longest_ms"] = max((gap.seconds for gap in part.gaps.longest), default=0.0) * 1000
    return attributes


def _phase_attributes(part: TimelinePart, phase: Phase) -> dict[str, Value | None]:
    """A decode phase has as many steps as tokens: steps have no spans of their own."""
    return {
        "pdserve.request_id": part.request_id,
        "pdserve.peer": phase.node,
        "pdserve.prefill": phase.prefill,
        "pdserve.outcome": phase.outcome,
        "pdserve.tokens": phase.tokens,
        "pdserve.blocks": phase.blocks,
        "pdserve.bytes": phase.moved_bytes,
        "pdserve.tail_ms": None if phase.tail_s is None else phase.tail_s * 1000,
    }


def _chunk_attributes(chunk: Phase) -> dict[str, Value | None]:
    return {
        "pdserve.tokens": chunk.tokens,
        "pdserve.chunks": chunk.chunks or 1,
        "pdserve.duration_ms": (chunk.end_s - chunk.start_s) * 1000,
    }


def _moment_attributes(moment: Moment) -> dict[str, Value | None]:
    return {
        "pdserve.peer": moment.node,
        "pdserve.blocks": moment.blocks,
        "pdserve.gap_ms": None if moment.gap_s is None else moment.gap_s * 1000,
    }


def _given(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Returns the attributes that say something."""
    return {name: value for name, value in attributes.items() if value not in (None, "", 0)}


def _status(outcome: str) -> Status:
    failures = _FAILURES.intersection(outcome.split("+"))
    return Status(StatusCode.ERROR, min(failures)) if failures else Status(StatusCode.UNSET)


def _context(trace_id: bytes, span_id: bytes, *, remote: bool = False) -> SpanContext:
    return SpanContext(
        int.from_bytes(trace_id, "big"), int.from_bytes(span_id, "big"), remote, TraceFlags(TraceFlags.SAMPLED)
    )


class BoundedSession(requests.Session):
    """A session whose requests end, with an answer or an exception, within a few times ``within_s``.

    Nothing here needs an answer but its status. So the head of an answer has a bound in time, however slowly its bytes
    come. A body is read only so that its connection can be used again, within bounds in bytes and time. One that breaks
    off, or has no end, costs the connection, and says nothing of the spans, which the collector has. No redirect is
    followed: spans go where the operator has said.
    """

    def __init__(self, within_s: float) -> None:
        super().__init__()
        self._within_s = within_s
        for scheme in ("http://", "https://"):
            self.mount(scheme, _WatchedAdapter())

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """Does what the base class does, and raises ``requests.ConnectionError`` for a redirect."""
        response = super().request(*args, **{**kwargs, "allow_redirects": False, "stream": True})
        if not self._ends(response):
            response.close()
        response._content = b""
        if 300 <= response.status_code < 400:  # which its users take for a success
            raise requests.ConnectionError("the collector sends spans elsewhere")
        return response

    def _ends(self, response: requests.Response) -> bool:
        """Reads the body of ``response``. Returns whether it came to its end within the bounds."""
        until_s, size = time.monotonic() + self._within_s, 0
        with contextlib.suppress(HTTPError):  # what reads of a raw body raise, in place of requests' own errors
            while size <= MAX_ANSWER_BYTES and time.monotonic() <= until_s:
                piece = response.raw.read1(MAX_ANSWER_BYTES)
                if not piece:
                    return True
                size += len(piece)
        return False


class _Watched(HTTPConnection):
    """Each read of a head has a bound of its own, but a head is read line by line: this bounds all of it."""

    _is_cut = False

    def getresponse(self) -> Any:
        bound_s = self.timeout if isinstance(self.timeout, int | float) else None
        timer = threading.Timer(bound_s or 0.0, self._cut)
        timer.daemon = True
        if bound_s:
            timer.start()
        try:
            response = super().getresponse()
        finally:
            timer.cancel()
        if self._is_cut:  # half a head may look like a whole one
            response.close()
            self.close()
            raise TimeoutError("the head of the answer comes too slowly")
        return response

    def _cut(self) -> None:
        self._is_cut = True
        with contextlib.suppress(OSError, AttributeError):  # it may be closed already
            self.sock.shutdown(socket.SHUT_RDWR)


class _WatchedTls(_Watched, HTTPSConnection):
    pass


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Watched


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _WatchedTls


class _WatchedAdapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}


class SpanExport:
    """The queue, and the thread that empties it. ``close`` it in the end."""

    def __init__(self, endpoint: str, attributes: dict[str, str], counts: SpanCounts) -> None:
        """``endpoint`` is the collector's base address, and ``attributes`` say which process this is."""
        # Its own lines come for each failure, and would have a line of the log for each attempt.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_S, session=BoundedSession(EXPORT_S))
        self._maker = SpanMaker(_resource(attributes), InstrumentationScope("pdserve", installed("pdserve")))
        self._endpoint = endpoint
        self._counts = counts
        self._throttle = LogThrottle(WARN_EVERY_S)
        self._overflowed = 0
        """The parts for which the queue was full. Only ``add`` counts, and only the thread compares."""
        self._reported_overflow = 0
        self._tell_overflow_s = 0.0
        self._queue: deque[TimelinePart] = deque()
        self._news = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, part: TimelinePart) -> None:
        """Queues the spans of a part that has ended. Never waits."""
        if len(self._queue) >= MAX_QUEUED or self._stop.is_set():
            self._counts.dropped += 1
            self._overflowed += 1
            return
        self._queue.append(part)
        if not self._news.is_set():
            self._news.set()

    def close(self, within_s: float) -> None:
        """Sends what is queued, for at most about ``within_s``, for which it blocks. The rest is dropped."""
        self._stop.set()
        self._news.set()
        self._thread.join(within_s)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # it ends the pauses between attempts
        self._counts.dropped += len(self._queue)
        self._queue.clear()

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._stop.wait(LINGER_S)
            self._news.clear()
            while parts := self._take():
                self._export(parts)
                self._warn_of_overflow(time.monotonic())
            if self._stop.is_set() and not self._queue:
                return

    def _warn_of_overflow(self, now: float) -> None:
        lost = self._overflowed - self._reported_overflow
        if not lost or now < self._tell_overflow_s:
            return
        self._reported_overflow += lost
        self._tell_overflow_s = now + WARN_EVERY_S
        log.warning(
            "%s takes spans too slowly: the spans of %d requests were dropped, because %d others wait",
            self._endpoint,
            lost,
            MAX_QUEUED,
        )

    def _take(self) -> list[TimelinePart]:
        return [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]

    def _export(self, parts: Sequence[TimelinePart]) -> None:
        unix_ns = time.time_ns() - time.monotonic_ns()
        try:
            spans = [span for part in parts for span in self._maker.spans(part, unix_ns)]
            done = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # a defect here must not end the thread, and with it every later span
            log.exception("spans could not be made or sent")
            done = False
        if done:
            self._counts.exported += len(parts)
            return
        self._counts.dropped += len(parts)
        if failures := self._throttle.add(time.monotonic()):
            log.warning("%s does not take spans: %d message(s) of them were dropped", self._endpoint, failures)


def traces_url(endpoint: str) -> str:
    """Returns where the spans go: an endpoint that is not the traces' own yet is the base of all signals."""
    base = endpoint.rstrip("/")
    return base if base.endswith(TRACES_PATH) else base + TRACES_PATH


def _resource(attributes: dict[str, str]) -> Resource:
    """Returns what all spans of the process share. ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` count."""
    usual = Resource.create(attributes | {"service.version": installed("pdserve")})
    name = str(usual.attributes.get("service.name", ""))
    return usual.merge(Resource({"service.name": "pdserve"})) if name.startswith("unknown_service") else usual
