"""The HTTP server under the routes: a socket bound early, uvicorn on it late, and an end that is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn

from pdserve.config import HttpConfig
from pdserve.errors import ConfigError
from pdserve.http.guard import guarded_config

CLOSE_TIMEOUT_S = 3
"""That connections get to send their last bytes when the server stops."""


def bind(config: HttpConfig) -> socket.socket:
    """A socket that is bound, but refuses connections until the server listens on it. Raises ConfigError.

    Bound before the engine starts: a port in use is found at once, and the node's URL is known.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as exc:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot serve HTTP on {config.host}:{config.port}: {exc}") from exc
    return listener


def url_of(listener: socket.socket, config: HttpConfig) -> str:
    """How the proxy reaches this server: as configured, or made from the bound address."""
    if config.advertise:
        return config.advertise.rstrip("/")
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104  # compared with, not bound to
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """uvicorn with the life cycle in the caller's hands: no signal handlers, no logging set-up."""

    def __init__(self, app: Any, listener: socket.socket, config: HttpConfig) -> None:
        self._listener = listener
        self._server = _Server(
            guarded_config(
                app,
                keep_alive_s=config.keep_alive_s,
                shutdown_s=CLOSE_TIMEOUT_S,
                max_connections=config.max_client_connections,
                write_timeout_s=config.write_timeout_s,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Until it takes connections."""
        self._task = asyncio.create_task(self._server.serve([self._listener]), name="http-server")
        listening = asyncio.create_task(self._server.listening.wait())
        try:
            await asyncio.wait([self._task, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()

    async def stop(self) -> None:
        """Stops listening and closes every connection, after ``CLOSE_TIMEOUT_S`` also the busy ones."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task])

    async def wait_ended(self) -> None:
        """Until it ends by itself, which it should not."""
        assert self._task is not None
        await asyncio.wait([self._task])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # the node has its own
