"""Node ↔ proxy: nodes register. The messages are sealed frames (see ``frame``), from node DEALER to proxy ROUTER.

A node does not know which process listens at the proxy's address, so it begins with ``NodeHello``, which asks for the
proxy's boot id alone. ``ProxyWelcome`` brings it. All messages that follow are sealed for that start of that proxy, and
no other process accepts them. Then the node sends ``Register``, and ``NodeHeartbeat`` at every interval, and at once
when its role changes. The proxy answers each with ``Ack``. ``known=False`` tells a node that this proxy does not have
its registration (any more), and the node greets again. A node that ends sends ``Deregister``. A proxy answers a message
that it cannot accept with ``ProxyRefusal``, which says why.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

from pdserve.control.frame import Reason
from pdserve.wire.cache_groups import Keep, context_blocks
from pdserve.wire.ids import BootId
from pdserve.wire.terms import PrefillTarget


class NodeSizes(msgspec.Struct, frozen=True):
    """The sizes that a node has chosen, or was given, when it started."""

    model: str
    """The name for clients."""
    format: str
    """The form of the weights: ``bfloat16``, or ``GGUF, Q4_K, Q6_K``."""
    device: str
    """``CPU, 4 cores``, or a GPU's name."""
    kernels: str
    ranks: int
    kv_mib: int
    """The KV cache of all ranks together."""
    kv_tokens: int
    context: int
    """The most tokens of a prompt and its output together."""
    places: int
    """The most requests of a step."""
    step_tokens: int

    @property
    def lines(self) -> list[str]:
        """The block that people read: a line for each thing that is worth knowing."""
        whole = self.kv_tokens // self.context if self.context else 0
        plural = "" if whole == 1 else "s"
        contexts = f"{whole:,} full context{plural} of {self.context:,}"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return [
            f"model     {self.model}",
            f"format    {self.format}",
            f"device    {self.device}, {self.kernels} kernels, {ranks}",
            f"KV cache  {self.kv_mib:,} MiB: {self.kv_tokens:,} tokens, {contexts}",
            f"steps     {self.places} places, {self.step_tokens:,} tokens",
        ]


LinkCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class TransportKind(enum.Enum):
    """How the blocks of a link travel. Each is the name of a field of ``LinkCounts``."""

    MAPPED = "mapped"
    """The receiver maps the sender's KV cache, and copies blocks out of it."""
    SHARED_MEMORY = "shared_memory"
    RDMA = "rdma"
    TCP = "tcp"
    OTHER = "other"


class LinkCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The number of links that have moved blocks and are open, by what carries their blocks."""

    mapped: LinkCount = 0
    shared_memory: LinkCount = 0
    rdma: LinkCount = 0
    tcp: LinkCount = 0
    other: LinkCount = 0

    @classmethod
    def of(cls, counts: Mapping[TransportKind, int]) -> LinkCounts:
        return cls(**{kind.value: counts.get(kind, 0) for kind in TransportKind})


Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
CoreNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

MAX_GAP_BOUNDS = 64


MAX_CACHE_GROUPS = 64


MAX_REPORTED_PROXIES = 64
"""A node names so many proxies at most."""

MAX_MET = 8
"""A node is told of so many others at most that it is to connect to before any request."""


class Role(enum.StrEnum):
    """What the proxy routes to a node. Every engine can do all of it; ``MIXED`` is both of the other roles at once."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        """Whether other nodes may have their prompts computed by a node of this role."""
        return self is not Role.DECODE

    @property
    def answers(self) -> bool:
        """Whether a node of this role answers clients' requests."""
        return self is not Role.PREFILL


class GroupCapacity(msgspec.Struct, frozen=True, omit_defaults=True):
    """The blocks of one cache group (``cache_groups``) on all ranks of a node together."""

    name: Text
    keep: Keep
    num_blocks: Count
    block_bytes: Count
    window: Count = 0
    """In tokens; 0 without a window."""


class Capacity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node could hold at most."""

    max_running: Count
    num_blocks: Count
    """Those of whole contexts, if the cache has several groups."""
    block_size: Count
    max_model_len: Count
    groups: Annotated[tuple[GroupCapacity, ...], msgspec.Meta(max_length=MAX_CACHE_GROUPS)] = ()
    """All cache groups, that of whole contexts first; none for a cache of one group."""


class GapCounts(msgspec.Struct, frozen=True):
    """How many tokens came how long after the ones before them, since the node's start."""

    bounds_s: Annotated[tuple[Seconds, ...], msgspec.Meta(max_length=MAX_GAP_BOUNDS)] = ()
    """The upper bounds of all counts but the last, in ascending order."""
    counts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_GAP_BOUNDS + 1)] = ()


class NodeLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """How busy a node is. All zeros until its first heartbeat."""

    running: Count = 0
    waiting: Count = 0
    free_blocks: Count = 0
    """Those of whole contexts. Idle blocks of the prefix cache count as free."""
    queue_s: Seconds = 0.0
    """An estimate of how long a prompt that comes now waits until it is computed."""
    step_s: Seconds = 0.0
    """How long a step that computed no prompt took lately; 0 while nothing runs."""
    prompt_tokens: Count = 0
    """The tokens of prompts that the node's engine has computed since its start, for itself and for others."""
    generated_tokens: Count = 0
    """The tokens that the node's engine has generated since its start."""
    accepted_drafts: Count = 0
    """Those of them that were guessed ahead."""
    gaps: GapCounts = GapCounts()
    """The times between the tokens that left the node."""
    links: LinkCounts = LinkCounts()
    """What carries the KV blocks between this engine and others."""
    bounded_free_blocks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_CACHE_GROUPS)] = ()
    """The free blocks of each cache group behind that of whole contexts."""


def free_share(capacity: Capacity, load: NodeLoad, contexts: Sequence[int] = ()) -> float:
    """Returns which share of its blocks is free in the cache group of a node that has least.

    It is what is left once ``contexts`` of so many tokens are there, and negative if they do not fit.
    """
    groups = [
        (Keep.ALL, 0, capacity.num_blocks),
        *((each.keep, each.window, each.num_blocks) for each in capacity.groups[1:]),
    ]
    left, size = 1.0, max(capacity.block_size, 1)
    for (keep, window, total), free in zip(groups, (load.free_blocks, *load.bounded_free_blocks), strict=False):
        taken = sum(context_blocks(keep, window, tokens, size) for tokens in contexts)
        left = min(left, (free - taken) / total if total else 0.0)
    return left


def used_share(capacity: Capacity, load: NodeLoad) -> float | None:
    """Returns which share of its blocks is in use in the cache group of a node that has least left.

    Returns None if the node has not said yet how busy it is.
    """
    if not capacity.num_blocks or load == NodeLoad():
        return None
    return min(1.0, max(0.0, 1 - free_share(capacity, load)))


class ComputeCores(msgspec.Struct, frozen=True):
    """The cores of a machine on which an engine computes."""

    machine: Text
    """The same for all engines whose machine, and start of its kernel, is the same."""
    cores: Annotated[tuple[CoreNumber, ...], msgspec.Meta(max_length=4096)]
    threads: Count
    """It uses so many of ``cores`` at a time."""


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One running node, as it describes itself."""

    name: Text
    """The name of the node for people, in log lines and in ``/instances``."""
    boot_id: BootId
    role: Role
    url: Text
    """The ``http://host:port`` of its API."""
    control: Text
    """The ``tcp://host:port`` at which the engine takes transfer requests; empty if it cannot be fetched from."""
    model: Text
    """The name of the model that clients ask for."""
    fingerprint: Text
    """A hash of the model (all that its answers depend on), dtype and KV layout. Nodes pair only if it is equal."""
    capacity: Capacity
    protocol: int
    """The newest version of the protocol that the node supports."""
    oldest_protocol: int
    """The oldest version that the node supports."""
    kernels: Text = ""
    """What the node computes with. Answers go on at a node where it is equal, if there is one; others may round
    differently."""
    version: Text = ""
    """The version of pdserve that the node runs."""
    compute: ComputeCores | None = None
    """Where its engine computes; None on a GPU."""
    answers: Text = ""
    """A hash of all settings that decide which requests the node takes and how it answers them."""
    formats: Text = ""
    """The formats of tool calls and reasoning that the node reads. Answers go on only where they are equal."""


class NodeHello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    """Asks a proxy for its boot id. It changes nothing at the proxy."""

    boot_id: BootId
    nonce: Nonce
    """A random number, new in every ``NodeHello``, so that the answer to another one is not taken for this one's."""
    protocol: int
    oldest_protocol: int


class Register(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="register"):
    node: NodeInfo
    met: bool = False
    """As in ``NodeHeartbeat``."""


class NodeHeartbeat(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="heartbeat"):
    boot_id: BootId
    load: NodeLoad
    role: Role | None = None
    """The node's present role; None if the role has not changed since the node's start."""
    draining: bool = False
    """Whether the node takes no new work, and what runs there is to go on elsewhere."""
    proxies: Annotated[tuple[BootId, ...], msgspec.Meta(max_length=MAX_REPORTED_PROXIES)] = ()
    """The boot ids of all proxies that know this node now: from these, each proxy learns how many there are."""
    met: bool = False
    """Whether the node has once connected to the nodes of a ``MeetNodes``, or has tried for long enough."""


class Deregister(msgspec.Struct, frozen=True, tag_field="kind", tag="deregister"):
    boot_id: BootId


class Ack(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="ack"):
    boot_id: BootId
    known: bool
    role: Role | None = None
    """The role by which the proxy routes now; None if the heartbeat named none."""


class MeetNodes(msgspec.Struct, frozen=True, tag_field="kind", tag="meet"):
    """The nodes that this one fetches KV blocks from, some of them if there are many: it connects to them beforehand.

    It comes before the ``Ack`` of a registration or heartbeat if they are others than before, or the node has ``met``
    none so far, and also by itself when the first of them registers.
    """

    boot_id: BootId
    """The boot id of the node."""
    nodes: Annotated[tuple[PrefillTarget, ...], msgspec.Meta(max_length=MAX_MET)]


class ProxyWelcome(msgspec.Struct, frozen=True, tag_field="kind", tag="welcome"):
    """The answer to ``NodeHello``. Further messages are for the process that sealed it."""

    boot_id: BootId
    """The boot id of the node."""
    nonce: Nonce
    """The nonce of the ``NodeHello``."""
    protocol: int
    oldest_protocol: int
    heartbeat_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)]
    """The interval at which this proxy expects heartbeats."""


class ProxyRefusal(msgspec.Struct, frozen=True, tag_field="kind", tag="refused"):
    """A greeting or registration that this proxy cannot accept, however often it is repeated."""

    boot_id: BootId
    """The boot id of the node."""
    reason: Reason


ToProxy: TypeAlias = NodeHello | Register | NodeHeartbeat | Deregister
FromProxy: TypeAlias = Ack | MeetNodes | ProxyWelcome | ProxyRefusal
