"""Tests clients that half-close: those that still read get their answers, and those that have left are noticed."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import httptools
import pytest
import uvloop

from pdserve.http.guard import GuardedHttp
from tests.http.test_guard_connection import App, Reader, Writer, connected

WAIT_S = 10.0
HELD = b"GET /held HTTP/1.1\r\nhost: x\r\n\r\n"
HELD_1_0 = b"GET /held HTTP/1.0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

LARGE = b"x" * 2**25
"""This is more than the kernel's buffers hold."""
LOOKS = 20

Client: TypeAlias = Callable[["Guarded", Reader, Writer], Coroutine[Any, Any, None]]


class Guarded(App):
    """An ``App`` that also answers ``/stream``, whose last chunk comes when the test allows it, and tells when a client
    has half-closed.

    The answer to ``/large`` is more than a client can leave unread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.half_closed, self.looked_long = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] not in ("/stream", "/large"):
            await super().__call__(scope, receive, send)
            return
        if scope["path"] == "/large":
            await receive()
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(LARGE))]}
            )
            for start in range(0, len(LARGE), 2**16):
                piece = LARGE[start : start + 2**16]
                await send({"type": "http.response.body", "body": piece, "more_body": start + 2**16 < len(LARGE)})
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        gone = asyncio.ensure_future(receive())
        let_go = asyncio.ensure_future(self.let_go.wait())
        self.started.set()
        try:
            await asyncio.wait([gone, let_go], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                self.disconnected.set()
            else:
                await send({"type": "http.response.body", "body": b"last"})
        finally:
            gone.cancel()
            let_go.cancel()


class Telling(GuardedHttp):
    def eof_received(self) -> bool | None:  # type: ignore[override]
        kept = super().eof_received()
        self.config.app.half_closed.set()  # type: ignore[union-attr]
        return kept


class Impatient(Telling):
    half_closed_s = 0.2


class Looking(Impatient):
    """A connection that tells the application when it has looked for its client longer than a silent one may take."""

    _looks = 0

    def _look_for_client(self) -> None:
        super()._look_for_client()
        self._looks += 1
        if self._looks == LOOKS:
            self.config.app.looked_long.set()  # type: ignore[union-attr]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def talk(request: pytest.FixtureRequest) -> Callable[..., Guarded]:
    def run(client: Client, protocol: type[GuardedHttp] = Telling) -> Guarded:
        async def scenario() -> Guarded:
            app = Guarded()
            async with asyncio.timeout(2 * WAIT_S), connected(app, protocol) as (reader, writer):
                await client(app, reader, writer)
            return app

        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(scenario())

    return run


def test_a_half_closed_client_gets_its_answer_and_at_most_a_word_before(talk: Callable[..., Guarded]) -> None:
    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD)
        await app.started.wait()
        writer.write_eof()
        assert await reader.readexactly(len(CONTINUE)) == CONTINUE
        await asyncio.sleep(0.3)  # The server looks several times, and asks only once.
        app.let_go.set()
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" in said
        assert said.endswith(b"\r\n\r\nok")

    assert not talk(client).disconnected.is_set()


def test_a_client_may_close_its_half_with_its_request(talk: Callable[..., Guarded]) -> None:
    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD.replace(b"/held", b"/whole"))
        writer.write_eof()
        assert (await reader.read()).endswith(b"\r\n\r\nok")

    talk(client)


def test_a_half_closed_client_gets_the_rest_of_its_stream(talk: Callable[..., Guarded]) -> None:
    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD.replace(b"/held", b"/stream"))
        await app.started.wait()
        writer.write_eof()
        await app.half_closed.wait()
        app.let_go.set()
        said = await reader.read()
        assert CONTINUE not in said
        assert said.endswith(b"5\r\nfirst\r\n4\r\nlast\r\n0\r\n\r\n")

    assert not talk(client).disconnected.is_set()


@pytest.mark.parametrize("request_", [HELD, HELD * 2], ids=["one", "pipelined"])
def test_a_client_that_left_is_noticed_before_its_answer_begins(talk: Callable[..., Guarded], request_: bytes) -> None:
    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(request_)
        await app.started.wait()
        writer.close()
        await app.disconnected.wait()

    talk(client)


def test_a_client_that_half_closed_first_and_left_later_is_noticed(
    talk: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.http.guard.ASK_EVERY_S", 0.1)

    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD)
        await app.started.wait()
        writer.write_eof()
        assert await reader.readexactly(len(CONTINUE)) == CONTINUE
        assert not app.disconnected.is_set()
        writer.close()
        await app.disconnected.wait()

    talk(client)


def test_a_client_that_resets_is_noticed(talk: Callable[..., Guarded]) -> None:
    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD)
        await app.started.wait()
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await app.disconnected.wait()

    talk(client)


def test_whom_nobody_can_ask_waits_a_bounded_time(talk: Callable[..., Guarded]) -> None:
    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD_1_0)
        await app.started.wait()
        writer.write_eof()
        await app.disconnected.wait()
        assert CONTINUE not in await reader.read()

    talk(client, Impatient)


def test_a_half_closed_client_of_a_stream_that_pauses_is_asked_and_gets_the_rest(
    talk: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zeros that ask it belong to the size of the next chunk. There are so few of them that no client minds."""
    for name, value in (("MAX_LOOK_S", 0.1), ("ASK_EVERY_S", 0.0), ("MAX_ZEROS", 2)):
        monkeypatch.setattr(f"pdserve.http.guard.{name}", value)
    body = bytearray()

    class Body:
        def on_body(self, data: bytes) -> None:
            body.extend(data)

    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD.replace(b"/held", b"/stream"))
        await app.started.wait()
        writer.write_eof()
        await app.looked_long.wait()
        app.let_go.set()
        said = await reader.read()
        assert said.endswith(b"5\r\nfirst\r\n004\r\nlast\r\n0\r\n\r\n")
        httptools.HttpResponseParser(Body()).feed_data(said)
        assert body == b"firstlast"

    assert not talk(client, Looking).disconnected.is_set()


class _SentAgain:
    """What a kernel says that has just sent bytes once more, because the client has not acknowledged them."""

    size = 8

    def unpack(self, info: bytes) -> tuple[int, int]:
        return info[0], int(1000 * Impatient.half_closed_s) + 1


def test_zeros_that_the_kernel_sends_again_are_not_taken_for_chunks(
    talk: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client behind a network that loses packets would get a size of more digits than it takes."""
    for name, value in (("MAX_LOOK_S", 0.1), ("ASK_EVERY_S", 0.0), ("MAX_ZEROS", 2), ("_TCP_INFO", _SentAgain())):
        monkeypatch.setattr(f"pdserve.http.guard.{name}", value)

    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD.replace(b"/held", b"/stream"))
        await app.started.wait()
        writer.write_eof()
        await app.looked_long.wait()
        app.let_go.set()
        assert (await reader.read()).endswith(b"5\r\nfirst\r\n004\r\nlast\r\n0\r\n\r\n")

    talk(client, Looking)


def test_a_client_that_leaves_a_stream_that_pauses_is_noticed(talk: Callable[..., Guarded]) -> None:
    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD.replace(b"/held", b"/stream"))
        await app.started.wait()
        writer.close()
        await app.disconnected.wait()

    talk(client, Impatient)


def test_a_half_closed_client_may_pause_in_its_reading(
    talk: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.http.guard.MAX_LOOK_S", 0.1)

    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD.replace(b"/held", b"/large"))
        writer.write_eof()
        await app.looked_long.wait()
        assert len((await reader.read()).partition(b"\r\n\r\n")[2]) == len(LARGE)

    talk(client, Looking)


def test_a_half_closed_client_of_http_1_0_gets_its_answer(talk: Callable[..., Guarded]) -> None:
    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(HELD_1_0)
        await app.started.wait()
        writer.write_eof()
        await app.half_closed.wait()
        app.let_go.set()
        assert (await reader.read()).endswith(b"\r\n\r\nok")

    talk(client)


def test_a_request_that_is_not_whole_ends_with_the_clients_half(talk: Callable[..., Guarded]) -> None:
    async def client(app: Guarded, reader: Reader, writer: Writer) -> None:
        writer.write(b"POST /held HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\na")
        writer.write_eof()
        assert await reader.read() == b""

    talk(client)
