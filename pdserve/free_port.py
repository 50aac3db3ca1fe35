"""A port for a program that cannot be told to take a free one itself."""

from __future__ import annotations

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Nobody listened on it just now; whoever is quicker may."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
