"""Two parts of a connector, for blocks that an engine has computed already, by their hashes.

``CachedPusher`` gives blocks of the prefix cache to the engines that ask for them. ``CachedFetcher`` asks other engines
for the blocks that a resumed answer lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.prefix_cache import Match
from pdserve.engine.kv_connector.transfers import Fetches, Pushes
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.timeline import PhaseKind
from pdserve.wire.transfer import MAX_HASHES, FailureCause
from pdserve_kvtransfer.events import CachedFetchOrder, CachedWanted, FetchEnd, FetchFailed, PushEnded

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


class CachedPusher:
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


SLOWEST_BYTES_PER_S = 1e8
"""A holder that sends more slowly is given up: to replay tokens is about as fast."""


class CachedFetcher:
    """Asks the holders of a request, one after another, for the blocks that the prefix cache here does not have.

    Whatever becomes of that, the request is queued again with the blocks that have come.
    """

    def __init__(
        self,
        blocks: BlockManager,
        transfers: Fetches,
        lease_s: float,
        boot_id: bytes,
        block_bytes: float,
        finish_writes: Callable[[], None] = lambda: None,
    ) -> None:
        """A holder gets ``lease_s`` for its answer, and the time that the blocks need at ``SLOWEST_BYTES_PER_S``.

        ``finish_writes`` is that of a ``PromptFetcher``.
        """
        self._blocks = blocks
        self._transfers = transfers
        self._lease_s = lease_s
        self._boot_id = boot_id
        self._block_s = block_bytes / SLOWEST_BYTES_PER_S
        self._finish_writes = finish_writes
        self._fetches: dict[TransferId, Request] = {}
        self._cancelled_blocks: dict[TransferId, list[int]] = {}

    def owns(self, transfer_id: TransferId | None) -> bool:
        """Returns whether this part has ordered a fetch whose end it has not heard of yet."""
        return transfer_id in self._fetches or transfer_id in self._cancelled_blocks

    def start(self, plan: BatchPlan, now: float) -> None:
        """Asks a holder for the blocks that each of the plan's ``reuses`` lacks."""
        for reuse in plan.reuses:
            request = reuse.request
            holder = request.holders[0]
            request.asked_holders += 1
            first = request.num_computed_tokens // self._blocks.block_size
            # The block at ``first`` is about to be written to: nothing of it counts as computed.
            request.num_computed_tokens = first * self._blocks.block_size
            hashes = reuse.hashes[first:][:MAX_HASHES]
            # The choices of one prompt have one uuid, so each fetch gets its own.
            transfer = request.transfer = TransferId(new_id(), 0, self._boot_id)
            self._fetches[transfer] = request
            if request.notes is not None:
                request.notes.begin(PhaseKind.REUSE, now, node=holder.name)
            log.debug("%s transfer=%s holder=%s blocks=%d asked", request, transfer, holder.name, len(hashes))
            self._finish_writes()
            self._transfers.fetch(
                CachedFetchOrder(
                    transfer_id=transfer,
                    target=holder,
                    hashes=hashes,
                    block_ids=tuple(request.block_table[first : first + len(hashes)]),
                    deadline_s=max(0.001, min(self._lease_s + len(hashes) * self._block_s, request.deadline - now)),
                    request_id=request.terms.prompt.request_id,
                )
            )

    def on_event(self, scheduler: Scheduler, event: FetchEnd, now: float) -> None:
        """Acts on the end of a fetch that this part ``owns``."""
        transfer = event.transfer_id
        self._blocks.quarantine(event.quarantined)
        request = self._fetches.pop(transfer, None)
        if request is None:
            self._blocks.free(self._cancelled_blocks.pop(transfer))
            return
        request.transfer = None
        if request.notes is not None:
            outcome = event.kind.value if isinstance(event, FetchFailed) else "landed"
            request.notes.end(PhaseKind.REUSE, now, outcome, blocks=event.landed)
        if isinstance(event, FetchFailed):
            log.info("%s transfer=%s failed (%s): %s", request, transfer, event.kind.value, event.reason)
        computed = request.num_computed_tokens + event.landed * self._blocks.block_size
        if not self._blocks.replace(request.block_table, event.quarantined):
            self._blocks.free(request.block_table)
            computed = request.num_computed_tokens = 0
        scheduler.reused(request, computed)

    def release(self, request: Request) -> None:
        """Cancels the request's fetch, and keeps its blocks until that has ended."""
        transfer = request.transfer
        assert transfer is not None
        del self._fetches[transfer]
        self._cancelled_blocks[transfer] = request.block_table
        request.block_table = []
        request.transfer = None
        self._transfers.cancel_fetch(transfer)
