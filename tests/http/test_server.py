"""A node's HTTP server does what its settings say; of idle connections, see ``tests/proxy/test_keep_alive.py``."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from pdserve.config import HttpConfig
from tests.api.http_serving import http_serving
from tests.api.node import WAIT_S


async def test_a_client_that_does_not_read_is_cut_off_after_the_settings_time() -> None:
    gone = asyncio.Event()

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})

        writing = asyncio.create_task(write())
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()
        finally:
            writing.cancel()
            await asyncio.wait([writing])

    async with http_serving(flood, HttpConfig(write_timeout_s=0.3)) as address:
        with socket.create_connection(address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(gone.wait(), WAIT_S)


async def test_a_connection_beyond_the_settings_number_is_refused() -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with http_serving(answer, HttpConfig(max_client_connections=1)) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"ok"), WAIT_S)
        other, second = await asyncio.open_connection(*address)
        said = await asyncio.wait_for(other.read(), WAIT_S)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in said
        second.close()
        writer.close()
