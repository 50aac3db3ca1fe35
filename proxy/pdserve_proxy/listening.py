"""Where the proxy listens."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from pdserve.errors import ConfigError

BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Addresses:
    """What clients and nodes are told."""

    url: str
    control: str


def bind_http(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise ConfigError(f"cannot serve HTTP on {host}:{port}: {exc}") from exc


def http_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
