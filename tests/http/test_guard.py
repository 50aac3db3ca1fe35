"""Tests heads that are too large or never end, against a real server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from pdserve.http import guard as http_guard
from pdserve.http.guard import GuardedHttp
from tests.proxy.cluster import eventually as until

WAIT_S = 10.0
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n"


class Hasty(GuardedHttp):
    head_timeout_s = 0.2


async def app(
    scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[dict[str, object]], Awaitable[None]]
) -> None:
    if scope["path"] == "/endless":
        await endless(receive, send)
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * Hasty.head_timeout_s)  # This is longer than the guard waits for a head.
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


endless_ended = asyncio.Event()


async def endless(receive: Callable[[], Awaitable[Any]], send: Callable[[dict[str, object]], Awaitable[None]]) -> None:
    async def flood() -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})

    flooding = asyncio.create_task(flood())
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    finally:
        flooding.cancel()
        endless_ended.set()


class Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """Leaves signals alone, since tests have handlers of their own."""


@asynccontextmanager
async def serving(protocol: type[GuardedHttp]) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
        server = Server(config)
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, WAIT_S)


async def answer(port: int, *parts: bytes) -> bytes:
    """Returns all that the server sends until it closes the connection, or resets it because of unread bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""
    try:
        async with asyncio.timeout(WAIT_S):
            for part in parts:
                writer.write(part)
                await writer.drain()
            while more := await reader.read(65_536):
                said += more
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return said


async def run(protocol: type[GuardedHttp], *parts: bytes) -> bytes:
    async with serving(protocol) as port:
        return await answer(port, *parts)


async def test_many_headers_are_refused() -> None:
    said = await run(GuardedHttp, REQUEST, b"a: b\r\n" * (GuardedHttp.max_head_bytes // 6 + 1))
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


async def test_one_endless_header_is_refused() -> None:
    said = await run(GuardedHttp, REQUEST, b"a: " + b"x" * 100 * GuardedHttp.max_head_bytes)
    assert said == b"" or said.startswith(b"HTTP/1.1 431 ")


async def test_silent_and_unfinished_connections_are_closed() -> None:
    assert await run(Hasty) == b""
    for part in (b"GET / HT", REQUEST):
        assert (await run(Hasty, part)).startswith(b"HTTP/1.1 408 ")


async def test_a_second_request_on_a_connection_is_guarded_too() -> None:
    said = await run(Hasty, REQUEST + b"\r\n", REQUEST)
    assert said.count(b"200 OK") == 1


async def test_a_slow_answer_is_not_cut() -> None:
    said = await run(Hasty, b"GET /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert said.endswith(b"ok")


async def test_bodies_are_not_counted_as_heads() -> None:
    size = 4 * GuardedHttp.max_head_bytes
    post = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size
    assert (await run(GuardedHttp, post, b"x" * size)).endswith(b"ok")


async def test_one_connection_too_many_is_refused_and_a_place_that_is_left_is_free_again() -> None:
    class Narrow(GuardedHttp):
        max_connections = 2

    last = REQUEST + b"connection: close\r\n\r\n"

    async with serving(Narrow) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in idle:
            writer.write(REQUEST + b"\r\n")
            await reader.readuntil(b"ok")
        head, _, body = (await answer(port)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        idle[0][1].close()
        async with asyncio.timeout(WAIT_S):
            while not (await answer(port, last)).endswith(b"ok"):
                pass
        idle[1][1].close()


async def test_of_a_burst_beyond_the_bound_few_are_answered_and_none_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(GuardedHttp):
        max_connections = 1

    monkeypatch.setattr(http_guard, "MAX_REFUSED", 3)

    async with serving(Narrow) as port:
        _, held = await asyncio.open_connection("127.0.0.1", port)
        burst = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        async with asyncio.timeout(WAIT_S):
            said = [await reader.read() for reader, _ in burst]
        assert sum(answer.startswith(b"HTTP/1.1 503 ") for answer in said) == 3
        assert said.count(b"") == 7
        for _, writer in (*burst, (None, held)):
            writer.close()
        await until(lambda: not Narrow.refused, "refused connections are let go")


async def test_a_client_that_leaves_its_answer_unread_is_cut_off() -> None:
    class Strict(GuardedHttp):
        write_timeout_s = 0.1

    endless_ended.clear()
    async with serving(Strict) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.settimeout(WAIT_S)
            client.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(WAIT_S):
                await endless_ended.wait()
