"""Node ↔ proxy: who is there. Sealed frames (see ``frame``), node DEALER to proxy ROUTER.

A node does not know who listens at the address that it was given, so it begins with ``NodeHello``, which asks for
nothing but the proxy's boot id. ``ProxyWelcome`` brings it: all that follows is sealed for that boot of that proxy, and
good at no other. Then the node sends ``Register``, and ``NodeHeartbeat`` every interval; the proxy answers each with
``Ack``. ``known=False`` tells a node that this proxy has not got (or has dropped) its registration: it greets again.
``Deregister`` is a clean goodbye. What a proxy cannot accept, it answers with ``ProxyRefusal`` and why.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from pdserve.wire.frame import Reason
from pdserve.wire.ids import BootId
from pdserve.wire.version import RELEASED_0_1, since

Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Role(enum.Enum):
    """What a node does. ``MIXED`` prefills and decodes in one engine, without a transfer."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Capacity(msgspec.Struct, frozen=True):
    """What a node could hold at most."""

    max_running: Count
    num_blocks: Count
    block_size: Count
    max_model_len: Count


class NodeLoad(msgspec.Struct, frozen=True):
    """How busy a node is. All zeros until its first heartbeat."""

    running: Count = 0
    waiting: Count = 0
    free_blocks: Count = 0
    """Idle blocks of the prefix cache count as free."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One running node, as it describes itself."""

    name: Text
    """For people: log lines, ``/instances``."""
    boot_id: BootId
    role: Role
    url: Text
    """``http://host:port`` of its API."""
    control: Text
    """``tcp://host:port`` where a prefill engine takes transfer requests; empty for other roles."""
    model: Text
    """The name that clients ask for."""
    fingerprint: Text
    """Of model configuration, weights, dtype and KV layout. Nodes pair only when it is equal."""
    capacity: Capacity
    protocol: Annotated[int, since(6)] = RELEASED_0_1
    """The newest version of the protocol that it speaks."""
    oldest_protocol: Annotated[int, since(6)] = RELEASED_0_1
    """The oldest one that it still speaks."""


class NodeHello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    """Who are you? Changes nothing at the proxy."""

    boot_id: BootId
    nonce: Nonce
    """Random, and new in every ``NodeHello``: the answer to another one is not the answer to this."""
    protocol: int
    oldest_protocol: int


class Register(msgspec.Struct, frozen=True, tag_field="kind", tag="register"):
    node: NodeInfo


class NodeHeartbeat(msgspec.Struct, frozen=True, tag_field="kind", tag="heartbeat"):
    boot_id: BootId
    load: NodeLoad


class Deregister(msgspec.Struct, frozen=True, tag_field="kind", tag="deregister"):
    boot_id: BootId


class Ack(msgspec.Struct, frozen=True, tag_field="kind", tag="ack"):
    boot_id: BootId
    known: bool


class ProxyWelcome(msgspec.Struct, frozen=True, tag_field="kind", tag="welcome"):
    """The answer to ``NodeHello``. Who sealed it is whom further messages are for."""

    boot_id: BootId
    """Of the node."""
    nonce: Nonce
    """Of the ``NodeHello``."""
    protocol: int
    oldest_protocol: int
    heartbeat_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
    """How often this proxy wants to hear of the node."""


class ProxyRefusal(msgspec.Struct, frozen=True, tag_field="kind", tag="refused"):
    """A greeting or registration that this proxy cannot accept, however often it is repeated."""

    boot_id: BootId
    """Of the node."""
    reason: Reason


ToProxy: TypeAlias = NodeHello | Register | NodeHeartbeat | Deregister
FromProxy: TypeAlias = Ack | ProxyWelcome | ProxyRefusal
