"""A relay in front of a server, which cuts connections in the middle of the events that the server sends."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CHUNK = 65_536
TIMEOUT_S = 60.0
_EVENT_END = b"\n\n"
_NO_END = sys.maxsize
_PART = 25
"""The bytes that the client gets of the event that is cut: less than any has."""


@dataclass
class CuttingRelay:
    """Relays one connection at a time, and says what each one's client sent."""

    url: str
    requests: list[bytes] = field(default_factory=list)


@contextmanager
def cutting_relay(url: str, cut_behind: Sequence[int]) -> Iterator[CuttingRelay]:
    """Relays to the server at ``url``. Connection i is cut behind ``cut_behind[i]`` events, later ones are not."""
    target = urlsplit(url)
    listener = socket.create_server(("127.0.0.1", 0))
    relay = CuttingRelay(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def serve() -> None:
        for events in (*cut_behind, None):
            try:
                client, _ = listener.accept()
            except OSError:  # The block has ended, and closed the listener.
                return
            with client, socket.create_connection((target.hostname, target.port), TIMEOUT_S) as server:
                client.settimeout(TIMEOUT_S)
                relay.requests.append(request := _request(client))
                server.sendall(request)
                received, sent, end = b"", 0, _NO_END
                while sent != end and (piece := server.recv(CHUNK)):
                    received += piece
                    if events is not None and received.count(_EVENT_END) >= events:
                        *whole, _ = received.split(_EVENT_END, events)
                        end = sum(len(event + _EVENT_END) for event in whole) + _PART
                    client.sendall(received[sent:end])
                    sent = len(received[:end])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with closing(listener):
        try:
            yield relay
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(TIMEOUT_S)


def _request(client: socket.socket) -> bytes:
    """Returns a whole request, whose head says the length of its body, and asks for no further one."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(CHUNK)
    head, _, body = found.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    (length,) = [int(line.partition(b":")[2]) for line in lines if line.lower().startswith(b"content-length:")]
    while len(body) < length:
        body += client.recv(CHUNK)
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*kept, b"connection: close"]) + b"\r\n\r\n" + body
