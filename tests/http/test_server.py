"""Tests that an HTTP server follows its settings. ``tests/proxy/test_keep_alive.py`` tests idle connections."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from typing import Any

import pytest

from pdserve.config import HttpConfig
from pdserve.errors import ConfigError
from pdserve.http.server import HttpServer, bind, url_of
from tests.api.node import WAIT_S
from tests.http.http_serving import http_serving


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


async def test_a_stopping_server_answers_one_more_request_behind_a_stream_that_did_not_say_so() -> None:
    ending = asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await ending.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    with closing(bind(HttpConfig())) as listener:
        server = HttpServer(stream, listener, HttpConfig(), last_request_s=30)
        await server.start()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        idle_reader, idle_writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(request)
        head = await asyncio.wait_for(reader.readuntil(b"begun\r\n"), WAIT_S)
        assert b"connection: close" not in head
        stopping = asyncio.create_task(server.stop())
        assert await asyncio.wait_for(idle_reader.read(), WAIT_S) == b""
        ending.set()
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), WAIT_S)
        writer.write(request)
        last = await asyncio.wait_for(reader.read(), WAIT_S)
        assert last.startswith(b"HTTP/1.1 200 ") and b"connection: close" in last and last.endswith(b"0\r\n\r\n")
        await asyncio.wait_for(stopping, WAIT_S)
        writer.close()
        idle_writer.close()


def test_the_kernel_cuts_clients_that_are_gone_without_a_word() -> None:
    with closing(bind(HttpConfig(write_timeout_s=7.0))) as listener:
        listener.listen()
        with (
            closing(socket.create_connection(listener.getsockname())),
            closing(listener.accept()[0]) as accepted,
        ):
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


async def test_two_servers_that_start_at_once_on_one_port_are_not_both_there() -> None:
    """Neither bind fails, because neither socket listens yet."""
    with closing(bind(HttpConfig())) as first:
        config = HttpConfig(port=first.getsockname()[1])
        with closing(bind(config)) as second:
            server = HttpServer(None, first, config)
            await server.start()
            with pytest.raises(ConfigError, match="cannot serve HTTP on 127"):
                await HttpServer(None, second, config).start()
            await server.stop()


def test_a_url_names_the_bound_address_or_what_stands_for_all() -> None:
    with closing(bind(HttpConfig())) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, wildcard="node-1") == f"http://127.0.0.1:{port}"
        assert url_of(listener, tls=True) == f"https://127.0.0.1:{port}"
    with closing(bind(HttpConfig(host="0.0.0.0"))) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://0.0.0.0:{port}"
        assert url_of(listener, wildcard="node-1") == f"http://node-1:{port}"
