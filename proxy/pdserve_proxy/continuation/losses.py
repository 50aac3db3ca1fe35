"""Remembers the requests with which two nodes were lost: such a request may be what killed them.

A client that gets an error asks again, and so does the code around it. Without this list each try would take two more
nodes along.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from pdserve.errors import BadUpstream, InvalidRequest
from pdserve.wire.proxy_workers import SuspectedRequest

log = logging.getLogger(__name__)

MAX_LOSSES = 2
"""The nodes that may be lost with one request: the request may be what kills them."""
MAX_SUSPECTS = 1024
"""The one that is oldest makes room for a new one."""


class Suspects:
    """The suspects of a proxy, as one process knows them. A request is known by its path and the bytes of its body."""

    def __init__(self, kept_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """With ``kept_s`` 0, no request is remembered."""
        self._kept_s = kept_s
        self._clock = clock
        self._suspects: dict[bytes, SuspectedRequest] = {}
        self._sizes: set[int] = set()
        """The sizes of their bodies: no other body needs a look."""
        self.share: Callable[[SuspectedRequest], None] = lambda _: None
        """Tells the proxy's other processes of one that was found here."""

    def add(self, path: str, body: bytes, request_id: str, losses: Sequence[str], client: bytes = b"") -> BadUpstream:
        """Remembers a request with which two nodes were lost, and returns what its client is told.

        ``losses`` says how each was lost. ``client`` stands for the client, who alone may hear of the request's id.
        """
        how = "; ".join(losses)
        told = f"{len(losses)} nodes were lost with this request, {request_id}: {how}"
        refused = f"; its like is refused for {self._kept_s:g} s" if self._kept_s else ""
        error = BadUpstream(told + refused, code="upstream_lost")
        if self._kept_s:
            until_s = self._clock() + self._kept_s
            found = SuspectedRequest(_fingerprint(path, body), len(body), request_id, client, how, until_s)
            self.take([found])
            self.share(found)
            log.warning("request_id=%s: nodes were lost with it: %s; its like is refused", request_id, how)
        return error

    def take(self, found: Iterable[SuspectedRequest]) -> None:
        """Remembers what this process or another one has found."""
        for suspect in found:
            self._suspects.pop(suspect.fingerprint, None)
            self._suspects[suspect.fingerprint] = suspect
        while len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._note_sizes()

    def kept(self) -> tuple[SuspectedRequest, ...]:
        """Returns those that are refused now."""
        now_s = self._clock()
        return tuple(suspect for suspect in self._suspects.values() if suspect.until_s > now_s)

    def check(self, path: str, body: bytes, client: bytes = b"") -> None:
        """Raises InvalidRequest for a request that is remembered. It costs nothing as long as none has its size."""
        if len(body) not in self._sizes:
            return
        fingerprint = _fingerprint(path, body)
        suspect = self._suspects.get(fingerprint)
        if suspect is None:
            return
        left_s = suspect.until_s - self._clock()
        if left_s <= 0:
            del self._suspects[fingerprint]
            self._note_sizes()
            return
        which, how = "a request that", ""
        if client == suspect.client:
            which, how = f"the request {suspect.request_id}, which", f": {suspect.losses}"
        log.info(
            "a request is refused that is the same as request_id=%s, with which nodes were lost", suspect.request_id
        )
        raise InvalidRequest(
            f"nodes were lost with {which} was the same as this one; it is refused for another {left_s:.0f} s, "
            f"because it may be what they died of{how}",
            code="suspected_request",
        )

    def _note_sizes(self) -> None:
        self._sizes = {suspect.size for suspect in self._suspects.values()}


def _fingerprint(path: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[:16]).digest()
