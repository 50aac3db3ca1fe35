"""Where the proxy listens."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass

from pdserve.config import HttpConfig
from pdserve.errors import ConfigError

BACKLOG = 2048
KEEPALIVE_IDLE_S = 60


@dataclass(frozen=True, slots=True)
class Addresses:
    """What clients and nodes are told."""

    url: str
    control: str


def bind_http(config: HttpConfig) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be bound."""
    try:
        return _create(config, config.port, reuse_port=False)
    except OSError as exc:
        raise _cannot_bind(config, exc) from exc


def bind_shared(config: HttpConfig, count: int) -> list[socket.socket]:
    """``count`` listening sockets on one address, among which the kernel spreads connections. Raises ConfigError.

    A socket for each worker rather than one for all: the first to wake would take a whole burst. They stay open in this
    process, so that what waits in the socket of a worker that died is there for the next one.
    """
    # Sharing sockets share with any process of the same user: without this, two proxies would take turns on one port.
    bind_http(config).close()
    shared: list[socket.socket] = []
    try:
        for _ in range(count):
            port = shared[0].getsockname()[1] if shared else config.port
            shared.append(_create(config, port, reuse_port=True))
    except OSError as exc:
        for listener in shared:
            listener.close()
        raise _cannot_bind(config, exc) from exc
    return shared


def _create(config: HttpConfig, port: int, *, reuse_port: bool) -> socket.socket:
    found = socket.getaddrinfo(config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    listener = socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG, reuse_port=reuse_port)
    _cut_dead_clients(listener, config.write_timeout_s)
    return listener


def _cannot_bind(config: HttpConfig, exc: OSError) -> ConfigError:
    return ConfigError(f"cannot serve HTTP on {config.host}:{config.port}: {exc}")


def _cut_dead_clients(listener: socket.socket, timeout_s: float) -> None:
    """Connections take this over from the socket that they come in on.

    A client that is gone without a word, or takes nothing while less than a write buffer is left for it, is noticed by
    the kernel alone.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_IDLE_S // 4)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


def http_url(listener: socket.socket, tls: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
