"""Counters of one transfer thread."""

from __future__ import annotations

from collections import Counter

import msgspec

from pdserve.control.frame import ClockSkew
from pdserve.wire.discovery import TransportKind
from pdserve.wire.engine_counts import TransferCounts
from pdserve_kvtransfer.events import FailureKind


class TransferStats(TransferCounts, kw_only=True):
    """Totals since the start, except ``quarantined_blocks``, ``clocks`` and ``links``, which are of the present.

    The transfer thread alone changes them.
    """

    failures: Counter[FailureKind] = msgspec.field(default_factory=Counter)
    clocks: ClockSkew = msgspec.field(default_factory=ClockSkew)
    """How far the clocks of other engines are from this one's."""
    quarantined_blocks: int = 0
    links: Counter[TransportKind] = msgspec.field(default_factory=Counter)
    """The links that have moved blocks and are open, each rank's by itself."""

    def snapshot(self) -> TransferStats:
        """Returns a copy that stays as it is. Another thread may call it."""
        return msgspec.structs.replace(self, failures=self.failures.copy(), links=self.links.copy())

    @property
    def failures_by_name(self) -> dict[str, int]:
        """The number of failures of each kind, those that never happened too."""
        return {kind.value: self.failures[kind] for kind in FailureKind}
