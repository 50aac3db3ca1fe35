"""What the two sides have in common.

``LocalEngine`` is this engine as both sides know it, and has their ``SideSettings``. A ``TransferCommand`` is what
the engine wants of a side, and ``Side`` is the interface through which the transfer thread drives both. ``Lease`` and
``PingTimer`` tell whether another engine is alive; callers pass times, in seconds of ``time.monotonic()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import zmq

from pdserve.control.frame import Sealer, Secrets
from pdserve.wire.cache_groups import moved_blocks
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import CachedRequest, EngineSpec, FailureCause, PrefillLoad, PrefillRequest
from pdserve_kvtransfer.events import CachedFetchOrder, EventQueue, FetchOrder, TransferStats
from pdserve_kvtransfer.pieces import heads_of
from pdserve_kvtransfer.ranks import RankChannels
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.transport import Transport

_DRAIN_LEASES = 3
_GREETING_LEASES = 10


@dataclass(frozen=True, slots=True)
class SideSettings:
    """How long a peer is given, what is checked, and where other engines reach this one."""

    lease_ms: int
    heartbeat_ms: int
    checksums: bool
    """Whether the engine checks every block that it receives."""
    host: str = "127.0.0.1"
    """The address that the engine binds its control channel to."""
    port: int = 0
    """The port of that channel; 0 takes a free one."""
    advertise: str = ""
    """The host name or address that other engines reach it by; the bound one if empty."""

    @property
    def lease_s(self) -> float:
        """How long a peer may be silent while a transfer with it is alive."""
        return self.lease_ms / 1000

    @property
    def drain_s(self) -> float:
        """How long a peer that is alive may move nothing while blocks of ended transfers are still in use."""
        return _DRAIN_LEASES * self.lease_s

    @property
    def greeting_s(self) -> float:
        """How long a peer that is alive may leave a greeting without an answer: all its ranks have to open a link."""
        return _GREETING_LEASES * self.lease_s

    @property
    def heartbeat_s(self) -> float:
        """How often the engine pings another one while a fetch from that one is alive."""
        return self.heartbeat_ms / 1000


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """This engine, as both sides know it. All but the event queue belong to the transfer thread."""

    boot_id: bytes
    secret: bytes | Secrets
    spec: EngineSpec
    region: KvRegion
    settings: SideSettings
    transport: Transport
    zmq_context: zmq.Context[zmq.Socket[bytes]]
    sealer: Sealer
    ranks: RankChannels
    event_queue: EventQueue
    stats: TransferStats
    load: Callable[[], PrefillLoad]
    """Returns the load that this engine told last."""
    max_prompt_tokens: int
    """The longest prompt that this engine takes; 0 if other engines are not told."""
    reports_sent: bool
    """Whether this engine gets ``BlocksSent``."""

    def block_bytes(self, group: int) -> int:
        """Returns the bytes of a block of this group on all ranks together, with each head counted once."""
        heads = self.spec.group_heads[group]
        return self.region.group_bytes(group) // len(heads_of(0, self.spec.tp_size, heads)) * max(1, heads)


def wanted_groups(spec: EngineSpec, asked: FetchOrder | CachedFetchOrder | PrefillRequest | CachedRequest) -> bytes:
    """Returns the group of each block that is wanted, in order. There are none if the first one makes no sense."""
    match asked:
        case FetchOrder() | PrefillRequest():
            first_block, tokens = asked.first_block, len(asked.token_ids)
        case CachedFetchOrder() | CachedRequest():
            first_block, tokens = 0, len(asked.hashes) * spec.block_size
    if first_block * spec.block_size >= tokens:
        return b""
    if not spec.groups:
        return bytes(-(-tokens // spec.block_size) - first_block)
    moved = moved_blocks(spec.groups, spec.block_size, first_block, tokens)
    return bytes(block.group for block in moved)


@dataclass(frozen=True, slots=True)
class AcceptBlocks:
    """Lets the next blocks of a paced fetch land in these local blocks."""

    transfer_id: TransferId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Ends a fetch that the engine does not want any more."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class OfferBlocks:
    """Tells ``target`` that this engine has the blocks with these hashes."""

    target: PrefillTarget
    hashes: tuple[bytes, ...]
    request_id: str


@dataclass(frozen=True, slots=True)
class MeetPeers:
    """Makes these engines peers before any fetch. It takes the place of the last one, and ends with ``PeersMet``."""

    number: int
    targets: tuple[PrefillTarget, ...]


@dataclass(frozen=True, slots=True)
class PushBlocks:
    """Sends these final blocks of a push, which are the prompt's from ``first_block`` on."""

    transfer_id: TransferId
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveFirstToken:
    """Tells the decode engine the first token of a push, whose blocks have all been given."""

    transfer_id: TransferId
    tokens: tuple[SampledToken, ...]
    cached_tokens: int
    load: PrefillLoad
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class GiveHeld:
    """Tells the asker how many of the blocks that it asked for are sent, which have all been given."""

    transfer_id: TransferId
    count: int
    usable: int = 0
    """As in ``Held``."""


@dataclass(frozen=True, slots=True)
class FailPush:
    """Refuses a push or gives it up."""

    transfer_id: TransferId
    reason: str
    cause: FailureCause


FetchCommand: TypeAlias = FetchOrder | CachedFetchOrder | AcceptBlocks | CancelFetch | OfferBlocks | MeetPeers
PushCommand: TypeAlias = PushBlocks | GiveFirstToken | GiveHeld | FailPush
TransferCommand: TypeAlias = FetchCommand | PushCommand

Pollable: TypeAlias = zmq.Socket[bytes] | int


class Side(Protocol):
    """All fetches of one engine, or all its pushes, or both together.

    The transfer thread alone uses it; times are ``time.monotonic()``.
    """

    def handle(self, command: TransferCommand, now: float) -> None:
        """Carries out a command of the engine."""

    def turn(self, now: float) -> bool:
        """Reads what has arrived and lets data move, without waiting. Returns whether there may be more at once."""

    def tick(self, now: float) -> None:
        """Acts on every timer that is due."""

    def renew_leases(self, now: float) -> None:
        """Starts every lease anew. This process was stopped for a while, so silence so far says nothing about peers."""

    def next_timer(self) -> float | None:
        """Returns when ``tick`` must be called at the latest."""

    def moving(self) -> bool:
        """Returns whether blocks are in flight."""

    def arm(self) -> bool:
        """Must be called before waiting. Returns False if there is news already."""

    def pollables(self) -> list[Pollable]:
        """Returns what becomes readable when there is news."""

    def close(self, linger_s: float) -> None:
        """Ends everything and tells the peers. Idempotent."""


def earliest(times: Iterable[float | None]) -> float | None:
    """Returns the earliest of the times that are not None, if there is one."""
    return min((time for time in times if time is not None), default=None)


class Lease:
    """A lease that runs out ``duration_s`` after its last renewal while it is held. One that is not held never does."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._extended_s = 0.0
        """By how much it was extended since the last renewal."""
        self.until: float | None = None
        """When it runs out. None while it is not held."""

    def hold(self, now: float) -> None:
        """Starts it, unless it is running."""
        if self.until is None:
            self.until, self._extended_s = now + self._duration_s, 0.0

    def renew(self, now: float) -> None:
        """Starts it anew, because the other side was heard."""
        if self.until is not None:
            self.until, self._extended_s = now + self._duration_s, 0.0

    def extend(self, blocked_s: float) -> None:
        """Extends it by the time in which the other side could not be heard.

        At most one duration is added between two renewals. By then the other side has given up as well, because it was
        not answered.
        """
        if self.until is not None:
            granted = min(blocked_s, self._duration_s - self._extended_s)
            self.until += granted
            self._extended_s += granted

    def shorten(self, until: float) -> None:
        """Makes it run out at ``until`` if it is not renewed, because the other side may be gone."""
        if self.until is not None:
            self.until = min(self.until, until)

    def release(self) -> None:
        self.until = None

    def expired_while(self, busy: bool, now: float) -> bool:
        """Holds it while ``busy``, and releases it otherwise. Returns whether it has run out."""
        if busy:
            self.hold(now)
        else:
            self.release()
        return self.expired(now)

    def expired(self, now: float) -> bool:
        return self.until is not None and now >= self.until


_SHORTEST_INTERVAL_S = 0.01
"""The shortest interval that the settings allow. A peer that asks for more pings does not get them."""


class PingTimer:
    """A timer of pings that are due every ``interval_s`` while it runs."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.next: float | None = None

    def keep(self, lease_s: float, now: float) -> None:
        """Makes at least two pings due in the other side's lease, as far as ``_SHORTEST_INTERVAL_S`` allows."""
        self._interval_s = min(self._interval_s, max(lease_s / 2, _SHORTEST_INTERVAL_S))
        if self.next is not None:
            self.next = min(self.next, now + self._interval_s)

    def run(self, now: float) -> None:
        """Starts it, unless it is running."""
        if self.next is None:
            self.next = now + self._interval_s

    def stop(self) -> None:
        self.next = None

    def due(self, now: float) -> bool:
        """Returns whether a ping is due now. If so, the next one is due after an interval."""
        if self.next is None or now < self.next:
            return False
        self.next = now + self._interval_s
        return True
