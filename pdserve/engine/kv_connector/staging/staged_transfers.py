"""Transfers from and to a KV cache that lies outside of host memory: each block is copied through a staging block."""

from __future__ import annotations

from pdserve.engine.kv_connector.staging.block_copier import Copier
from pdserve.engine.kv_connector.staging.staged_fetches import LandedBlocks, StagedFetches
from pdserve.engine.kv_connector.staging.staged_pushes import BlocksToSend, StagedPushes
from pdserve.engine.kv_connector.staging.staging_blocks import StagingBlocks
from pdserve.engine.kv_connector.transfers import PacedTransfers
from pdserve_kvtransfer.events import (
    BlocksOffered,
    BlocksSent,
    CachedWanted,
    PushCancelled,
    PushEnded,
    PushWanted,
    TransferEvent,
    TransferThreadDied,
)
from pdserve_kvtransfer.stats import TransferStats


class StagedTransfers:
    """Satisfies ``Transfers``. Only the step loop's thread uses it.

    ``fetches`` and ``pushes`` share one copier, and each has staging blocks of its own. If they shared those too, two
    nodes that fetch from each other could wait for each other for ever: the pushes of both would hold all blocks, and
    no fetch would have one to land in. So what a push waits for at the other node is never held by a push there.
    """

    def __init__(
        self,
        transfers: PacedTransfers,
        copier: Copier[LandedBlocks | BlocksToSend],
        fetch_staging: StagingBlocks,
        push_staging: StagingBlocks,
    ) -> None:
        """``transfers`` reports what it has sent. This object closes it and ``copier``."""
        self._transfers, self._copier = transfers, copier
        self._news: list[TransferEvent] = []
        self.fetches = StagedFetches(transfers, copier, fetch_staging, self._news.append)
        self.pushes = StagedPushes(transfers, copier, push_staging, self._news.append)

    def events(self) -> list[TransferEvent]:
        for event in self._transfers.events():
            match event:
                case PushWanted() | CachedWanted() | PushCancelled() | BlocksSent() | PushEnded() | BlocksOffered():
                    self.pushes.on_event(event)
                case TransferThreadDied():
                    self._news.append(event)
                case _:
                    self.fetches.on_event(event)
        for done in self._copier.done():
            match done:
                case LandedBlocks():
                    self.fetches.uploaded(done)
                case BlocksToSend():
                    self.pushes.downloaded(done)
        if self._copier.failure is not None:
            self._news.append(TransferThreadDied(self._copier.failure))
        self.fetches.grant()
        self.pushes.grant()
        events = list(self._news)
        self._news.clear()
        return events

    def stats(self) -> TransferStats:
        return self._transfers.stats()

    def close(self, timeout_s: float) -> None:
        self._transfers.close(timeout_s)
        self._copier.close(timeout_s)
