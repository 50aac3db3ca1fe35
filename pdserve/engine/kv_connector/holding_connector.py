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
MAX_WAITING = 256
"""The requests for cached blocks that wait for their turn. More are refused, and the asker goes to the next holder."""
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
        self._waiting: dict[TransferId, CachedWanted] = {}
        """Until another push ends, in the order in which they came. An asker that will not wait longer cancels."""

    def owns(self, transfer_id: TransferId) -> bool:
        """Returns whether this is a push of cached blocks, or waits to be one, and has not ended for the engine."""
        return transfer_id in self._pushes or transfer_id in self._waiting

    def wanted(self, event: CachedWanted, scheduler: Scheduler) -> None:
        """Answers a request for blocks with those that are here, when it is its turn. ``ended`` follows."""
        if len(self._pushes) < MAX_PUSHES:
            self._answer(event, scheduler)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting[event.transfer_id] = event
        else:
            self._pushes[event.transfer_id] = _Push()
            reason = f"overloaded: {MAX_WAITING} others wait for blocks"
            self._transfers.fail_push(event.transfer_id, reason, FailureCause.LOAD)

    def cancelled(self, transfer_id: TransferId) -> None:
        """Gives a request that waits no turn. What has been sent cannot be taken back. ``ended`` follows."""
        if self._waiting.pop(transfer_id, None) is not None:
            self._pushes[transfer_id] = _Push()

    def _answer(self, event: CachedWanted, scheduler: Scheduler) -> None:
        transfer, push = event.transfer_id, self._pushes.setdefault(event.transfer_id, _Push())
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

    def ended(self, event: PushEnded, scheduler: Scheduler) -> None:
        """Lets the blocks of a push go that has ended in whatever way, and gives those that wait their turn."""
        if self._waiting.pop(event.transfer_id, None) is None:
            self._blocks.free(self._pushes.pop(event.transfer_id).table)
        while self._waiting and len(self._pushes) < MAX_PUSHES:
            self._answer(self._waiting.pop(next(iter(self._waiting))), scheduler)
