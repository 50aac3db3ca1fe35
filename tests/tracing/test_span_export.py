"""Tests how timelines become spans, and that a collector which is gone costs requests nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import requests

from pdserve.config import TraceConfig
from pdserve.errors import ConfigError
from pdserve.settings.load import check
from pdserve.tracing.span_export import MAX_QUEUED, BoundedSession, SpanExport, traces_url
from pdserve.tracing.timeline import TimelineNotes
from pdserve.tracing.tracing import NO_PARENT, SpanCounts, Tracing
from pdserve.wire.timeline import MomentKind, PhaseKind, ProcessKind, TimelinePart, TraceContext
from tests.tracing.receiver import receiver

TRACE = TraceContext(bytes(range(16)), b"p" * 8)


def proxy_part(outcome: str = "ok", status: int = 200) -> TimelinePart:
    """Returns the part of a request whose first node was lost."""
    notes = TimelineNotes(ProcessKind.PROXY, "chat-1", 10.0, TRACE)
    notes.begin(PhaseKind.ATTEMPT, 10.0, node="decode-0")
    notes.end(PhaseKind.ATTEMPT, 11.0, "lost")
    notes.begin(PhaseKind.ATTEMPT, 11.0, node="decode-1")
    notes.end(PhaseKind.ATTEMPT, 12.0, "ok")
    notes.moment(MomentKind.RESUMED, 11.5, node="decode-1", gap_s=0.5)
    return notes.part(12.0, route="/v1/completions", model="m", outcome=outcome, status=status)


def engine_part() -> TimelinePart:
    notes = TimelineNotes(ProcessKind.ENGINE, "chat-1", 10.0, TRACE)
    notes.chunk(10.0, 10.5, 16)
    notes.chunk(10.5, 11.0, 8)
    notes.begin(PhaseKind.PREFILL, 10.0, tokens=24)
    notes.end(PhaseKind.PREFILL, 11.0)
    return notes.part(12.0, outcome="length", prompt_tokens=24, output_tokens=4)


def test_attempts_are_children_that_are_linked() -> None:
    part, counts = proxy_part(), SpanCounts("p")
    with receiver() as received:
        export = SpanExport(received.url, {"pdserve.process": "proxy"}, counts)
        export.add(part)
        export.close(10.0)
        root, first, second = received.spans
    assert (root.name, root.parent, root.failed) == ("POST /v1/completions", TRACE.span_id.hex(), False)
    assert root.events == ("resumed",)
    assert root.attributes["http.response.status_code"] == 200
    assert (root.resource["service.name"], root.resource["pdserve.process"]) == ("pdserve", "proxy")
    assert {first.parent, second.parent} == {root.span_id}
    assert (first.failed, first.links, first.attributes["pdserve.peer"]) == (True, (), "decode-0")
    assert (second.failed, second.links, second.span_id) == (False, (first.span_id,), part.phases[1].span_id.hex())
    assert root.end_ns - root.start_ns == 2_000_000_000
    assert abs(root.end_ns - (time.time_ns() - time.monotonic_ns() + 12_000_000_000)) < 1e9
    assert (counts.exported, counts.dropped) == (1, 0)


def test_chunks_are_events_of_their_prefill() -> None:
    with receiver() as received:
        export = SpanExport(received.url, {}, SpanCounts("p"))
        export.add(engine_part())
        export.close(10.0)
        root, prefill = received.spans
    assert (root.name, root.events) == ("engine", ())
    assert (prefill.name, prefill.events) == ("prefill", ("chunk", "chunk"))
    assert root.attributes["gen_ai.usage.input_tokens"] == 24
    assert root.attributes["gen_ai.usage.output_tokens"] == 4


@pytest.mark.parametrize(
    ("outcome", "status", "failed"),
    [("ok", 200, False), ("refused", 400, False), ("upstream_lost", 502, True), ("refused", 503, True)],
)
def test_only_failures_of_the_cluster_are_errors(outcome: str, status: int, failed: bool) -> None:
    with receiver() as received:
        export = SpanExport(received.url, {}, SpanCounts("p"))
        export.add(proxy_part(outcome, status))
        export.close(10.0)
        assert received.spans[0].failed is failed


def test_a_collector_that_is_gone_blocks_nobody_and_drops_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody accepts at this port: the system takes the connection, and never answers."""
    counts, part = SpanCounts("p"), engine_part()
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        export = SpanExport(f"http://127.0.0.1:{silent.getsockname()[1]}", {}, counts)
        for _ in range(2 * MAX_QUEUED):
            export.add(part)
        assert counts.dropped >= MAX_QUEUED - 64
        export.close(0.2)
        assert counts.exported == 0
        export.add(part)
    assert counts.dropped >= 2 * MAX_QUEUED - 64


def test_a_collector_that_refuses_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    counts = SpanCounts("p")
    with receiver() as received:
        received.status = 400
        export = SpanExport(received.url, {}, counts)
        for _ in range(3 * 64):
            export.add(engine_part())
        export.close(10.0)
    assert (counts.exported, counts.dropped) == (0, 3 * 64)
    assert len([record for record in caplog.records if received.url in record.getMessage()]) == 1


@contextmanager
def raw_collector(answers: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that reads what comes, and lets ``answers`` answer each connection; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        connection.recv(2**20)
                        answers(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def drip(connection: socket.socket, piece: bytes) -> None:
    """Sends ``piece`` again and again, slowly, until the other side has gone."""
    while True:
        connection.sendall(piece)
        time.sleep(0.02)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(bytes(2**16))


def dripping_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 50000\r\n\r\n")
    drip(connection, b"x")


def dripping_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
    drip(connection, b"x")


def broken_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nab")


def broken_chunk(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n")


def stalled_body(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nab")
    connection.recv(1)  # until the other side closes


def test_a_head_without_an_end_is_given_up() -> None:
    with raw_collector(dripping_head) as url, BoundedSession(0.2) as session, pytest.raises(requests.RequestException):
        session.post(url, data=b"spans", timeout=0.2)


@pytest.mark.parametrize("answers", [endless, dripping_body, broken_body, broken_chunk, stalled_body])
def test_spans_that_the_collector_took_count_whatever_follows_its_status(
    answers: Callable[[socket.socket], None],
) -> None:
    with raw_collector(answers) as url, BoundedSession(0.2) as session:
        for _ in range(2):  # the collector serves one connection at a time: the first one has to be closed
            assert session.post(url, data=b"spans", timeout=0.2).ok


def test_spans_go_nowhere_else_than_where_the_operator_said() -> None:
    with receiver() as other:

        def redirects(connection: socket.socket) -> None:
            head = f"HTTP/1.1 307 Elsewhere\r\nlocation: {other.url}/v1/traces\r\ncontent-length: 0\r\n\r\n"
            connection.sendall(head.encode())

        counts = SpanCounts("p")
        with raw_collector(redirects) as url:
            export = SpanExport(url, {}, counts)
            export.add(engine_part())
            export.close(10.0)
    assert (other.bodies, counts.dropped) == ([], 1)


def test_what_a_full_queue_drops_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    with receiver() as received:
        export = SpanExport(received.url, {}, SpanCounts("p"))
        for _ in range(MAX_QUEUED + 5):
            export.add(engine_part())
        export.close(10.0)
    (line,) = [record.getMessage() for record in caplog.records if "too slowly" in record.getMessage()]
    assert "the spans of 5 requests were dropped" in line


async def test_traces_begin_here_or_with_the_client() -> None:
    with receiver() as received:
        tracing = Tracing(TraceConfig(kept_timelines=0, otlp_endpoint=received.url))
        assert tracing.begin(None) is None
        async with tracing.exporting({}, SpanCounts("p")):
            assert tracing.parts.wanted
            begun = tracing.begin(None)
            assert begun is not None
            assert (begun.span_id, begun.sampled) == (NO_PARENT, True)
            tracing.parts.add(TimelineNotes(ProcessKind.PROXY, "r", 1.0, begun).part(2.0, route="/v1/completions"))
            parent = f"00-{'ab' * 16}-{'cd' * 8}-"
            assert tracing.begin(parent + "00") is None
            assert tracing.begin(parent + "01") == TraceContext(b"\xab" * 16, b"\xcd" * 8)
        assert [(span.trace_id, span.parent) for span in received.spans] == [(begun.trace_id.hex(), "")]


async def test_a_share_of_the_requests_is_traced() -> None:
    with receiver() as received:
        none = Tracing(TraceConfig(otlp_endpoint=received.url, ratio=0.0))
        async with none.exporting({}, SpanCounts("p")):
            assert [none.begin(None) for _ in range(100)] == [None] * 100
            assert none.begin(f"00-{'ab' * 16}-{'cd' * 8}-01") is not None


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_the_endpoint_may_be_the_base_or_the_signals_own(endpoint: str) -> None:
    assert traces_url(endpoint) == "http://c:4318/v1/traces"


@pytest.mark.parametrize("endpoint", ["c:4318", "grpc://c:4317", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    from pdserve.config import ProxyConfig

    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        check(ProxyConfig(trace=TraceConfig(otlp_endpoint=endpoint)))
