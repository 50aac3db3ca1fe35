"""The part of a connector that reuses: it fetches blocks that other engines have in their prefix caches."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.transfers import Fetches
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.timeline import PhaseKind
from pdserve.wire.transfer import MAX_HASHES
from pdserve_kvtransfer.events import CachedFetchOrder, FetchEnd, FetchFailed

log = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S = 1e8
"""A holder that sends more slowly is given up: to replay tokens is about as fast."""


class ReusingConnector:
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

        ``finish_writes`` is that of a ``FetchingConnector``.
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
