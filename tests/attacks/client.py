"""A client that sends bytes, whatever they are, and reads what HTTP answers come."""

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
"""That an answer may take where it should take well below a second: other people use the machine too."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class _Reader(io.BufferedReader):
    """Outlives each response that is read from it."""

    def close(self) -> None:
        pass


class Connection:
    """One TCP connection, with answers one after the other. A context manager."""

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
        """What a server that has closed the connection takes no more is nobody's concern."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def half_close(self) -> None:
        """Nothing more will be sent; answers are still read."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Leave as a process that crashes does."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def read(self, size: int) -> bytes:
        """Up to so many bytes of what comes; none at its end. Raises TimeoutError."""
        return self._reader.read1(size)

    def answer(self, method: str = "POST") -> Answer | None:
        """The next one; None if the connection was closed instead. Raises TimeoutError if neither happens in time.

        Raises AssertionError for half an answer, and for what is none.
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
    """All of a socket that HTTPResponse uses."""

    reader: _Reader

    def makefile(self, *_: Any, **__: Any) -> _Reader:
        return self.reader
