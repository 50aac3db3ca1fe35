"""Remembers the requests with which two nodes were lost: such a request may be what killed them.

A client that gets an error asks again, and so does the code around it. Without this list each try would take two more
nodes along.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdserve.errors import BadUpstream, InvalidRequest

log = logging.getLogger(__name__)

MAX_LOSSES = 2
"""The nodes that may be lost with one request: the request may be what kills them."""
MAX_REASON_CHARS = 512
MAX_SUSPECTS = 1024
"""The one that is oldest makes room for a new one."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A request that is not served again for a while."""

    request_id: str
    until_s: float
    losses: str
    """What is known of how the nodes were lost."""


class Suspects:
    """The suspects of one proxy process. A request is known by its path and the bytes of its body."""

    def __init__(self, kept_s: float, clock: Callable[[], float]) -> None:
        """With ``kept_s`` 0, no request is remembered."""
        self._kept_s = kept_s
        self._clock = clock
        self._suspects: dict[bytes, Suspect] = {}

    def add(self, path: str, body: bytes, request_id: str, losses: str) -> BadUpstream:
        """Remembers a request with which two nodes were lost, and returns what its client is told.

        ``losses`` says how they were lost.
        """
        told = f"two nodes were lost with this request, {request_id}: {losses}"
        refused = f"; its like is refused for {self._kept_s:g} s" if self._kept_s else ""
        error = BadUpstream(told + refused, code="upstream_lost")
        if not self._kept_s:
            return error
        while len(self._suspects) >= MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        suspect = Suspect(request_id, self._clock() + self._kept_s, losses)
        self._suspects[_fingerprint(path, body)] = suspect
        log.warning("request_id=%s: two nodes were lost with it: %s; its like is refused", request_id, losses)
        return error

    def check(self, path: str, body: bytes) -> None:
        """Raises InvalidRequest for a request that is remembered. It costs nothing as long as there is none."""
        if not self._suspects:
            return
        fingerprint = _fingerprint(path, body)
        suspect = self._suspects.get(fingerprint)
        if suspect is None:
            return
        left_s = suspect.until_s - self._clock()
        if left_s <= 0:
            del self._suspects[fingerprint]
            return
        raise InvalidRequest(
            f"two nodes were lost with the request {suspect.request_id}, which was the same as this one; it is refused "
            f"for another {left_s:.0f} s, because it may be what they died of: {suspect.losses}",
            code="suspected_request",
        )


class _ErrorDetail(msgspec.Struct, frozen=True):
    message: str


class _NodeError(msgspec.Struct, frozen=True):
    error: _ErrorDetail


def given_back(body: bytes | None) -> str:
    """Returns what a node says that gives a request back."""
    try:
        return msgspec.json.decode(body or b"", type=_NodeError).error.message[:MAX_REASON_CHARS]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "a prefill node was lost with this request"


def _fingerprint(path: str, body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[:16]).digest()
