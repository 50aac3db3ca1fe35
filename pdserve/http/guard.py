"""uvicorn's HTTP protocol with bounds on what a client may do to a connection before its request is complete.

    WAITING ──▶ HEAD ──▶ BODY ──▶ ANSWERING ──▶ WAITING     a connection that stays open
                  │        │          ├──▶ HALF_CLOSED      the client says no more, and may still read
                  └────────┴──────────┴──────────┴──▶ CLOSING    refused, or its last response is over

uvicorn takes headers of any size for any time, and stops reading while a pipelined request waits, so that it does not
notice when the client leaves. This protocol bounds a request's head in size, in fields and in time. It drops bytes that
come while a response is under way: that response is then the connection's last. It cuts off a client that does not take
what it asked for, and refuses connections beyond a number.

The end of a request is never ambiguous: a head that two readers could read in two ways is refused, and an offer to go
on in another protocol (``Connection: Upgrade``) is ignored, so that the body stays the body.

A client that closes its half of the connection and one that is gone send the same packet. Only the answer of the
client's system to bytes that no program will read tells them apart: it resets the connection. The chunks of a response
are such bytes. If the response has not begun, the client is sent ``100 Continue``, which a client that still reads
ignores. If its chunks pause, it is sent the first digit of the next chunk's size, a zero: sizes may begin with zeros.
"""

from __future__ import annotations

import asyncio
import enum
import http
import logging
import re
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdserve.errors import InvalidRequest, Unavailable
from pdserve.http.errors import error_body
from pdserve.http.outlet import OUTLET, Outlet
from pdserve.http.request import REQUEST_ID_HEADER, request_label
from pdserve.http.routes import CrossOrigin
from pdserve.patience import LAST_LOOK_S, PatientTimer

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_URL_BYTES = 8 * 1024
MAX_SMALL_PIECES = 4096
"""A body may have more pieces (chunks, or parts of one as reads bring them) if they average ``MIN_PIECE_BYTES``."""
MIN_PIECE_BYTES = 16
"""A chunk costs the server as much work as hundreds of bytes, and costs a client six bytes."""
HEAD_TIMEOUT_S = 20.0
LINGER_S = 1.0
"""Seconds that a refused client gets to read its answer. A close with bytes unread would discard the answer."""

MAX_REFUSED = 256
"""The number of connections beyond ``max_connections`` that get an answer at a time; more are closed without one."""
FIRST_LOOK_S = 0.01
MAX_LOOK_S = 1.0
"""The longest time between two looks for a client that has closed its half of the connection."""
ASK_EVERY_S = 30.0
"""A client that has closed its half is asked this often whether it still reads, while it gets nothing."""
HALF_CLOSED_S = 1.0
"""A client is asked when chunks have paused for this long. One that cannot be asked is cut off then, because it speaks
HTTP/1.0, or because its response has begun and has no chunks.
"""
MAX_ZEROS = 8
"""The most zeros before a chunk's size: clients take at least 16 digits."""

_TICK_S = 0.001
"""The resolution of the event loop's clock."""
_BLANK = b"\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ZERO = b"0"
_HOST = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*")
_FRAMING = (b"content-length", b"transfer-encoding")
_TCP_CLOSE = 7
"""The state of a connection that was reset, or has timed out."""
_TCP_INFO = struct.Struct("=B43xI")
"""The fields of Linux's ``struct tcp_info`` that are read: the state, and the milliseconds since data was sent last."""


class _Phase(enum.Enum):
    WAITING = "waiting"
    """The connection waits for the first byte of a request."""
    HEAD = "head"
    BODY = "body"
    """The headers are complete, and the request is not. Its response may be over before that."""
    ANSWERING = "answering"
    """The request is complete, and its response is not. Bytes that come now are dropped."""
    HALF_CLOSED = "half-closed"
    """The response is under way as in ``ANSWERING``, and the client sends nothing more."""
    CLOSING = "closing"


# These have names of their own because a lookup on the class would go through its __getattr__ in every callback.
_WAITING, _HEAD, _BODY, _ANSWERING, _HALF_CLOSED, _CLOSING = _Phase


def guarded_config(
    app: Any,
    *,
    keep_alive_s: int,
    shutdown_s: int,
    max_connections: int,
    write_timeout_s: float,
    origins: Sequence[str] = (),
    own_checks: Sequence[str] = (),
    tls: ssl.SSLContext | None = None,
    backlog: int = 2048,
    last_request_s: int = 0,
) -> uvicorn.Config:
    """Returns the configuration of every HTTP server of pdserve: guarded, without websockets, logging only warnings.

    ``shutdown_s`` is the time that running responses get once the server has to end. ``GuardedHttp`` describes
    ``max_connections``, ``write_timeout_s`` and ``last_request_s``, and ``CrossOrigin`` the ``origins``. The handlers
    of ``own_checks``, which are paths, check themselves which pages may send them requests.
    """
    cross_origin = CrossOrigin(origins)

    class Protocol(GuardedHttp):
        pass

    Protocol.max_connections = max_connections
    Protocol.write_timeout_s = write_timeout_s
    Protocol.cross_origin = cross_origin
    Protocol.last_request_s = last_request_s
    Protocol.own_checks = frozenset(path.encode() for path in own_checks)
    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        headers=cross_origin.defaults,
        proxy_headers=False,
        backlog=backlog,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=shutdown_s,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )


class _Cycle(RequestResponseCycle):
    task: asyncio.Task[None]
    """The task that handles the request."""


class GuardedHttp(HttpToolsProtocol):
    """The protocol for uvicorn's ``http`` setting, together with ``ws="none"``."""

    max_head_bytes: ClassVar[int] = MAX_HEAD_BYTES
    head_timeout_s: ClassVar[float] = HEAD_TIMEOUT_S
    linger_s: ClassVar[float] = LINGER_S
    half_closed_s: ClassVar[float] = HALF_CLOSED_S
    max_connections: ClassVar[int] = 16_384
    """The most connections of one server; the next one is refused with 503."""
    refused: ClassVar[set[GuardedHttp]] = set()
    """The connections of this process that exceeded the limit, and read their refusal now."""
    write_timeout_s: ClassVar[float] = 60.0
    """The longest time in which a client may take nothing while more than the high-water mark (64 KiB) is unread."""

    last_request_s: ClassVar[int] = 0
    """A stopping server waits so long for one more request behind a response whose head has not said that the
    connection ends: its client may send the next request at the moment when the response is over.
    """
    cross_origin: ClassVar[CrossOrigin] = CrossOrigin(())
    """The origins of pages whose requests are taken. The others' are refused."""
    own_checks: ClassVar[frozenset[bytes]] = frozenset()
    """The targets whose handlers check the origins of pages themselves."""

    _phase = _WAITING
    _idle_bytes = 0
    """What the parser got since the request or its body's last byte: head, chunk extensions, trailers, in bytes."""
    _pieces = 0
    """The number of pieces of the body that have come so far."""
    _body_bytes = 0
    _timer: asyncio.TimerHandle | PatientTimer | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    """The number of unread bytes when the write timer was started."""
    _stopping = False
    """Whether the server ends: the head of the next response says that the connection does too."""
    _offers_upgrade = False
    """Whether the current head offers an upgrade and its body has not been looked at yet."""
    _host: bytes | None = None
    """The last value of a Host header that was found to be one."""
    _waits_since_s = 0.0
    _has_waited = False
    """Whether the connection was found to have waited long enough, and is looked at once more before it is closed."""
    _half_closed_s = 0.0
    _asked_s = float("-inf")
    _zeros = 0
    """How many zeros the client has got since its last chunk."""
    _zero_s = 0.0
    _zero_write = 0
    """The number of the last zero's write. Later ones are chunks."""
    _look_s = 0.0
    _looks_again = False
    """Whether a client was found to be gone, and is looked at once more before it is cut off."""

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        # One outlet serves all requests: if each had its own, it and its cycle would keep each other alive.
        self._outlet = Outlet(transport, self.flow, self._close_behind_response)
        if len(self.connections) > self.max_connections:
            # A connection that reads its refusal does not count as one of the server's.
            self.connections.discard(self)
            if len(self.refused) >= MAX_REFUSED:
                self._phase = _CLOSING
                transport.abort()
                return
            self.refused.add(self)
            self._refuse(503, "the server has all the connections it may hold", "too_many_connections")
        else:
            self._start_timer(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.refused.discard(self)
        self._stop_timer()
        self._stop_write_timer()
        # uvicorn leaves this timer running if there is an exception.
        self._unset_keepalive_if_required()
        self._phase = _CLOSING
        super().connection_lost(exc)
        self._outlet.tell_disconnect()
        self._outlet.let_go()

    def shutdown(self) -> None:
        """Ends the connection now, or behind the response under way, or behind one more request."""
        self._stopping = True
        self.timeout_keep_alive = self.last_request_s
        self._unset_keepalive_if_required()  # it is for a longer time
        cycle = self.cycle
        unaware = cycle and cycle.response_started and not cycle.response_complete and cycle.keep_alive
        if not (unaware and self.last_request_s):
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        while data and self._phase is not _CLOSING and not self.transport.is_closing():
            if self._phase is _WAITING or self._phase is _ANSWERING:
                # Some clients end a body with one line too many. It neither begins a request nor keeps a connection.
                if data[0] in _BLANK and not data.strip(_BLANK):
                    return
                if self._phase is _ANSWERING:
                    self.cycle.keep_alive = False
                    return
                self._begin_head()
            room = self.max_head_bytes - self._idle_bytes if self._phase is _HEAD else len(data)
            if len(data) <= room:  # mostly
                self._feed(data)
                return
            piece, data = data[:room], data[room:]
            self._feed(piece)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # uvicorn's never keeps the connection
        """Keeps a connection whose client has closed its half if a response is under way, but never one over TLS."""
        if self._phase is _ANSWERING and self.scheme == "http":
            self.cycle.keep_alive = False
            self._phase = _HALF_CLOSED
            self._half_closed_s = self.loop.time()
            self._look_s = FIRST_LOOK_S
            self._look_again_after(self._look_s)
        return self._phase is _HALF_CLOSED

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _start_write_timer(self) -> None:
        self._stop_write_timer()
        self._unread_bytes = self._outlet.unread_bytes()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._check_progress)

    def _check_progress(self) -> None:
        # Slow clients may go on. A closing connection has no other time limit, so there a minimum speed is required.
        least = HIGH_WATER_LIMIT if self.transport.is_closing() else 1
        if self._outlet.unread_bytes() <= self._unread_bytes - least:
            self._start_write_timer()
            return
        log.info("%s took no more of a response for %g s: cut off", self.client, self.write_timeout_s)
        self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _feed(self, piece: bytes) -> None:
        before = self._phase
        self._idle_bytes += len(piece)
        self._parse(piece)
        if self._phase is _HEAD and self._timer is None:  # most heads come in one piece
            self._start_timer(self.head_timeout_s)
        if self._phase is before and self._idle_bytes >= self.max_head_bytes:
            self._refuse(431, "the request's headers are too large", "headers_too_large")

    def _parse(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offered:
            if self._offers_upgrade and self._phase is _BODY:
                self._go_on_as_http(piece[offered.args[0] :])
        except httptools.HttpParserCallbackError:
            self.send_400_response("the request's target is not a path that can be served")
        except httptools.HttpParserError as exc:
            self.send_400_response(f"this is not a proper request: {exc}")

    def _go_on_as_http(self, rest: bytes) -> None:
        """Reads ``rest`` as the body that the head announced. The parser took its offer of an upgrade for accepted."""
        self._offers_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        framing = [b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING]
        # The callbacks ignore this head, because the request's own head is complete.
        self._parse(b"POST / HTTP/1.1\r\n%b\r\n%b" % (b"".join(framing), rest))

    def _begin_head(self) -> None:
        self._phase = _HEAD
        self._offers_upgrade = False
        self._idle_bytes = 0

    # ------------------------------------------------------------------ the parser's callbacks

    def on_message_begin(self) -> None:
        if self._phase is _ANSWERING:  # both requests came in one read
            self.cycle.keep_alive = False
        if self._phase is _WAITING:  # it came in one read with a body whose response was over before
            self._begin_head()
        if self._phase is _HEAD:
            self.url = b""
            self.headers = []

    def on_url(self, url: bytes) -> None:
        if self._phase is _HEAD:
            self.url += url
            if len(self.url) > MAX_URL_BYTES:
                self._refuse(414, f"the request's URL is above {MAX_URL_BYTES} bytes", "url_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is not _HEAD:  # uvicorn would take a trailer for a header
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"a request may have {MAX_HEADERS} headers", "headers_too_large")
        else:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._phase is not _HEAD:
            return
        parser = self.parser
        version, upgrade = parser.get_http_version(), parser.should_upgrade()
        headers = self.headers
        fields = dict(headers)
        flaw = self._flaw(version, upgrade, fields)
        if flaw is not None:
            self._refuse(*flaw)
            return
        self._offers_upgrade = upgrade
        parsed = httptools.parse_url(self.url)
        raw_path: bytes = parsed.path
        path = raw_path.decode("ascii")
        if "%" in path:
            path = unquote(path)
        outlet = self._outlet
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,  # type: ignore[typeddict-item]  # None only before the connection is made
            "method": parser.get_method().decode("ascii"),
            "root_path": "",
            "path": path,
            "raw_path": raw_path,
            "query_string": parsed.query or b"",
            "headers": headers,
            "state": self.app_state.copy(),
            "extensions": {OUTLET: outlet},  # type: ignore[dict-item]  # pdserve's own, not ASGI's
        }
        defaults = self.server_state.default_headers
        cycle = self.cycle = _Cycle(
            scope=self.scope,
            transport=outlet,  # type: ignore[arg-type]  # a cycle uses no more of a transport
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=defaults + self.cross_origin.fields(headers) if self.cross_origin.selects else defaults,
            message_event=asyncio.Event(),
            # HTTP/1.0 does not have that answer.
            expect_100_continue=b"expect" in fields and version != "1.0" and _expects_continue(headers),
            keep_alive=version != "1.0" and not self._stopping and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        outlet.begin(cycle, fields if len(fields) == len(headers) else None, takes_chunks=version == "1.1")
        if self._timer is not None:
            self._stop_timer()
        self._idle_bytes = self._pieces = self._body_bytes = 0
        self._phase = _BODY
        # A response before this one is over: bytes that come earlier are dropped. So nothing has to queue.
        self._start_asgi_task(cycle, self.app)

    def on_body(self, body: bytes) -> None:
        if self._phase is _BODY:
            self._idle_bytes = 0
            self._pieces += 1
            self._body_bytes += len(body)
            if self._pieces > MAX_SMALL_PIECES and self._body_bytes < self._pieces * MIN_PIECE_BYTES:
                self._refuse(400, f"the request's body is in pieces below {MIN_PIECE_BYTES} bytes", "body_in_pieces")
                return
            cycle = self.cycle
            if not cycle.response_complete:
                cycle.body += body
                if len(cycle.body) > HIGH_WATER_LIMIT:
                    self.flow.pause_reading()
                cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._phase is not _BODY or self._offers_upgrade:
            return
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()
            self._phase = _ANSWERING
            return
        self._stop_timer()
        self._begin_waiting()

    def _flaw(self, version: str, upgrade: bool, fields: Mapping[bytes, bytes]) -> tuple[int, str, str] | None:
        """Returns status, message and code for refusing a head that the parser accepts; None if the head is proper.

        ``fields`` are the headers, the last one of each name.
        """
        if version not in ("1.0", "1.1"):
            return 505, "HTTP/1.1 and HTTP/1.0 are spoken here", "http_version_not_supported"
        host = fields.get(b"host")
        # Only a request that repeats some header may repeat this one.
        if len(fields) < len(self.headers) or (host is None and version == "1.1"):
            hosts = [name for name, _ in self.headers].count(b"host")
            if hosts > 1 or (not hosts and version == "1.1"):
                return 400, f"the request has {hosts} Host headers; it takes one", "invalid_host"
        if host is not None and host != self._host and not self._is_host(host):
            return 400, "the request's Host header is not a host name or address with an optional port", "invalid_host"
        # A page whose host name was pointed at this server is of the same origin to browsers, which then ask nothing.
        if (
            b"origin" in fields
            and self.url not in self.own_checks
            and not all(self.cross_origin.allows(value) for name, value in self.headers if name == b"origin")
        ):
            return 403, "web pages of this origin may not use the server: see --cors-origins", "origin_not_allowed"
        if b"transfer-encoding" in fields:
            coding = b", ".join(value for name, value in self.headers if name == b"transfer-encoding")
            if version == "1.0":
                return 400, "HTTP/1.0 has no Transfer-Encoding: send a Content-Length", "invalid_http"
            if coding.lower() != b"chunked":
                return 501, "the only Transfer-Encoding that is understood here is chunked", "unknown_transfer_encoding"
        if upgrade and self.parser.get_method() == b"CONNECT":
            return 501, "this server is no tunnel: CONNECT is not served", "unknown_method"
        return None

    def _is_host(self, value: bytes) -> bool:
        if not _HOST.fullmatch(value):
            return False
        self._host = value  # a client names the same one in each request
        return True

    # ------------------------------------------------------------------ answers

    def _start_asgi_task(self, cycle: _Cycle, app: Any) -> None:  # type: ignore[override]  # all cycles are these
        if cycle.scope["http_version"] == "1.0":
            app = _unchunked(app, cycle)
        task = self.loop.create_task(self._run(cycle, app))
        self.tasks.add(task)
        self._outlet.task = cycle.task = task

    async def _run(self, cycle: _Cycle, app: Any) -> None:
        try:
            await cycle.run_asgi(app)
        finally:  # here, because a callback of the task would be one more call of the event loop
            self.tasks.discard(cycle.task)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            if self._phase is _HALF_CLOSED:
                self._stop_timer()
            self._phase = _CLOSING
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self._phase is _ANSWERING:
            self._begin_waiting()
        elif self._phase is _BODY:
            self._start_timer(self.head_timeout_s)

    def _begin_waiting(self) -> None:
        self._phase = _WAITING
        self._waits_since_s = self.loop.time()
        self._has_waited = False
        # A timer that is running looks when this waiting began. Each request would else cancel one and make another.
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this method for every error of the parser."""
        if self._phase is _ANSWERING:
            self.cycle.keep_alive = False
        elif self._phase is not _CLOSING:
            self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answers in place of the application, if it has not begun to answer, and closes the connection."""
        self._phase = _CLOSING
        self._start_timer(self.linger_s)
        if self.cycle and not self.cycle.response_complete:
            self._disconnect()
            if self.cycle.response_started:
                self.transport.close()
                return
        self.transport.write(self._answer(status, message, code))
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self.flow.resume_reading()

    def _close_behind_response(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if self._phase is not _BODY or unsent or not self.transport.can_write_eof():
            self.transport.close()
            return
        # The client still sends, and bytes that come after a close would discard the response before it is read.
        self._phase = _CLOSING
        self._start_timer(self.linger_s)
        self.transport.write_eof()
        self.flow.resume_reading()

    def _disconnect(self) -> None:
        """Tells the application that its client is gone. What the application sends from here on is dropped."""
        self.cycle.disconnected = True
        self.cycle.waiting_for_100_continue = False
        self.cycle.message_event.set()
        self._outlet.tell_disconnect()

    def _answer(self, status: int, message: str, code: str) -> bytes:
        kind = Unavailable if status == 503 else InvalidRequest
        body = error_body(kind(message, code=code))
        came: list[tuple[bytes, bytes]] = self.headers or []  # None before the first request
        given = next((value.decode("latin-1") for name, value in came if name == b"x-request-id"), None)
        fields = [
            *self.server_state.default_headers,
            *(self.cross_origin.fields(came) if self.cross_origin.selects else ()),
            (REQUEST_ID_HEADER.encode(), request_label(given).encode()),
            *([(b"retry-after", b"1")] if status == 503 else []),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        head = b"".join(b"%b: %b\r\n" % field for field in fields)
        return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (status, http.HTTPStatus(status).phrase.encode(), head, body)

    # ------------------------------------------------------------------ the timer

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = PatientTimer(self.loop, seconds, self._expired)

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection that has waited long enough, but first looks once more: this is no patient timer.

        A request may have come while this process was stopped.
        """
        self.timeout_keep_alive_task = None
        if self._phase is not _WAITING:
            return  # the timer starts again behind the response
        left_s = self._waits_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s <= _TICK_S:
            if self._has_waited:
                self.transport.close()
                return
            self._has_waited = True
            left_s = LAST_LOOK_S
        self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        if self._phase is _HEAD:
            self._refuse(408, f"the request's headers did not come within {self.head_timeout_s:g} s", "header_timeout")
        elif self._phase is _HALF_CLOSED:
            self._look_for_client()
        elif self._phase is _CLOSING:
            self.transport.abort()
        else:
            self.transport.close()

    def _look_for_client(self) -> None:
        """Cuts the connection off if the client does not read any more; otherwise looks again later."""
        now = self.loop.time()
        connection = self.transport.get_extra_info("socket")
        # The transport does not notice it: it does not read any more, and writes only when the application does.
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        state, sent_ms_ago = _TCP_INFO.unpack(info)
        begun, new = self.cycle.response_started, self.cycle.scope["http_version"] == "1.1"
        can_be_asked = new and (not begun or bool(self.cycle.chunked_encoding))
        # Where bytes wait for a client that does not read, the kernel probes it, and the write timer bounds the wait.
        unasked_s = 0.0 if self._outlet.unread_bytes() else min(now - self._half_closed_s, sent_ms_ago / 1000)
        silent = not can_be_asked and unasked_s >= self.half_closed_s
        if state == _TCP_CLOSE or (silent and self._looks_again):
            self.transport.abort()
            return
        # The silence may be this process's own: then what it has to send to the client is sent before the next look.
        self._looks_again = silent
        if silent:
            self._look_again_after(LAST_LOOK_S)
            return
        if can_be_asked and begun and unasked_s >= self.half_closed_s:
            self._ask_between_chunks(now)
        elif can_be_asked and not begun and now - self._asked_s >= ASK_EVERY_S:
            self._asked_s = now
            self.transport.write(_CONTINUE)
        self._look_s = min(4 * self._look_s, MAX_LOOK_S)
        self._look_again_after(self._look_s)

    def _ask_between_chunks(self, now: float) -> None:
        """Asks a client whose chunks pause, once soon and then seldom. A chunk since the last time begins this anew.

        When the kernel has sent something last does not tell of a chunk: it may have sent a lost zero again.
        """
        if self._outlet.writes != self._zero_write:
            self._zeros = 0
        elif now - self._zero_s < ASK_EVERY_S or self._zeros == MAX_ZEROS:
            return
        self._outlet.write(_ZERO)
        self._zeros, self._zero_s, self._zero_write = self._zeros + 1, now, self._outlet.writes
        self._look_s = FIRST_LOOK_S

    def _look_again_after(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._expired)


def _expects_continue(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)


def _unchunked(app: Any, cycle: RequestResponseCycle) -> Any:
    """Returns ``app`` for HTTP/1.0, which has no chunks: a body without a length ends with the connection."""

    async def close_delimited(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        sized = False

        async def send_plain(message: Any) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not sized:
                    cycle.chunked_encoding = False
            elif not sized:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares it
            await send(message)

        await app(scope, receive, send_plain)

    return close_delimited
