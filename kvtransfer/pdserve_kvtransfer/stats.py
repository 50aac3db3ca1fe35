"""Counters of one transfer thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve_kvtransfer.events import FailureKind


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Totals since the start, except ``quarantined_blocks``, which is now."""

    transfers_sent: int = 0
    transfers_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    transfer_seconds: float = 0.0
    """From order to landing, summed over the transfers received."""
    failures: Mapping[FailureKind, int] = field(default_factory=dict)
    handshakes: int = 0
    leases_expired: int = 0
    stale_blocks_dropped: int = 0
    """Blocks that arrived for no live transfer, out of range, twice, or with the wrong size."""
    frames_dropped: int = 0
    """Control frames that were malformed or not authentic."""
    quarantined_blocks: int = 0


@dataclass(slots=True)
class Counters:
    """The same, as the transfer thread counts them."""

    transfers_sent: int = 0
    transfers_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    transfer_seconds: float = 0.0
    failures: Counter[FailureKind] = field(default_factory=Counter)
    handshakes: int = 0
    leases_expired: int = 0
    stale_blocks_dropped: int = 0
    frames_dropped: int = 0
    quarantined_blocks: int = 0

    def snapshot(self) -> TransferStats:
        """Safe to call from another thread."""
        return TransferStats(
            transfers_sent=self.transfers_sent,
            transfers_received=self.transfers_received,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            transfer_seconds=self.transfer_seconds,
            failures=dict(self.failures),
            handshakes=self.handshakes,
            leases_expired=self.leases_expired,
            stale_blocks_dropped=self.stale_blocks_dropped,
            frames_dropped=self.frames_dropped,
            quarantined_blocks=self.quarantined_blocks,
        )
