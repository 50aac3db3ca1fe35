"""Knows what a request has cost: the nodes that were lost with it, and the requests with which two nodes were lost.

A decode node returns a request whose prefill node it cannot reach any more. It knows only that its link is gone, and
the prefill node may live on: ``judge_returned`` asks that one. A request with which two nodes were lost may be what
killed them, and its client asks again. Without ``Suspects`` each try would take two more nodes along.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pdserve.errors import BadUpstream, InvalidRequest, Unavailable
from pdserve.http.errors import ENGINE_GONE_HEADER
from pdserve.patience import PatientTimeout
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.ids import new_id
from pdserve.wire.proxy_workers import SuspectedRequest
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.upstream.node_connection import NodeLost
from pdserve_proxy.upstream.node_pool import NodePool

log = logging.getLogger(__name__)

MAX_LOSSES = 2
"""The nodes that may be lost with one request: the request may be what kills them."""
MAX_SUSPECTS = 1024
"""The oldest one is forgotten for a new one."""
HEALTH_PATH = "/health"
LOOKS = 4
BETWEEN_LOOKS_S = 0.25
"""A node's API may outlive its engine, and an engine one of its ranks, and answers until it notices."""
LOOK_S = 1.0
"""A node that does not answer for so long counts as lost."""
MAX_REASON_CHARS = 512


@dataclass(frozen=True, slots=True)
class LostNode:
    """A prefill node that is lost with a request. If nobody says which one, it has no name and counts by itself."""

    boot_id: bytes
    name: str = ""


@dataclass(frozen=True, slots=True)
class ReturnedRequest:
    """A request that a decode node has returned."""

    why: str
    lost: tuple[LostNode, ...]
    """The prefill nodes that are lost. If there is none, only the link to one broke."""
    unlinked: frozenset[bytes] = frozenset()
    """The boot ids of prefill nodes that live, and to which the link broke."""


class _ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    param: str | None = None


class _NodeError(msgspec.Struct, frozen=True):
    error: _ErrorDetail


async def judge_returned(
    answer: bytes | None, prefill: Sequence[NodeInfo], registry: RegistryView, pool: NodePool
) -> ReturnedRequest:
    """Returns what ``answer`` says, and whether the node that it names is lost.

    ``prefill`` are the prefill nodes that the decode node could choose from. An answer in a form that names none is
    about any of them. Where nobody can be asked, a node counts as lost: the request may be what killed it.
    """
    try:
        error = msgspec.json.decode(answer or b"", type=_NodeError).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = _ErrorDetail("a prefill node was lost with this request")
    meant = [node for node in prefill if error.param in (None, node.name)]
    alive = await asyncio.gather(*(_lives(node, registry, pool) for node in meant))
    lost = tuple(LostNode(node.boot_id, node.name) for node, lives in zip(meant, alive, strict=True) if not lives)
    unlinked = frozenset() if lost else frozenset(node.boot_id for node in meant)
    return ReturnedRequest(error.message[:MAX_REASON_CHARS], lost if meant else (LostNode(new_id()),), unlinked)


async def _lives(node: NodeInfo, registry: RegistryView, pool: NodePool) -> bool:
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(BETWEEN_LOOKS_S)
        # A node that was started again may answer at the old one's address.
        if registry.load(node.boot_id) is None or not await _answers(node, pool):
            return False
    return True


async def _answers(node: NodeInfo, pool: NodePool) -> bool:
    try:
        async with PatientTimeout(LOOK_S):
            response = await pool.get(node.url, HEALTH_PATH, silence_s=LOOK_S)
    except (NodeLost, Unavailable, TimeoutError):
        return False
    response.close()
    return response.status < 500 and ENGINE_GONE_HEADER not in response.headers


class Suspects:
    """The suspects of a proxy, as one process knows them. A request is known by its path and the bytes of its body."""

    def __init__(self, refused_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """With ``refused_s`` 0, no request is remembered."""
        self._refused_s = refused_s
        self._clock = clock
        self._suspects: dict[bytes, SuspectedRequest] = {}
        self._sizes: set[int] = set()
        """The sizes of their bodies: no other body needs a look."""
        self.share: Callable[[SuspectedRequest], None] = lambda _: None
        """Tells the proxy's other processes of one that was found here."""

    def add(self, path: str, body: bytes, request_id: str, losses: Sequence[str], client: bytes = b"") -> BadUpstream:
        """Remembers a request with which two nodes were lost, and returns the error for its client.

        ``losses`` says how each was lost. ``client`` stands for the client, who alone may hear of the request's id.
        """
        how = "; ".join(losses)
        lost = f"{len(losses)} nodes were lost with this request, {request_id}: {how}"
        refused = f"; its like is refused for {self._refused_s:g} s" if self._refused_s else ""
        error = BadUpstream(lost + refused, code="upstream_lost")
        if self._refused_s:
            until_s = self._clock() + self._refused_s
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

    def refused(self) -> tuple[SuspectedRequest, ...]:
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
