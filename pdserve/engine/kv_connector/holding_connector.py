"""The part of a connector that holds: it gives blocks of the prefix cache to the engines that ask for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.prefix_cache import Match
from pdserve.engine.kv_connector.transfers import Pushes
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.wire.ids import TransferId
from pdserve.wire.transfer import FailureCause
from pdserve_kvtransfer.events import CachedWanted, PushEnded

log = logging.getLogger(__name__)

MAX_PUSHES = 64
"""The pushes of cached blocks at a time."""
POOL_SHARE = 2
"""All pushes together keep this part of the blocks from being taken at most: one of so many."""


@dataclass(slots=True)
class _Push:
    """A push under way, with the number of blocks that were idle when it began."""

    table: list[int] = field(default_factory=list)
    num_idle: int = 0


class HoldingConnector:
    """Looks blocks up by their hashes, holds those that are there, and pushes them. Nothing is computed for that.

    Idle blocks that are held for a push cannot be taken for other tokens until it has ended. So no more of them are
    held than leave the blocks that live requests may need next, and some for what comes after them. Blocks that a
    request holds are given at any time, because that takes nothing from others.
    """

    def __init__(
        self, blocks: BlockManager, transfers: Pushes, finish_writes: Callable[[], None] = lambda: None
    ) -> None:
        """``finish_writes`` returns when the kernels that write the blocks of a push have ended."""
        self._blocks = blocks
        self._transfers = transfers
        self._finish_writes = finish_writes
        self._pushes: dict[TransferId, _Push] = {}

    def owns(self, transfer_id: TransferId) -> bool:
        """Returns whether this is the push of cached blocks, of whose end the engine has not heard yet."""
        return transfer_id in self._pushes

    def wanted(self, event: CachedWanted, scheduler: Scheduler) -> None:
        """Answers a request for blocks with those that are here. ``ended`` follows."""
        transfer, push = event.transfer_id, self._pushes.setdefault(event.transfer_id, _Push())
        if len(self._pushes) > MAX_PUSHES:
            self._transfers.fail_push(transfer, f"overloaded: {MAX_PUSHES} others get blocks", FailureCause.LOAD)
            return
        matched = self._blocks.match(event.hashes, len(event.hashes), Match())
        found, push.num_idle = self._blocks.with_few_idle(matched, self._idle_left(scheduler))
        log.debug(
            "request_id=%s transfer=%s asked for %d blocks, %d are here",
            event.request_id or "-",
            transfer,
            len(event.hashes),
            len(found),
        )
        if found:
            self._blocks.share(push.table, found)
            self._finish_writes()
            self._transfers.push(transfer, 0, tuple(push.table))
        self._transfers.held(transfer, len(found))

    def _idle_left(self, scheduler: Scheduler) -> int:
        """Returns how many idle blocks may be held beside those of the pushes under way."""
        share = self._blocks.num_blocks // POOL_SHARE - sum(push.num_idle for push in self._pushes.values())
        return max(0, min(share, self._blocks.num_free - scheduler.blocks_wanted))

    def ended(self, event: PushEnded) -> None:
        """Lets the blocks of a push go that has ended in whatever way."""
        self._blocks.free(self._pushes.pop(event.transfer_id).table)
