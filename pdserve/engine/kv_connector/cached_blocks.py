"""Two parts of a connector, for blocks that an engine has computed already, by their hashes.

``CachedPusher`` gives blocks of the prefix cache to the engines that ask for them. ``CachedFetcher`` asks other engines
for the blocks that a resumed answer lacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.engine.kv_cache.prefix_cache import Match
from pdserve.engine.kv_connector.transfers import BlockOrder, Fetches, Pushes
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.timeline import PhaseKind
from pdserve.wire.transfer import MAX_HASHES, FailureCause
from pdserve_kvtransfer.events import CachedFetchOrder, CachedWanted, FetchEnd, FetchFailed, FetchLanded, PushEnded

log = logging.getLogger(__name__)


MAX_PUSHES = 64
"""The pushes of cached blocks at a time."""
MAX_WAITING = 256
"""The requests for cached blocks that wait for their turn. More are refused, and the asker goes to the next holder."""
POOL_SHARE = 2
"""All pushes together keep this part of the blocks from being taken at most: one of so many."""


@dataclass(slots=True)
class _Push:
    """A push under way, with the number of blocks of group 0 that were idle when it began."""

    table: BlockTable = field(default_factory=BlockTable)
    num_idle: int = 0


class CachedPusher:
    """Looks blocks up by their hashes, holds those that are there, and pushes them. Nothing is computed for that.

    Idle blocks that are held for a push cannot be taken for other tokens until it has ended. So no more of them are
    held than leave the blocks that live requests may need next, and some for what comes after them. Blocks that a
    request holds are given at any time, because that takes nothing from others.
    """

    def __init__(
        self,
        blocks: BlockManager,
        transfers: Pushes,
        finish_writes: Callable[[], None] = lambda: None,
        order: BlockOrder | None = None,
    ) -> None:
        """``finish_writes`` returns when the kernels that write the blocks of a push have ended. ``order`` is that of a
        ``PromptPusher``.
        """
        self._order = order or BlockOrder(blocks.block_size)
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
        if self._order.has_groups:
            self._answer_with_all(event, push, found)
            return
        if found:
            self._blocks.share(push.table, found)
            self._finish_writes()
            self._transfers.push(transfer, 0, tuple(push.table))
        self._transfers.held(transfer, len(found))

    def _answer_with_all(self, event: CachedWanted, push: _Push, found: list[int]) -> None:
        """Sends what all cache groups have behind the wanted blocks, or says how many can be had with that.

        The hashes begin where the asker's blocks end. It has what windows need of the blocks before.
        """
        usable = self._blocks.usable_prefix(event.hashes, len(found)) if self._may_hold_bounded else 0
        count = usable if usable == len(event.hashes) else 0
        if count:
            self._blocks.share_prefix(push.table, event.hashes, found)
            self._finish_writes()
            tokens = count * self._blocks.block_size
            self._transfers.push(event.transfer_id, 0, self._order.ids(push.table, 0, tokens))
        else:
            push.num_idle = 0
        self._transfers.held(event.transfer_id, count, 0 if count else usable)

    @property
    def _may_hold_bounded(self) -> bool:
        """Whether pushes leave enough of every cache group behind group 0 to live requests."""
        return all(pool.num_free * POOL_SHARE >= len(pool.ids) for pool in self._blocks.pools[1:])

    def _idle_left(self, scheduler: Scheduler) -> int:
        """Returns how many idle blocks may be held beside those of the pushes under way."""
        share = self._blocks.num_blocks // POOL_SHARE - sum(push.num_idle for push in self._pushes.values())
        return max(0, min(share, self._blocks.num_free - scheduler.blocks_wanted[0]))

    def ended(self, event: PushEnded, scheduler: Scheduler) -> None:
        """Lets the blocks of a push go that has ended in whatever way, and gives those that wait their turn."""
        if self._waiting.pop(event.transfer_id, None) is None:
            self._blocks.free(self._pushes.pop(event.transfer_id).table)
        while self._waiting and len(self._pushes) < MAX_PUSHES:
            self._answer(self._waiting.pop(next(iter(self._waiting))), scheduler)


SLOWEST_BYTES_PER_S = 1e8
"""A holder that sends more slowly is given up: to replay tokens is about as fast."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A fetch under way."""

    request: Request
    holder: PrefillTarget
    hashes: tuple[bytes, ...]
    again: bool = False
    """Whether this holder was asked for more before, and has said how many blocks can be had."""


class CachedFetcher:
    """Asks the holders of a request, one after another, for the blocks that the prefix cache here does not have.

    Whatever becomes of that, the request is queued again with the blocks that have come. A holder that lacks something
    which a model with cache groups needs behind all wanted blocks is asked once more, for as many as it can give.
    """

    def __init__(
        self,
        blocks: BlockManager,
        transfers: Fetches,
        lease_s: float,
        boot_id: bytes,
        block_bytes: float,
        finish_writes: Callable[[], None] = lambda: None,
        order: BlockOrder | None = None,
    ) -> None:
        """A holder gets ``lease_s`` for its answer, and the time that the blocks need at ``SLOWEST_BYTES_PER_S``.

        ``finish_writes`` and ``order`` are those of a ``PromptFetcher``.
        """
        self._order = order or BlockOrder(blocks.block_size)
        self._blocks = blocks
        self._transfers = transfers
        self._lease_s = lease_s
        self._boot_id = boot_id
        self._block_s = block_bytes / SLOWEST_BYTES_PER_S
        self._finish_writes = finish_writes
        self._fetches: dict[TransferId, _Asked] = {}
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
            if not self._reserve(request, len(reuse.hashes)):
                raise EngineError(f"{request} was to fetch blocks for which it has no places")
            self._ask(_Asked(request, holder, reuse.hashes[first:][:MAX_HASHES]), now)

    def _reserve(self, request: Request, blocks: int) -> bool:
        """Takes what the other cache groups keep behind the first ``blocks`` blocks of a request."""
        tokens = blocks * self._blocks.block_size
        return not self._order.has_groups or self._blocks.grow_bounded(request.block_table, tokens, tokens)

    def _ask(self, asked: _Asked, now: float) -> None:
        request, holder, count = asked.request, asked.holder, len(asked.hashes)
        first = request.num_computed_tokens // self._blocks.block_size
        # The choices of one prompt have one uuid, so each fetch gets its own.
        transfer = request.transfer = TransferId(new_id(), 0, self._boot_id)
        self._fetches[transfer] = asked
        if request.notes is not None:
            request.notes.begin(PhaseKind.REUSE, now, node=holder.name)
        log.debug("%s transfer=%s holder=%s blocks=%d asked", request, transfer, holder.name, count)
        self._finish_writes()
        self._transfers.fetch(
            CachedFetchOrder(
                transfer_id=transfer,
                target=holder,
                hashes=asked.hashes,
                block_ids=self._order.ids(request.block_table, first, (first + count) * self._blocks.block_size),
                deadline_s=max(0.001, min(self._lease_s + count * self._block_s, request.deadline - now)),
                request_id=request.terms.prompt.request_id,
            )
        )

    def on_event(self, scheduler: Scheduler, event: FetchEnd, now: float) -> None:
        """Acts on the end of a fetch that this part ``owns``."""
        transfer = event.transfer_id
        self._blocks.quarantine(event.quarantined)
        asked = self._fetches.pop(transfer, None)
        if asked is None:
            self._blocks.free(self._cancelled_blocks.pop(transfer))
            return
        request = asked.request
        request.transfer = None
        if request.notes is not None:
            outcome = event.kind.value if isinstance(event, FetchFailed) else "landed"
            request.notes.end(PhaseKind.REUSE, now, outcome, blocks=event.landed)
        if isinstance(event, FetchFailed):
            log.info("%s transfer=%s failed (%s): %s", request, transfer, event.kind.value, event.reason)
        first, landed = request.num_computed_tokens // self._blocks.block_size, event.landed
        if self._order.has_groups:
            again = self._asked_again(asked, event)
            if again is not None and self._reserve(request, first + len(again.hashes)):
                self._ask(again, now)
                return
            # All blocks together are what the next token needs, and a part of them is of no use.
            tokens = (first + len(asked.hashes)) * self._blocks.block_size
            landed = len(asked.hashes) if landed and landed == self._order.count(first, tokens) else 0
        computed = request.num_computed_tokens + landed * self._blocks.block_size
        if not self._blocks.replace(request.block_table, event.quarantined):
            self._blocks.free(request.block_table)
            computed = request.num_computed_tokens = 0
        scheduler.reused(request, computed)
        if landed and computed and self._order.has_states and request.num_computed_tokens == computed:
            # It stands where the holder could find it, and may be asked for here.
            self._blocks.remember_states(request.block_table, asked.hashes[-1], first + landed)

    def _asked_again(self, asked: _Asked, event: FetchEnd) -> _Asked | None:
        """Returns what the same holder is asked for now."""
        if asked.again or not isinstance(event, FetchLanded) or event.landed:
            return None
        count = min(event.usable, len(asked.hashes) - 1)
        behind = asked.request.num_computed_tokens + count * self._blocks.block_size
        # A state behind all of a prompt but one token is of no use (``BlockTables.usable``).
        if count < 1 or behind == asked.request.num_prompt_tokens - 1:
            return None
        return replace(asked, hashes=asked.hashes[:count], again=True)

    def release(self, request: Request) -> None:
        """Cancels the request's fetch, and keeps its blocks until that has ended."""
        transfer = request.transfer
        assert transfer is not None
        del self._fetches[transfer]
        self._cancelled_blocks[transfer] = request.block_table
        request.block_table = BlockTable()
        request.transfer = None
        self._transfers.cancel_fetch(transfer)
