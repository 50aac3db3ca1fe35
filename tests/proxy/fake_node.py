"""A fake node: a small HTTP/1.1 server whose every byte and whose death a test decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeAlias


@dataclass
class Received:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Exchange:
    """A request, with the connection on which a test answers it."""

    request: Received
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self, status: int, body: bytes, **headers: str) -> None:
        fields = {"content-type": "application/json", "content-length": str(len(body))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        await self._write(_head(status, fields) + body)

    async def begin_stream(self, **headers: str) -> None:
        fields = {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        await self._write(_head(200, fields))

    async def chunk(self, data: bytes) -> None:
        await self._write(b"%x\r\n%b\r\n" % (len(data), data))

    async def finish(self) -> None:
        await self._write(b"0\r\n\r\n")

    def die(self) -> None:
        """Closes the connection as a killed process does: bytes that were sent before may still arrive."""
        self.writer.transport.close()

    async def gone(self) -> None:
        """Returns when the other side has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(4096):
                pass

    async def _write(self, data: bytes) -> None:
        if self.writer.transport.is_closing():  # for which uvloop has no exception type of its own
            raise ConnectionResetError
        self.writer.write(data)
        await self.writer.drain()


Behaviour: TypeAlias = Callable[[Exchange], Awaitable[None]]


async def answer_ok(exchange: Exchange) -> None:
    await exchange.answer(200, b'{"ok": true}')


EVENTS = [b'data: {"n": %d}\n\n' % n for n in range(5)]
DONE = b"data: [DONE]\n\n"


async def stream_events(exchange: Exchange) -> None:
    await exchange.begin_stream()
    for event in [*EVENTS, DONE]:
        await exchange.chunk(event)
    await exchange.finish()


@dataclass
class FakeNode:
    """A fake node, run as an async context manager, whose ``behaviour`` answers each request."""

    behaviour: Behaviour = answer_ok
    requests: list[Received] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> Self:
        self._connections: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stops listening and breaks every connection."""
        self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async for request in _requests(reader):
                self.requests.append(request)
                await self.behaviour(Exchange(request, reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[Received]:
    while head := await _read_head(reader):
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        yield Received(first.split(" ")[1], headers, body)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
