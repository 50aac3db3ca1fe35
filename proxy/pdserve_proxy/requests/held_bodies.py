"""Bounds the memory that request bodies take and the number of bodies that are on their way, without any I/O.

    hold ──▶ arrive ──▶ add … ──▶ arrived ──▶ exit      a body that the proxy has to wait for
    hold ──▶ add ──────────────────────────▶ exit      a body that came together with its request's head

Bodies on their way have bounds of their own, and so have the bodies of each client: a client that sends slowly, or
stops in the middle, takes only places of other bodies like its own. Only large bodies can be refused for memory: the
number of requests bounds the small ones, and no number of large bodies keeps an ordinary request out.

A stored response that a client reads counts among its bodies. It may be larger than any body, so a client that holds
nothing gets its first one whatever the size, unless other clients have what memory there is.

A client is the owner of an API key, or an address where there are no keys (``client_of``). The admission queue counts
by caller instead: the owner of a key alone.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pdserve.errors import RequestError, TooManyRequests, Unavailable
from pdserve.http.request import BodyBounds

SHARES = 4
"""The number of clients that have to fill their shares before other clients' bodies are refused."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    uploads: int
    """The number of bodies that may be on their way at once."""
    memory_bytes: int
    """The memory for all large bodies. Those on their way may take half of it, and so may those of one client."""
    body_bytes: int
    """The size of the largest body. One of that size may always arrive, however small the shares are."""
    small_bytes: int = 64 * 1024
    """A body above this size is large."""


@dataclass(slots=True)
class BodyCounts:
    """The bodies of one client or of all clients, or the limits of either."""

    uploads: int = 0
    arriving_bytes: int = 0
    large_bytes: int = 0


class HeldBodies:
    """The request bodies that one proxy process holds."""

    def __init__(self, limits: BodyLimits) -> None:
        memory = max(limits.memory_bytes, 2 * limits.body_bytes)
        half = memory // 2
        self.small_bytes = limits.small_bytes
        self._max = BodyCounts(limits.uploads, half, memory)
        self._max_of_client = BodyCounts(-(-limits.uploads // SHARES), max(half // SHARES, limits.body_bytes), half)
        self.total = BodyCounts()
        self._clients: dict[str, BodyCounts] = {}

    def hold(self, caller: str, address: str) -> HeldBody:
        """Returns a new body, of which nothing has come yet: a context manager that frees the body at its exit."""
        return HeldBody(self, caller, address)

    # ------------------------------------------------------------------ a body's side

    def arrive(self, client: str) -> None:
        share = self._clients.get(client) or BodyCounts()
        if share.uploads >= self._max_of_client.uploads:
            raise _client_has_its_share(f"{self._max_of_client.uploads} request bodies on their way")
        if self.total.uploads >= self._max.uploads:
            raise _full("the proxy has all the request bodies on their way that it waits for")
        self._clients[client] = share
        for one in (share, self.total):
            one.uploads += 1

    def add(self, client: str, size: int, *, arriving: bool) -> None:
        """Counts ``size`` more bytes of a large body."""
        share = self._clients.get(client) or BodyCounts()
        limit = self._max_of_client
        if share.large_bytes + size > limit.large_bytes:
            raise _client_has_its_share(f"{limit.large_bytes} bytes of request bodies")
        if arriving and share.arriving_bytes + size > limit.arriving_bytes:
            raise _client_has_its_share(f"{limit.arriving_bytes} bytes of request bodies on their way")
        if self.total.large_bytes + size > self._max.large_bytes:
            raise _full("the proxy has no memory left for large request bodies")
        if arriving and self.total.arriving_bytes + size > self._max.arriving_bytes:
            raise _full("the proxy has no memory left for large request bodies on their way")
        self._clients[client] = share
        for one in (share, self.total):
            one.large_bytes += size
            one.arriving_bytes += size if arriving else 0

    def add_stored(self, client: str, size: int) -> None:
        """Counts a large stored response. There is no smaller one to ask for: whoever holds nothing has to get it."""
        share = self._clients.get(client) or BodyCounts()
        limit = self._max_of_client.large_bytes
        if share.large_bytes and share.large_bytes + size > limit:
            raise _client_has_its_share(f"{limit} bytes of stored responses that it reads and of request bodies")
        if self.total.large_bytes and self.total.large_bytes + size > self._max.large_bytes:
            raise _full("the proxy has no memory left for large stored responses that clients read")
        self._clients[client] = share
        for one in (share, self.total):
            one.large_bytes += size

    def arrived(self, client: str, size: int) -> None:
        share = self._clients[client]
        for one in (share, self.total):
            one.uploads -= 1
            one.arriving_bytes -= size
        self._forget(client, share)

    def free(self, client: str, size: int) -> None:
        share = self._clients[client]
        for one in (share, self.total):
            one.large_bytes -= size
        self._forget(client, share)

    def _forget(self, client: str, share: BodyCounts) -> None:
        if not share.uploads and not share.large_bytes:
            del self._clients[client]


class HeldBody(BodyBounds):
    """One request body, made by ``HeldBodies.hold``."""

    __slots__ = ("_address", "_arriving", "_bodies", "_caller", "_counted", "_known_client", "_size")

    def __init__(self, bodies: HeldBodies, caller: str, address: str) -> None:
        self._bodies = bodies
        self._caller = caller
        self._address = address
        self._known_client: str | None = None
        self._arriving = False
        self._size = 0
        self._counted = 0
        """The bytes that ``HeldBodies`` counts: the complete size once the body is large, and none before."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._arriving:
            self.arrived()
        if self._counted:
            counted, self._counted = self._counted, 0
            self._bodies.free(self._client, counted)

    @property
    def _client(self) -> str:
        # Most bodies are small and come with the head: nothing asks for their client.
        if self._known_client is None:
            self._known_client = client_of(self._caller, self._address)
        return self._known_client

    def arrive(self) -> None:
        """Notes, before the first ``add``, that the body is on its way. Raises TooManyRequests and Unavailable."""
        self._bodies.arrive(self._client)
        self._arriving = True

    def add(self, size: int) -> None:
        """Counts ``size`` bytes that have come. Raises TooManyRequests and Unavailable."""
        self._size += size
        if self._size > self._bodies.small_bytes:
            self._bodies.add(self._client, self._size - self._counted, arriving=self._arriving)
            self._counted = self._size

    def add_stored(self, size: int) -> None:
        """Counts a stored response, instead of a body. Raises TooManyRequests and Unavailable."""
        if size > self._bodies.small_bytes:
            self._bodies.add_stored(self._client, size)
            self._counted = size

    def arrived(self) -> None:
        """Notes that nothing more will come. Only the first call after ``arrive`` has an effect."""
        if self._arriving:
            self._arriving = False
            self._bodies.arrived(self._client, self._counted)


def client_of(caller: str, address: str) -> str:
    """Returns the client that a body counts for: ``caller``, the owner of the API key, or else ``address``.

    The /64 of IPv6 addresses that a home or a host has is one client.
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
