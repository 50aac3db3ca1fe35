"""The memory that request bodies take, and how many are on their way. Sans-IO: counts, and says who is turned away.

    hold ──▶ arrive ──▶ add … ──▶ arrived ──▶ close      a body that has to be waited for
    hold ──▶ add ──────────────────────────▶ close      one that came together with its request's head

Bodies that arrive are bounded apart from all others, and those of one client apart from other clients': whoever sends
slowly, or stops in the middle, takes nobody's place but those of more bodies like it.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdserve.errors import RequestError, TooManyRequests, Unavailable

CLIENTS = 4
"""So many have to fill their shares before nobody else's bodies can arrive."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    uploads: int
    """Bodies that arrive at once."""
    memory_bytes: int
    """Of all bodies; those that arrive have half of it."""
    body_bytes: int
    """The largest body. One such may always arrive, whatever the shares come to."""


@dataclass(slots=True)
class _Share:
    """What arrives from one client."""

    uploads: int = 0
    held_bytes: int = 0


class HeldBodies:
    """Of one proxy process."""

    def __init__(self, limits: BodyLimits) -> None:
        self._max_bytes = max(limits.memory_bytes, 2 * limits.body_bytes)
        self._max = _Share(limits.uploads, self._max_bytes // 2)
        self._max_of_client = _Share(
            -(-limits.uploads // CLIENTS), max(self._max.held_bytes // CLIENTS, limits.body_bytes)
        )
        self._arriving = _Share()
        self._clients: dict[str, _Share] = {}
        self._bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._bytes

    @property
    def arriving(self) -> int:
        """How many bodies are on their way."""
        return self._arriving.uploads

    def hold(self) -> HeldBody:
        """One more body, of which nothing has come. It is a context manager, and closed at the end of that."""
        return HeldBody(self)

    # ------------------------------------------------------------------ a body's side

    def arrive(self, client: str) -> _Share:
        share = self._clients.get(client) or _Share()
        if share.uploads >= self._max_of_client.uploads:
            raise _client_has_its_share(f"{self._max_of_client.uploads} request bodies")
        if self._arriving.uploads >= self._max.uploads:
            raise _full("the proxy has all the request bodies on their way that it waits for")
        self._clients[client] = share
        share.uploads += 1
        self._arriving.uploads += 1
        return share

    def add(self, size: int, share: _Share | None) -> None:
        if self._bytes + size > self._max_bytes:
            raise _full("the proxy has no memory left for request bodies")
        if share is not None:
            if share.held_bytes + size > self._max_of_client.held_bytes:
                raise _client_has_its_share(f"{self._max_of_client.held_bytes} bytes of request bodies")
            if self._arriving.held_bytes + size > self._max.held_bytes:
                raise _full("the proxy has no memory left for request bodies on their way")
            share.held_bytes += size
            self._arriving.held_bytes += size
        self._bytes += size

    def arrived(self, client: str, share: _Share, size: int) -> None:
        share.uploads -= 1
        share.held_bytes -= size
        self._arriving.uploads -= 1
        self._arriving.held_bytes -= size
        if not share.uploads:
            del self._clients[client]

    def free(self, size: int) -> None:
        self._bytes -= size


class HeldBody:
    """The place of one body. Made by ``HeldBodies.hold``."""

    __slots__ = ("_bodies", "_client", "_share", "_size")

    def __init__(self, bodies: HeldBodies) -> None:
        self._bodies = bodies
        self._client = ""
        self._share: _Share | None = None
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.arrived()
        size, self._size = self._size, 0
        self._bodies.free(size)

    def arrive(self, client: str) -> None:
        """It has to be waited for; ``client`` sends it. Raises TooManyRequests and Unavailable."""
        self._share = self._bodies.arrive(client)
        self._client = client

    def add(self, size: int) -> None:
        """So many bytes of it have come. Raises TooManyRequests and Unavailable."""
        self._bodies.add(size, self._share)
        self._size += size

    def arrived(self) -> None:
        """All of it is there, or nothing more will come. Only the first call after ``arrive`` counts."""
        share, self._share = self._share, None
        if share is not None:
            self._bodies.arrived(self._client, share, self._size)


def client_of(caller: str, address: str) -> str:
    """Whose a body is: of the key's owner where there are keys, and else of the address.

    A home or a host has a /64 of IPv6 addresses: they are one client.
    """
    if caller:
        return caller
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.IPv6Network((ip, 64), strict=False))
    return address


def _client_has_its_share(what: str) -> RequestError:
    message = f"this client has {what} on their way, as many as it may"
    return TooManyRequests(message, code="too_many_uploads", retry_after_s=1)


def _full(message: str) -> RequestError:
    return Unavailable(message, code="too_many_uploads", retry_after_s=1)
