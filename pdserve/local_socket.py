"""Makes the ZMQ sockets between the processes of one program, in folders that nobody else can read."""

from __future__ import annotations

import tempfile
from typing import Any

import zmq

from pdserve.errors import ConfigError

_HINT = "TMPDIR may name a folder with free space"


def folder_of(socket_name: str, prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Returns a new folder for the socket that errors call ``socket_name``. Raises ConfigError if it cannot be made."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as exc:
        raise ConfigError(f"no folder for {socket_name} can be made: {exc}; {_HINT}") from exc


def bind(socket: zmq.Socket[Any], address: str, socket_name: str) -> None:
    """Binds ``socket`` to an ``ipc://`` address. Raises ConfigError if that fails; the caller still has to close it."""
    try:
        socket.bind(address)
    except zmq.ZMQError as exc:
        raise ConfigError(f"{socket_name} cannot be made: {exc}; {_HINT}") from exc
