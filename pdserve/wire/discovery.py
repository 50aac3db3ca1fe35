"""Node ↔ proxy: who is there. Sealed frames (see ``frame``), node DEALER to proxy ROUTER.

A node sends ``Register``, then ``Heartbeat`` every interval; the proxy answers each with ``Ack``. ``known=False``
tells a node that this proxy has not got (or has dropped) its registration: it registers again. ``Deregister`` is a
clean goodbye.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from pdserve.wire.ids import BootId

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


class Role(enum.Enum):
    """What a node does. ``MIXED`` prefills and decodes in one engine, without a transfer."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node could hold at most."""

    max_running: int
    num_blocks: int
    block_size: int
    max_model_len: int


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node holds now."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0


class NodeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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


class Register(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="register"):
    node: NodeInfo


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="heartbeat"):
    boot_id: BootId
    load: Load


class Deregister(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="deregister"):
    boot_id: BootId


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ack"):
    boot_id: BootId
    known: bool


ToProxy: TypeAlias = Register | Heartbeat | Deregister
