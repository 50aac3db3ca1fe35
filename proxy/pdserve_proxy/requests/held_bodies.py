"""The memory that request bodies take, and how many are on their way. Sans-IO: counts, and says who is turned away.

    hold ──▶ arrive ──▶ add … ──▶ arrived ──▶ close      a body that has to be waited for
    hold ──▶ add ──────────────────────────▶ close      one that came together with its request's head

Bodies that arrive are bounded apart from all others, and those of one client apart from other clients': whoever sends
slowly, or stops in the middle, takes nobody's place but those of more bodies like it. Memory is refused to large bodies
only: the small ones are bounded by the number of requests, and no number of large ones keeps an ordinary request out.
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
    """Of all large bodies. Those that arrive have half of it, and one client's too."""
    body_bytes: int
    """The largest body. One such may always arrive, whatever the shares come to."""
    small_bytes: int = 64 * 1024
    """Above it a body is large."""


@dataclass(slots=True)
class _Share:
    """What one client has here."""

    uploads: int = 0
    arriving_bytes: int = 0
    large_bytes: int = 0


class HeldBodies:
    """Of one proxy process."""

    def __init__(self, limits: BodyLimits) -> None:
        memory = max(limits.memory_bytes, 2 * limits.body_bytes)
        half = memory // 2
        self.small_bytes = limits.small_bytes
        self._max = _Share(limits.uploads, half, memory)
        self._max_of_client = _Share(-(-limits.uploads // CLIENTS), max(half // CLIENTS, limits.body_bytes), half)
        self._all = _Share()
        self._clients: dict[str, _Share] = {}

    @property
    def large_bytes(self) -> int:
        """What large bodies take."""
        return self._all.large_bytes

    @property
    def arriving(self) -> int:
        """How many bodies are on their way."""
        return self._all.uploads

    def hold(self, caller: str, address: str) -> HeldBody:
        """One more body, of which nothing has come. It is a context manager, and closed at the end of that."""
        return HeldBody(self, caller, address)

    # ------------------------------------------------------------------ a body's side

    def arrive(self, client: str) -> None:
        share = self._clients.get(client) or _Share()
        if share.uploads >= self._max_of_client.uploads:
            raise _client_has_its_share(f"{self._max_of_client.uploads} request bodies on their way")
        if self._all.uploads >= self._max.uploads:
            raise _full("the proxy has all the request bodies on their way that it waits for")
        self._clients[client] = share
        for one in (share, self._all):
            one.uploads += 1

    def add(self, client: str, size: int, *, arriving: bool) -> None:
        """``size`` bytes of a large body."""
        share = self._clients.get(client) or _Share()
        limit = self._max_of_client
        if share.large_bytes + size > limit.large_bytes:
            raise _client_has_its_share(f"{limit.large_bytes} bytes of request bodies")
        if arriving and share.arriving_bytes + size > limit.arriving_bytes:
            raise _client_has_its_share(f"{limit.arriving_bytes} bytes of request bodies on their way")
        if self._all.large_bytes + size > self._max.large_bytes:
            raise _full("the proxy has no memory left for large request bodies")
        if arriving and self._all.arriving_bytes + size > self._max.arriving_bytes:
            raise _full("the proxy has no memory left for large request bodies on their way")
        self._clients[client] = share
        for one in (share, self._all):
            one.large_bytes += size
            one.arriving_bytes += size if arriving else 0

    def arrived(self, client: str, size: int) -> None:
        share = self._clients[client]
        for one in (share, self._all):
            one.uploads -= 1
            one.arriving_bytes -= size
        self._forget(client, share)

    def free(self, client: str, size: int) -> None:
        share = self._clients[client]
        for one in (share, self._all):
            one.large_bytes -= size
        self._forget(client, share)

    def _forget(self, client: str, share: _Share) -> None:
        if not share.uploads and not share.large_bytes:
            del self._clients[client]


class HeldBody:
    """The place of one body. Made by ``HeldBodies.hold``."""

    __slots__ = ("_address", "_arriving", "_bodies", "_caller", "_counted", "_size")

    def __init__(self, bodies: HeldBodies, caller: str, address: str) -> None:
        self._bodies = bodies
        self._caller = caller
        self._address = address
        self._arriving = False
        self._size = 0
        self._counted = 0
        """Of its size: all of it once it is large, and nothing before."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.arrived()
        if self._counted:
            counted, self._counted = self._counted, 0
            self._bodies.free(self._client, counted)

    @property
    def _client(self) -> str:
        return client_of(self._caller, self._address)

    def arrive(self) -> None:
        """It has to be waited for. To be called before ``add``. Raises TooManyRequests and Unavailable."""
        self._bodies.arrive(self._client)
        self._arriving = True

    def add(self, size: int) -> None:
        """So many bytes of it have come. Raises TooManyRequests and Unavailable."""
        self._size += size
        if self._size > self._bodies.small_bytes:
            self._bodies.add(self._client, self._size - self._counted, arriving=self._arriving)
            self._counted = self._size

    def arrived(self) -> None:
        """All of it is there, or nothing more will come. Only the first call after ``arrive`` counts."""
        if self._arriving:
            self._arriving = False
            self._bodies.arrived(self._client, self._counted)


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
    message = f"this client would have more than {what}, which is its share"
    return TooManyRequests(message, code="too_many_uploads", retry_after_s=1)


def _full(message: str) -> RequestError:
    return Unavailable(message, code="too_many_uploads", retry_after_s=1)
