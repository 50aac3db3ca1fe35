"""Tells whether a request that a decode node gives back has really cost a prefill node.

The decode node only knows that its link to the prefill node is gone. The prefill node itself may live on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdserve.errors import Unavailable
from pdserve.http.errors import ENGINE_GONE_HEADER
from pdserve.patience import PatientTimeout
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.ids import new_id
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.upstream.node_connection import NodeLost
from pdserve_proxy.upstream.node_pool import NodePool

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
class GivenBack:
    """A request that a decode node gives back."""

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


async def judge(answer: bytes | None, prefill: Sequence[NodeInfo], registry: RegistryView, pool: NodePool) -> GivenBack:
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
    return GivenBack(error.message[:MAX_REASON_CHARS], lost if meant else (LostNode(new_id()),), unlinked)


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
