"""Counters of one transfer thread."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

from pdserve.wire.frame import ClockSkew
from pdserve.wire.links import TransportKind
from pdserve_kvtransfer.events import FailureKind


@dataclass(slots=True)
class TransferStats:
    """Totals since the start, except ``quarantined_blocks``, ``clocks`` and ``links``, which are of the present.

    The transfer thread alone changes them.
    """

    transfers_sent: int = 0
    transfers_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    transfer_seconds: float = 0.0
    """The seconds from order to landing, summed over the received transfers."""
    failures: Counter[FailureKind] = field(default_factory=Counter)
    handshakes: int = 0
    leases_expired_sending: int = 0
    """The engines that this one sent blocks to, and that fell silent."""
    leases_expired_receiving: int = 0
    """The engines that this one received blocks from, and that fell silent."""
    stale_blocks_dropped: int = 0
    """Blocks that arrived for no live transfer, out of range, twice, or with the wrong size."""
    frames_dropped: int = 0
    """Control frames that were malformed or not authentic."""
    clocks: ClockSkew = field(default_factory=ClockSkew)
    """How far the clocks of other engines are from this one's."""
    quarantined_blocks: int = 0
    links: Counter[TransportKind] = field(default_factory=Counter)
    """The links that have moved blocks and are open, each rank's by itself."""

    def snapshot(self) -> TransferStats:
        """Returns a copy that stays as it is. Another thread may call it."""
        return dataclasses.replace(self, failures=self.failures.copy(), links=self.links.copy())

    @property
    def failures_by_name(self) -> dict[str, int]:
        """The number of failures of each kind, those that never happened too."""
        return {kind.value: self.failures[kind] for kind in FailureKind}
