"""A client that sends any bytes and reads the HTTP answers that come."""

from __future__ import annotations

import io
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import urlsplit

ANSWER_S = 10.0
"""The seconds that an answer may take. It should take well below one second, but the machine may be busy."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Field names are in lower case."""
    body: bytes


class _Reader(io.BufferedReader):
    """A reader that stays open when a response that was read from it is closed."""

    def close(self) -> None:
        pass


class Connection:
    """One TCP connection, which reads one answer after the other. It is a context manager."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port), ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = _Reader(cast("io.RawIOBase", socket.SocketIO(self._socket, "r")))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Sends the data. Data that a server no longer accepts, because it has closed the connection, is ignored."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def half_close(self) -> None:
        """Says that no more data will be sent. Answers can still be read."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Closes the connection as a crashed process does."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def read(self, size: int) -> bytes:
        """Returns at most ``size`` bytes, or none at the end of the connection. Raises TimeoutError."""
        return self._reader.read1(size)

    def answer(self, method: str = "POST") -> Answer | None:
        """Returns the next answer, or None if the server closed the connection instead. Raises TimeoutError if neither
        happens in time, and AssertionError for half an answer or for data that is not an answer.
        """
        try:
            if not self._reader.peek(1):
                return None
        except ConnectionResetError:
            return None
        response = HTTPResponse(cast("socket.socket", _Wire(self._reader)), method=method)
        try:
            response.begin()
            body = response.read()
        except ConnectionResetError:
            return None
        except HTTPException as exc:
            raise AssertionError(f"not an HTTP answer: {exc!r}") from exc
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


@dataclass(frozen=True)
class _Wire:
    """The only part of a socket that HTTPResponse uses."""

    reader: _Reader

    def makefile(self, *_: Any, **__: Any) -> _Reader:
        return self.reader
