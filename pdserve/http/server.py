"""The HTTP server of nodes and proxies: sockets that clients connect to, and uvicorn on them.

``bind`` and ``HttpServer`` are apart so that a port in use is found, and the server's URL is known, before the process
starts anything that takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from pdserve.config import HttpConfig
from pdserve.errors import ConfigError
from pdserve.http.guard import guarded_config

CLOSE_TIMEOUT_S = 3
"""Seconds that busy connections get to send their last bytes when the server stops."""
HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds for a client's TLS handshake. A connection counts among the server's connections only after it."""
BACKLOG = 2048
KEEPALIVE_IDLE_S = 60
"""Seconds without a packet after which the kernel asks a client's system whether the connection still exists."""


def bind(config: HttpConfig) -> socket.socket:
    """Returns a socket that refuses connections until a server listens on it. Raises ConfigError."""
    with _refused_as_config_error(config):
        return _bound(config, config.port, shared=False)


def bind_shared(config: HttpConfig, count: int) -> list[socket.socket]:
    """Returns ``count`` listening sockets on one address, among which the kernel spreads connections.

    Each worker gets a socket of its own: of workers that share one, the first to wake would take a whole burst. The
    caller keeps the sockets open, so that connections that wait at a worker that died are there for the next one.

    Raises ConfigError.
    """
    # Sockets that share a port share it with any process of the same user: two proxies would take turns on it.
    bind(config).close()
    with _refused_as_config_error(config), contextlib.ExitStack() as on_failure:
        listeners: list[socket.socket] = []
        for _ in range(count):
            port = listeners[0].getsockname()[1] if listeners else config.port
            listeners.append(on_failure.enter_context(_bound(config, port, shared=True)))
            listeners[-1].listen(BACKLOG)
        on_failure.pop_all()
        return listeners


def url_of(listener: socket.socket, *, tls: bool = False, wildcard: str = "") -> str:
    """Returns the URL of the bound address, with ``wildcard``, if given, in place of an address that means all."""
    host, port = listener.getsockname()[:2]
    if wildcard and host in ("0.0.0.0", "::"):  # noqa: S104  # compared with, not bound to
        host = wildcard
    return f"{'https' if tls else 'http'}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


class HttpServer:
    """Uvicorn whose start and end its caller decides on: it installs no signal handlers and sets up no logging."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        config: HttpConfig,
        *,
        tls: ssl.SSLContext | None = None,
        shutdown_s: int = CLOSE_TIMEOUT_S,
        own_checks: Sequence[str] = (),
        last_request_s: int = 0,
    ) -> None:
        """``shutdown_s`` is how long ``stop`` waits for responses under way.

        ``last_request_s`` is how long it waits behind each of them for its client's next request, and answers that too.
        The handlers of the paths ``own_checks`` check themselves which pages may send them requests.
        """
        self._config = config
        self._listener = listener
        self._server = _UvicornServer(
            guarded_config(
                app,
                keep_alive_s=config.keep_alive_s,
                shutdown_s=shutdown_s,
                max_connections=config.max_client_connections,
                write_timeout_s=config.write_timeout_s,
                origins=config.cors_origins,
                own_checks=own_checks,
                tls=tls,
                backlog=BACKLOG,
                last_request_s=last_request_s,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """Returns when the server takes connections. Raises ConfigError if it cannot listen.

        The task that it returns ends with the server, before ``stop`` only because of a defect.
        """
        self._serving = asyncio.create_task(self._server.serve([self._listener]), name="http-server")
        listening = asyncio.create_task(self._server.listening.wait())
        try:
            await asyncio.wait([self._serving, listening], return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                with _refused_as_config_error(self._config):
                    await self._serving
        finally:
            listening.cancel()
        return self._serving

    async def stop(self) -> None:
        """Stops listening, lets responses under way finish for ``shutdown_s``, and closes every connection."""
        if self._serving is not None:
            self._server.stopped.set()
            await asyncio.wait([self._serving])

    def cancel(self) -> None:
        """Ends the server without regard to its connections, where ``stop`` has not."""
        if self._serving is not None:
            self._serving.cancel()


class _UvicornServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.stopped = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # uvicorn would raise a signal again after a clean shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        await self.on_tick(0)  # makes the default fields of answers, which the first connection needs
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        for listener in sockets or ():
            self.servers.append(
                await loop.create_server(
                    self._make_protocol,
                    sock=listener,
                    ssl=tls,
                    backlog=self.config.backlog,
                    # uvicorn has no setting for this timeout, and the loop's own is 60 s.
                    ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT_S,
                )
            )
        self.listening.set()

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def main_loop(self) -> None:
        while not self.stopped.is_set():
            await self.on_tick(0)  # renews the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.stopped.wait()


@contextlib.contextmanager
def _refused_as_config_error(config: HttpConfig) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise ConfigError(f"cannot serve HTTP on {config.host}:{config.port}: {exc}") from exc


def _bound(config: HttpConfig, port: int, *, shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _cut_dead_clients(listener, config.write_timeout_s)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _cut_dead_clients(listener: socket.socket, timeout_s: float) -> None:
    """Lets the kernel end connections whose client is gone without a word. They inherit this from their listener.

    The server itself notices neither an idle client that is gone nor one that takes nothing while less than a write
    buffer is left for it.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_IDLE_S // 4)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
