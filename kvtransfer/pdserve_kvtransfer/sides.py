"""What the two sides have in common.

``LocalEngine`` is this engine as both know it, a ``Command`` is what the engine wants of a side, and ``Side`` is what
the transfer thread asks of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import zmq

from pdserve.config import TransferConfig
from pdserve.wire.frame import Sealer, Secrets
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.transfer import EngineSpec, FailureCause, PrefillLoad
from pdserve_kvtransfer.events import EventQueue, FetchOrder
from pdserve_kvtransfer.pieces import heads_of
from pdserve_kvtransfer.ranks import RankChannels
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.stats import TransferStats
from pdserve_kvtransfer.transport import Transport

_DRAIN_LEASES = 3


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """This engine, as both sides' drivers know it. All but the event_queue belongs to the transfer thread."""

    boot_id: bytes
    secret: bytes | Secrets
    spec: EngineSpec
    region: KvRegion
    config: TransferConfig
    transport: Transport
    zmq_context: zmq.Context[zmq.Socket[bytes]]
    sealer: Sealer
    ranks: RankChannels
    event_queue: EventQueue
    stats: TransferStats
    load: Callable[[], PrefillLoad]
    """Of a prefill engine, as it has said last."""
    max_prompt_tokens: int
    """That a prefill engine takes; 0 if nobody is told."""
    reports_sent: bool
    """Whether a prefill engine hears which blocks of a push that goes on have left."""

    @property
    def lease_s(self) -> float:
        return self.config.lease_ms / 1000

    @property
    def drain_s(self) -> float:
        """How long a peer that is alive may move nothing while it keeps blocks of transfers that have ended."""
        return _DRAIN_LEASES * self.lease_s

    @property
    def heartbeat_s(self) -> float:
        return self.config.heartbeat_ms / 1000

    @property
    def block_bytes(self) -> int:
        """Of one block on all ranks together, each KV head counted once."""
        head_bytes = self.region.block_bytes // len(heads_of(0, self.spec.tp_size, self.spec.kv_heads))
        return head_bytes * self.spec.kv_heads


@dataclass(frozen=True, slots=True)
class AcceptBlocks:
    transfer_id: TransferId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelFetch:
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class PushBlocks:
    transfer_id: TransferId
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveFirstToken:
    transfer_id: TransferId
    tokens: tuple[SampledToken, ...]
    cached_tokens: int
    load: PrefillLoad


@dataclass(frozen=True, slots=True)
class FailPush:
    transfer_id: TransferId
    reason: str
    cause: FailureCause


Command: TypeAlias = FetchOrder | AcceptBlocks | CancelFetch | PushBlocks | GiveFirstToken | FailPush

Pollable: TypeAlias = zmq.Socket[bytes] | int


class Side(Protocol):
    """The driver of one role. Lives in the transfer thread; times are ``time.monotonic()``."""

    def handle(self, command: Command, now: float) -> None:
        """The engine wants something."""

    def turn(self, now: float) -> bool:
        """Read what has arrived and let data move, without waiting. True if there may be more at once."""

    def tick(self, now: float) -> None:
        """Act on every timer that is due."""

    def renew_leases(self, now: float) -> None:
        """This process itself was stopped for a while: silence until now says nothing about others."""

    def next_timer(self) -> float | None:
        """When to call ``tick`` at the latest."""

    def moving(self) -> bool:
        """Whether blocks are in flight."""

    def arm(self) -> bool:
        """Before waiting: False if there is news already."""

    def pollables(self) -> list[Pollable]:
        """What becomes readable when there is news."""

    def close(self, linger_s: float) -> None:
        """End everything, and tell the peers. Idempotent."""


def earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)
