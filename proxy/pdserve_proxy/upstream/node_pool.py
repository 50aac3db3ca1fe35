"""Keeps connections to nodes between requests."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pdserve.errors import Unavailable
from pdserve.http.tls import Trust
from pdserve.patience import PatientTimeout
from pdserve_proxy.upstream.expiry_queue import ExpiryQueue
from pdserve_proxy.upstream.node_connection import (
    NodeClosed,
    NodeConnection,
    NodeLost,
    NodeRefused,
    NodeResponse,
    NodeUnreachable,
)

IDLE_S = 60.0
"""Seconds for which an idle connection is kept: fewer than nodes keep one, so that none is reused while it closes."""
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.EBUSY)
"""What a connection, or the search for a name, fails with if no file may be opened: with mDNS, the last one."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The address of a node's API."""

    host: str
    port: int
    tls: bool
    authority: str
    """The value of the ``Host`` header."""
    path_prefix: str
    """The beginning of every request's path."""


@functools.lru_cache(maxsize=4096)
def origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.netloc, parts.path.rstrip("/"))


class NodePool:
    """The connections of one process to all nodes. The owner has to call ``close`` in the end."""

    def __init__(self, *, connect_timeout_s: float, max_connections: int, trust: Trust | None = None) -> None:
        """``trust`` verifies nodes that are reached by HTTPS; without it, the system's authorities do."""
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._trust = trust or Trust()
        self._open: dict[NodeConnection, str] = {}
        """The open connections, each with its node's URL."""
        self._open_at: dict[str, dict[NodeConnection, None]] = {}
        """The open connections to each URL: many nodes may be lost at once, and each has few of all connections."""
        self._idle: dict[str, ExpiryQueue[NodeConnection]] = {}
        self._connecting: dict[PatientTimeout, str] = {}
        """The bound of each attempt to connect, with its node's URL."""
        self._unsent: list[NodeConnection] = []
        """The connections whose requests have begun in this turn of the event loop."""
        self._closed = False

    def close(self) -> None:
        """Closes every connection."""
        self._closed = True
        for connection in tuple(self._open):
            connection.close()
        for idle in self._idle.values():
            idle.close()

    def suspect(self, url: str) -> None:
        """Fails what waits for the node at ``url``, which may be dead: a stream once it is silent, the rest at once."""
        for attempt in [attempt for attempt, where in self._connecting.items() if where == url]:
            del self._connecting[attempt]
            attempt.expire()
        for connection in tuple(self._open_at.get(url, ())):
            connection.suspect()

    def post(
        self, url: str, path: str, headers: Mapping[str, str], body: bytes, *, silence_s: float | None
    ) -> Coroutine[Any, Any, NodeResponse]:
        """Returns the response to a request when its head has come. After ``silence_s`` without a byte it fails.

        Raises NodeUnreachable, NodeLost, or Unavailable where ``max_connections`` requests are under way or this
        process may open no more files.
        """
        head = f"{_opening(url, path)}content-length: {len(body)}\r\n"
        for name, value in headers.items():
            head += f"{name}: {value}\r\n"
        return self._send(url, f"{head}\r\n".encode("latin-1", "replace"), body, silence_s)

    def get(self, url: str, path: str, *, silence_s: float) -> Coroutine[Any, Any, NodeResponse]:
        """Does what ``post`` does, with a request that has no body."""
        return self._send(url, f"{_opening(url, path, 'GET')}\r\n".encode("latin-1"), b"", silence_s)

    async def _send(self, url: str, head: bytes, body: bytes, silence_s: float | None) -> NodeResponse:
        idle = self._idle.get(url)
        if not idle:
            return await _head_of(await self._connect(url), head, body, silence_s)
        try:
            return await _head_of(idle.pop_newest(), head, body, silence_s)
        except NodeClosed:
            # A node may close an idle connection at any time. A second try on a new connection shows whether the node
            # lives; there is no third, because the request itself may be what kills the node.
            try:
                connection = await self._connect(url)
            except NodeUnreachable as exc:
                raise NodeLost(f"it closed the connection, and takes no other: {exc}") from exc
        return await _head_of(connection, head, body, silence_s)

    async def _connect(self, url: str) -> NodeConnection:
        if self._closed:
            raise NodeUnreachable("the proxy is stopping")
        self._make_room()
        origin = origin_of(url)
        loop = asyncio.get_running_loop()
        wanted = True
        try:
            async with PatientTimeout(self._connect_timeout_s) as attempt:
                self._connecting[attempt] = url
                try:
                    _, connection = await loop.create_connection(
                        lambda: NodeConnection(self._begun, self._freed, self._lost),
                        origin.host,
                        origin.port,
                        ssl=self._trust.context if origin.tls else None,
                    )
                finally:
                    wanted = self._connecting.pop(attempt, None) is not None
        except (OSError, TimeoutError) as exc:
            if exc.errno in _NO_FILES:  # this says nothing about the node
                raise Unavailable(
                    "the proxy has as many files and connections open as it may",
                    code="no_connection_left",
                    retry_after_s=1,
                ) from exc
            kind = NodeRefused if isinstance(exc, ConnectionRefusedError) else NodeUnreachable
            raise kind(str(exc) or "no connection in time") from exc
        self._open[connection] = url
        self._open_at.setdefault(url, {})[connection] = None
        if not wanted:  # its node was suspected while it answered
            connection.close()
            raise NodeUnreachable("its heartbeats ended")
        return connection

    def _make_room(self) -> None:
        if len(self._open) + len(self._connecting) < self._max_connections:
            return
        for idle in self._idle.values():
            if idle:
                idle.pop_oldest().close()
                return
        raise Unavailable(
            f"all {self._max_connections} connections to nodes are in use", code="no_connection_left", retry_after_s=1
        )

    def _begun(self, connection: NodeConnection) -> None:
        # A write wakes a node that has nothing to do, which is most of what the write costs. So what begins in one turn
        # of the event loop is sent in one go: the node is awake for all but the first.
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_begun)
        self._unsent.append(connection)

    def _send_begun(self) -> None:
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            connection.send()

    def _freed(self, connection: NodeConnection) -> None:
        if self._closed:
            connection.close()
            return
        url = self._open[connection]
        idle = self._idle.get(url)
        if idle is None:
            idle = self._idle[url] = ExpiryQueue(IDLE_S, NodeConnection.close)
        idle.add(connection)

    def _lost(self, connection: NodeConnection) -> None:
        url = self._open.pop(connection, None)
        if url is None:
            return
        there = self._open_at[url]
        there.pop(connection, None)
        if not there:
            del self._open_at[url]
        idle = self._idle.get(url)
        if idle is not None:
            idle.discard(connection)
            if not idle:
                idle.close()
                del self._idle[url]


async def _head_of(connection: NodeConnection, head: bytes, body: bytes, silence_s: float | None) -> NodeResponse:
    """Returns the response to a request when its head has come. Raises NodeLost, with the connection closed."""
    response = connection.request(head, body, silence_s)
    try:
        while not response.status:
            await response.next_news()
    except BaseException:
        response.close()
        raise
    return response


@functools.lru_cache(maxsize=4096)
def _opening(url: str, path: str, method: str = "POST") -> str:
    """Returns the first lines of every request with one method to one path of a node."""
    origin = origin_of(url)
    return f"{method} {origin.path_prefix}{path} HTTP/1.1\r\nhost: {origin.authority}\r\n"
