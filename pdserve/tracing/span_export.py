"""Sends the spans of lanes to an OpenTelemetry collector, from a thread of its own.

A request costs an entry in a queue. When that is full, because the collector is gone or too slow, lanes are dropped and
counted. Only a process that exports spans imports this.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from pdserve.log_format import LogThrottle
from pdserve.metrics import installed
from pdserve.tracing.spans import SpanMaker
from pdserve.tracing.tracing import SpanCounts
from pdserve.wire.timeline import RequestLane

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 64 * 1024
MAX_QUEUED = 2048
"""The most lanes that wait for the thread."""
BATCH = 64
"""The most lanes whose spans leave in one message."""
LINGER_S = 0.5
"""A lane waits for so long for others that leave with it."""
EXPORT_S = 5.0
"""How long the collector gets for a message, further attempts included."""
WARN_EVERY_S = 60.0
TRACES_PATH = "/v1/traces"


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
        """The lanes for which the queue was full. Only ``add`` counts, and only the thread compares."""
        self._reported_overflow = 0
        self._tell_overflow_s = 0.0
        self._queue: deque[RequestLane] = deque()
        self._news = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, lane: RequestLane) -> None:
        """Queues the spans of a lane that has ended. Never waits."""
        if len(self._queue) >= MAX_QUEUED or self._stop.is_set():
            self._counts.dropped += 1
            self._overflowed += 1
            return
        self._queue.append(lane)
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
            while lanes := self._take():
                self._export(lanes)
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

    def _take(self) -> list[RequestLane]:
        return [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]

    def _export(self, lanes: Sequence[RequestLane]) -> None:
        unix_ns = time.time_ns() - time.monotonic_ns()
        try:
            spans = [span for lane in lanes for span in self._maker.spans(lane, unix_ns)]
            done = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # a defect here must not end the thread, and with it every later span
            log.exception("spans could not be made or sent")
            done = False
        if done:
            self._counts.exported += len(lanes)
            return
        self._counts.dropped += len(lanes)
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
