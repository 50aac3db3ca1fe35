"""Finds out before anything is started whether its ports are free."""

from __future__ import annotations

import errno
import socket

from pdserve.config import HttpConfig
from pdserve.errors import ConfigError


def check_port(host: str, port: int, flag: str, host_flag: str) -> None:
    """Raises ConfigError if this process cannot listen there; ``flag`` and ``host_flag`` say what to change."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as exc:
        raise ConfigError(_port_words(host, port, flag, host_flag, exc)) from exc


def _port_words(host: str, port: int, flag: str, host_flag: str, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"{flag} {port} is taken: another program listens on {host}:{port}. Stop that, or give another {flag}; "
                "0 takes a free one"
            )
        case errno.EACCES:
            return f"{flag} {port}: this user may not listen on ports below 1024; give {flag} a higher one"
        case _:
            return f"{host_flag} {host}: this machine cannot listen on that address ({error.strerror or error})"


def check_http(http: HttpConfig) -> None:
    """Raises ConfigError if this process cannot listen where clients are to connect."""
    check_port(http.host, http.port, "--port", "--host")
