"""Tests what an application gets from its connection beyond ASGI, against a real server."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pdserve.http.guard import GuardedHttp, guarded_config
from pdserve.http.outlet import OUTLET, Outlet
from pdserve.http.request import HttpRequest
from tests.http.test_guard import Server

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, object]], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
START: dict[str, object] = {"type": "http.response.start", "status": 200, "headers": []}


def body(data: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def against(
    app: App,
    client: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    *,
    write_timeout_s: float = 5.0,
    receive_bytes: int = 2**18,
) -> None:
    """Runs a client against a server. Its system takes ``receive_bytes`` of a response before the client reads."""
    config = guarded_config(app, keep_alive_s=60, shutdown_s=5, max_connections=10, write_timeout_s=write_timeout_s)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        async with asyncio.timeout(20):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=2**14)
            try:
                await client(reader, writer)
            finally:
                writer.close()
    finally:
        server.should_exit = True
        await serving


async def test_what_is_sent_inside_it_goes_out_in_one_write() -> None:
    writes: list[bytes] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        outlet: Outlet = scope["extensions"][OUTLET]
        transport = outlet._transport

        class Spy:
            def write(self, data: bytes) -> None:
                writes.append(data)
                transport.write(data)

        outlet._transport = Spy()  # type: ignore[assignment]
        with outlet:
            await send(START)
            await send(body(b"ab", more=True))
        outlet._transport = transport
        await send(body(b"c", more=False))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST)
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")

    await against(app, client)
    (one,) = writes
    assert one.startswith(b"HTTP/1.1 200 OK\r\n")
    assert one.endswith(b"2\r\nab\r\n")


@pytest.mark.parametrize(
    ("sent", "ending", "kept"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"content-length: 2\r\n\r\nok", True),
        (b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", b"content-length: 2\r\n\r\n", True),
        (
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            b"content-length: 2\r\nconnection: close\r\n\r\nok",
            False,
        ),
        (b"GET / HTTP/1.0\r\nhost: x\r\n\r\n", b"content-length: 2\r\nconnection: close\r\n\r\nok", False),
    ],
)
async def test_a_whole_response_in_one_call_is_what_two_of_asgis_make(sent: bytes, ending: bytes, kept: bool) -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        if scope["path"] == "/":
            outlet: Outlet = scope["extensions"][OUTLET]
            assert not outlet.paused
            outlet.respond(201, b"a: b\r\ncontent-length: 2\r\n", b"ok")
        else:
            headers = [(b"a", b"b"), (b"content-length", b"2")]
            await send({"type": "http.response.start", "status": 201, "headers": headers})
            await send(body(b"ok", more=False))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, port = writer.get_extra_info("peername")
        said: list[bytes] = []
        for path in (b" / ", b" /asgi "):
            other_reader, other = await asyncio.open_connection("127.0.0.1", port)
            other.write(sent.replace(b" / ", path))
            said.append(await other_reader.readuntil(ending))
            if kept:
                other.write(REQUEST.replace(b" / ", path))
                await other_reader.readuntil(b"\r\n\r\nok")
            else:
                assert await other_reader.read() == b""
            other.close()
        dated = [re.sub(rb"date: [^\r]*", b"date: now", one) for one in said]
        assert dated[0] == dated[1]
        assert dated[0].startswith(b"HTTP/1.1 201 Created\r\n")

    await against(app, client)


@pytest.mark.parametrize(
    ("head", "ending", "kept"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n", True),
        (
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n",
            b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n",
            False,
        ),
        (b"GET / HTTP/1.0\r\nhost: x\r\n", b"\r\n\r\nonetwothree", False),
    ],
)
async def test_a_stream_of_a_request_is_what_asgis_calls_make(head: bytes, ending: bytes, kept: bool) -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        if scope["path"] == "/":
            request = HttpRequest(scope, receive, send)
            await request.begin(200, {"a": "b"}, b"one", more=True)
            assert request.write(b"two")
            await request.send(b"three", more=False)
        else:
            await send({**START, "headers": [(b"a", b"b"), (b"x-request-id", b"7")]})
            for data in (b"one", b"two", b"three"):
                await send(body(data, more=data != b"three"))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, port = writer.get_extra_info("peername")
        said: list[tuple[list[bytes], bytes]] = []
        for path in (b" / ", b" /asgi "):
            other_reader, other = await asyncio.open_connection("127.0.0.1", port)
            sent = head.replace(b" / ", path) + b"x-request-id: 7\r\n\r\n"
            for last in (False, True) if kept else (True,):
                other.write(sent)
                answer = await other_reader.readuntil(ending)
                if last:
                    fields, _, content = re.sub(rb"date: [^\r]*", b"date: now", answer).partition(b"\r\n\r\n")
                    said.append((sorted(fields.split(b"\r\n")), content))
            if not kept:
                assert await other_reader.read() == b""
            other.close()
        assert said[0] == said[1]
        assert b"x-request-id: 7" in said[0][0]

    await against(app, client)


async def test_a_body_is_taken_at_once_if_it_is_there_and_received_if_not() -> None:
    taken: list[bytes | None] = []

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        outlet: Outlet = scope["extensions"][OUTLET]
        taken.append(outlet.take_body())
        if taken[-1] is None:
            asked.set()
            more = True
            while more:
                message = await receive()
                more = message["more_body"]
        outlet.respond(200, b"content-length: 2\r\n", b"ok")

    asked = asyncio.Event()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
        writer.write(head + b"body")
        await reader.readuntil(b"\r\n\r\nok")
        writer.write(head + b"bo")
        await asked.wait()
        writer.write(b"dy")
        await reader.readuntil(b"\r\n\r\nok")
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\nok")

    await against(app, client)
    assert taken == [b"body", None, b""]


async def test_a_chunk_is_written_at_once_until_too_much_is_unread() -> None:
    took: list[bool] = []
    stalled, over = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        outlet: Outlet = scope["extensions"][OUTLET]
        await send(START)
        await send(body(b"", more=True))
        for _ in range(1000):
            took.append(outlet.write_chunk(b"x" * 2**16))
            if not took[-1]:
                break
        stalled.set()
        await send(body(b"", more=False))
        over.set()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST)
        await stalled.wait()
        assert not over.is_set()
        size = 0
        while not over.is_set() or size < len(took) * 2**16:
            size += len(await reader.read(2**20))

    await against(app, client)
    assert took[0]
    assert not took[-1]


@pytest.mark.parametrize("closing", [False, True])
async def test_a_client_that_reads_slowly_is_not_cut_off_however_long_it_takes(closing: bool) -> None:
    size, piece, write_timeout_s = 12 * 2**20, 2**18, 0.5

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send({**START, "headers": [(b"content-length", b"%d" % size)]})
        await send(body(b"x" * size, more=False))  # The application sends all at once, as a web framework does.

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") if closing else REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        began = asyncio.get_running_loop().time()
        for _ in range(size // piece):
            await reader.readexactly(piece)
            await asyncio.sleep(3 * write_timeout_s / (size // piece))
        assert asyncio.get_running_loop().time() - began >= 3 * write_timeout_s

    await against(app, client, write_timeout_s=write_timeout_s, receive_bytes=2**16)


async def test_a_client_that_reads_nothing_for_the_write_timeout_is_cut_off() -> None:
    async def app(scope: Any, receive: Receive, send: Send) -> None:
        await send(START)
        await send(body(b"x" * 12 * 2**20, more=True))
        await send(body(b"", more=True))  # This waits until the client reads or the connection is lost.
        over.set()

    over = asyncio.Event()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST)
        await reader.readexactly(2**18)  # Reading some of it extends the wait once.
        await over.wait()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(12 * 2**20)

    await against(app, client, write_timeout_s=0.3, receive_bytes=2**16)


async def test_a_client_that_leaves_is_told_once_and_only_while_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GuardedHttp, "half_closed_s", 0.2)  # The stream is silent, so no chunk shows it.
    left: list[str] = []
    told = asyncio.Event()

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        outlet: Outlet = scope["extensions"][OUTLET]
        if scope["path"] == "/quick":
            outlet.on_disconnect = lambda: left.append("quick")
            await send(START)
            await send(body(b"quick", more=False))
            return

        def leave() -> None:
            left.append("slow")
            told.set()

        outlet.on_disconnect = leave
        await send(START)
        await send(body(b"slow", more=True))
        await told.wait()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST.replace(b" / ", b" /quick "))
        await reader.readuntil(b"quick\r\n0\r\n\r\n")
        writer.write(REQUEST)
        await reader.readuntil(b"slow\r\n")
        writer.close()
        await told.wait()

    await against(app, client)
    assert left == ["slow"]


async def test_requests_leave_nothing_for_the_collector() -> None:
    """Objects that wait for the collector stay in memory: a proxy that collects seldom would grow and slow down."""

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        with scope["extensions"][OUTLET]:
            await send(START)
            await send(body(b"ok", more=False))

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def ask(times: int) -> None:
            for _ in range(times):
                writer.write(REQUEST)
                await reader.readuntil(b"0\r\n\r\n")

        await ask(5)
        gc.collect()
        gc.disable()
        try:
            await ask(50)
            assert gc.collect() < 50
        finally:
            gc.enable()

    await against(app, client)
