"""Tests how a guarded connection handles pipelined requests, unusual bodies and clients that leave, on real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest
import uvicorn
import uvloop

from pdserve.http.guard import MAX_HEADERS, GuardedHttp
from pdserve.wire.discovery import Role
from pdserve_proxy.relay.outcomes import RelayOutcome
from pdserve_proxy.relay.relayed_request import RelayedRequest
from tests.proxy.cluster import cluster, node_info, run_async
from tests.proxy.fake_node import Exchange as NodeExchange
from tests.proxy.fake_node import FakeNode

WAIT_S = 10.0
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"
LAST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
Client: TypeAlias = Callable[["App", Reader, Writer], Coroutine[Any, Any, None]]


class Hasty(GuardedHttp):
    head_timeout_s = 0.1


class Watched(GuardedHttp):
    """A connection that tells the application of a second read."""

    _reads = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._reads += 1
        if self._reads == 2:
            self.config.app.read_twice.set()  # type: ignore[union-attr]


class App:
    """Answers ``ok`` at once, whatever the body. It answers ``/held`` when the test allows it, or never."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.started, self.read_twice, self.answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.let_go, self.disconnected = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls.append(scope)
        if scope["path"] == "/held":
            await self._hold(receive, send)
            return
        if scope["path"] == "/whole":
            while (await receive()).get("more_body", False):
                pass
        await self._answer(send)

    async def _hold(self, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        gone = asyncio.ensure_future(receive())
        let_go = asyncio.ensure_future(self.let_go.wait())
        self.started.set()
        try:
            await asyncio.wait([gone, let_go], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                assert gone.result() == {"type": "http.disconnect"}
                self.disconnected.set()
            await self._answer(send)
        finally:
            gone.cancel()
            let_go.cancel()

    async def _answer(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        self.answered.set()


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listening.set_result(self.servers[0].sockets[0].getsockname()[1])


@asynccontextmanager
async def connected(app: App, protocol: type[GuardedHttp]) -> AsyncIterator[tuple[Reader, Writer]]:
    config = uvicorn.Config(
        app, port=0, http=protocol, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=2
    )
    server = Server(config)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(WAIT_S):
        port = await server.listening
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with closing(writer):
            yield reader, writer
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, WAIT_S)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def talk(request: pytest.FixtureRequest) -> Callable[..., App]:
    """Returns a function that runs a client against a server, on both event loops, and checks for logged errors."""

    def run(client: Client, protocol: type[GuardedHttp] = GuardedHttp) -> App:
        async def scenario() -> App:
            app = App()
            async with asyncio.timeout(2 * WAIT_S), connected(app, protocol) as (reader, writer):
                await client(app, reader, writer)
            return app

        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(scenario())

    return run


def status(said: bytes) -> int:
    return int(said.split(b" ", 2)[1])


def code(said: bytes) -> str:
    return str(json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"])


async def read_answer(reader: Reader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(2)


def test_a_connection_is_kept_for_requests_that_take_turns(talk: Callable[..., App]) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        for request in (GET, POST + b"content-length: 3\r\n\r\nabc\r\n", b"\r\n" + GET):
            writer.write(request)
            assert b"connection: close" not in await read_answer(reader)

    assert len(talk(client).calls) == 3


def test_a_request_may_have_many_headers_but_not_more(talk: Callable[..., App]) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * (MAX_HEADERS - 1) + b"\r\n")
        assert status(await read_answer(reader)) == 200
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * MAX_HEADERS + b"\r\n")
        said = await reader.read()
        assert (status(said), code(said)) == (431, "headers_too_large")

    assert len(talk(client).calls) == 1


def test_a_client_that_sends_on_gets_its_refusal(talk: Callable[..., App]) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        writer.write(b"GET / HTTP/1.1\r\na: " + b"x" * 2**22)
        said = await reader.read()
        assert (status(said), code(said)) == (431, "headers_too_large")

    assert talk(client).calls == []


@pytest.mark.parametrize("flood", [b"t: " + b"x" * 2**18, b"1;" + b"x" * 2**18], ids=["trailer", "chunk extension"])
def test_what_comes_between_chunks_is_bounded(talk: Callable[..., App], flood: bytes) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        start = b"" if flood.startswith(b"1;") else b"0\r\n"
        writer.write(b"POST /whole HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + start + flood)
        said = await reader.read()
        assert (status(said), code(said)) == (431, "headers_too_large")

    talk(client)


def test_trailers_are_no_headers(talk: Callable[..., App]) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        chunks = b"1\r\nx\r\n0\r\nauthorization: me\r\n\r\n"
        writer.write(b"POST /whole HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        assert status(await read_answer(reader)) == 200

    assert talk(client).calls[0]["headers"] == [(b"host", b"x"), (b"transfer-encoding", b"chunked")]


def test_bytes_that_are_no_http_are_refused(talk: Callable[..., App]) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        writer.write(b"nonsense\r\n\r\n")
        said = await reader.read()
        assert (status(said), code(said)) == (400, "invalid_http")

    talk(client)


@pytest.mark.parametrize("second", [GET, b"nonsense\r\n\r\n", b"GET / HT"])
@pytest.mark.parametrize("in_one_read", [True, False])
def test_a_pipelined_request_ends_the_connection(talk: Callable[..., App], in_one_read: bool, second: bytes) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        first = GET.replace(b"/ ", b"/held ", 1)
        writer.write(first + second if in_one_read else first)
        await app.started.wait()
        if not in_one_read:
            writer.write(second)
            await app.read_twice.wait()
        app.let_go.set()
        said = await reader.read()
        assert said.count(b"HTTP/1.1 ") == 1
        assert b"connection: close\r\n" in said
        assert said.endswith(b"ok")

    assert len(talk(client, Watched).calls) == 1


@pytest.mark.parametrize("in_one_read", [True, False])
def test_a_client_that_pipelines_and_leaves_is_noticed(
    talk: Callable[..., App], in_one_read: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        first = GET.replace(b"/ ", b"/held ", 1)
        writer.write(first + GET if in_one_read else first)
        await app.started.wait()
        if not in_one_read:
            writer.write(GET)
        writer.close()
        await app.disconnected.wait()

    with caplog.at_level(logging.WARNING):
        assert len(talk(client).calls) == 1
    assert caplog.records == []


def test_the_rest_of_a_body_that_nobody_wants_has_its_time(talk: Callable[..., App]) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        writer.write(POST + b"content-length: 100\r\n\r\nx")
        assert status(await read_answer(reader)) == 200
        writer.write(b"x")
        assert await reader.read() == b""

    talk(client, Hasty)


def test_the_last_response_of_a_connection_is_not_taken_back_while_its_client_sends(talk: Callable[..., App]) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        writer.write(POST + b"connection: close\r\ncontent-length: 1000000\r\n\r\n")
        await app.answered.wait()
        for _ in range(10):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert (await reader.read()).endswith(b"\r\n\r\nok")

    talk(client)


def test_the_rest_of_a_body_may_come_after_its_response(talk: Callable[..., App]) -> None:
    async def client(app: App, reader: Reader, writer: Writer) -> None:
        writer.write(POST + b"content-length: 3\r\n\r\nx")
        await read_answer(reader)
        writer.write(b"xx" + GET)
        await read_answer(reader)
        writer.write(LAST)
        assert status(await reader.read()) == 200

    assert len(talk(client).calls) == 3


def test_the_proxy_frees_what_a_client_held_that_pipelined_and_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedHttp, "half_closed_s", 0.2)  # The stream is silent, so no chunk shows it.

    async def scenario() -> None:
        gone = asyncio.Event()

        async def endless(exchange: NodeExchange) -> None:
            await exchange.begin_stream()
            await exchange.chunk(b"data: 1\n\n")
            await exchange.gone()
            gone.set()

        async with FakeNode(endless) as node, cluster() as proxy:
            await proxy.add(node_info("x", Role.MIXED, node.url))
            address = urlsplit(proxy.addresses.url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            with closing(writer):
                body = b'{"stream": true}'
                head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
                writer.write(head + body)
                await reader.readuntil(b"data: 1\n\n")
                writer.write(head + body)
            await asyncio.wait_for(gone.wait(), WAIT_S)

    run_async(scenario())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_write_to_a_closed_connection_is_a_client_that_left() -> None:
    ends: list[tuple[RelayOutcome | None, int]] = []

    async def scenario() -> None:
        async with FakeNode() as node:
            address = urlsplit(node.url)
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.transport.abort()
            await asyncio.sleep(0)  # The event loop closes the handle.

            async def handler() -> None:
                task = asyncio.current_task()
                assert task is not None
                with RelayedRequest(task, "r", "/v1/x", 60.0, lambda ended: ends.append((ended.outcome, ended.status))):
                    writer.transport.write(b"x")

            task = asyncio.create_task(handler())
            await asyncio.wait([task])
            assert isinstance(task.exception(), RuntimeError)

    run_async(scenario())
    assert ends == [(RelayOutcome.CLIENT_GONE, 499)]
