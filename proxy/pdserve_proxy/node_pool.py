"""Connections to nodes, kept between requests."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pdserve.errors import Unavailable
from pdserve_proxy.node_connection import NodeClosed, NodeConnection, NodeResponse, NodeUnreachable

IDLE_S = 60.0
"""Shorter than the nodes keep idle connections, so that none is reused while its node closes it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node's API is."""

    host: str
    port: int
    tls: bool
    authority: str
    """For the ``Host`` header."""
    prefix: str
    """Of every path."""


@functools.lru_cache(maxsize=4096)
def origin_of(url: str) -> Origin:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    return Origin(parts.hostname or "", parts.port or (443 if tls else 80), tls, parts.netloc, parts.path.rstrip("/"))


class NodePool:
    """``close`` has to be called in the end."""

    def __init__(self, *, connect_timeout_s: float, max_connections: int) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._max_connections = max_connections
        self._open: dict[NodeConnection, Origin] = {}
        self._idle: dict[Origin, OrderedDict[NodeConnection, asyncio.TimerHandle]] = {}
        self._closed = False

    def close(self) -> None:
        """Cut every connection."""
        self._closed = True
        for connection in tuple(self._open):
            connection.close()

    async def post(
        self, url: str, path: str, headers: Mapping[str, str], body: bytes, *, silence_s: float | None
    ) -> NodeResponse:
        """The response to a request, its head there. After ``silence_s`` without a byte it fails.

        Raises NodeUnreachable, NodeLost, or Unavailable where ``max_connections`` requests are under way.
        """
        origin = origin_of(url)
        head = _head(origin, path, headers, len(body))
        while True:
            connection = self._take_idle(origin) or await self._connect(origin)
            reused = connection.requests > 0
            response = None
            try:
                response = connection.request(head, body, silence_s)
                await response.head()
                return response
            except NodeClosed:
                # Nodes close kept connections when they like: before a first byte, that says nothing of the node.
                if not reused:
                    raise
            except BaseException:
                if response is not None:
                    response.close()
                raise

    def _take_idle(self, origin: Origin) -> NodeConnection | None:
        idle = self._idle.get(origin)
        if not idle:
            return None
        connection, timer = idle.popitem()
        timer.cancel()
        return connection

    async def _connect(self, origin: Origin) -> NodeConnection:
        if self._closed:
            raise NodeUnreachable("the proxy is stopping")
        self._make_room()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: NodeConnection(self._freed, self._lost),
                    origin.host,
                    origin.port,
                    ssl=ssl.create_default_context() if origin.tls else None,
                )
        except (OSError, TimeoutError) as exc:
            raise NodeUnreachable(str(exc) or "no connection in time") from exc
        self._open[connection] = origin
        return connection

    def _make_room(self) -> None:
        if len(self._open) < self._max_connections:
            return
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
                return
        raise Unavailable(
            f"all {self._max_connections} connections to nodes are in use", code="no_connection_left", retry_after_s=1
        )

    def _freed(self, connection: NodeConnection) -> None:
        if self._closed:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        idle = self._idle.setdefault(self._open[connection], OrderedDict())
        idle[connection] = loop.call_later(IDLE_S, connection.close)

    def _lost(self, connection: NodeConnection) -> None:
        origin = self._open.pop(connection, None)
        idle = self._idle.get(origin) if origin is not None else None
        if idle is not None and origin is not None:
            timer = idle.pop(connection, None)
            if timer is not None:
                timer.cancel()
            if not idle:
                del self._idle[origin]


def _head(origin: Origin, path: str, headers: Mapping[str, str], length: int) -> bytes:
    lines = [
        f"POST {origin.prefix}{path} HTTP/1.1",
        f"host: {origin.authority}",
        f"content-length: {length}",
        *(f"{name}: {value}" for name, value in headers.items()),
        "\r\n",
    ]
    return "\r\n".join(lines).encode("latin-1", "replace")
