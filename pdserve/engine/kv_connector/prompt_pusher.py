"""The part of a connector that pushes: it computes prompts for other nodes, and sends their KV blocks there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.config import OVERLAP_FROM_TOKENS, KvOverlap
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.engine.kv_connector.transfers import BlockOrder, Pushes
from pdserve.engine.placement.placement import Placement
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import SamplingParams, joined
from pdserve.wire.terms import Terms
from pdserve.wire.timeline import MomentKind, PhaseKind
from pdserve.wire.transfer import FailureCause, PrefillLoad
from pdserve_kvtransfer.events import PushCancelled, PushEnded, PushEvent, PushOutcome, PushWanted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushSchedule:
    """Says when the blocks of a prompt are pushed.

    A push beside the next chunk makes that chunk slower, and shortens the time from the first token to the landing of
    the last block. ``docs/benchmarks.md`` has figures of both, for prompts of several lengths.
    """

    overlap: KvOverlap

    def early(self, tokens: int) -> bool:
        """Returns whether blocks leave before a prompt is computed, of which ``tokens`` have to be pushed."""
        match self.overlap:
            case KvOverlap.ON:
                return True
            case KvOverlap.OFF:
                return False
            case KvOverlap.AUTO:
                return tokens >= OVERLAP_FROM_TOKENS


class PromptPusher:
    """Orders of other nodes become requests, whose blocks go there chunk by chunk, or all at the end."""

    def __init__(
        self,
        blocks: BlockManager,
        transfers: Pushes,
        misfit: Callable[[list[int], SamplingParams], str | None],
        max_waiting: int,
        schedule: PushSchedule,
        placement: Placement,
        finish_writes: Callable[[], None] = lambda: None,
        order: BlockOrder | None = None,
    ) -> None:
        """``misfit`` returns why a request cannot be computed here, None if it can; ``max_waiting`` bounds the queue.

        Decode nodes are told this node's speed, by ``placement``. ``finish_writes`` returns when the kernels that
        write the blocks of a push have ended. On other ranks they come before the sums that this one has waited for.
        ``order`` is that of the model's blocks; without it, the model has no cache groups.
        """
        self._blocks = blocks
        self._transfers = transfers
        self._misfit = misfit
        self._max_waiting = max_waiting
        self._schedule = schedule
        self._placement = placement
        self._finish_writes = finish_writes
        self._order = order or BlockOrder(blocks.block_size)
        self._pushes: dict[TransferId, Request] = {}
        self._cancelled_blocks: dict[TransferId, list[int]] = {}

    @property
    def busy(self) -> bool:
        """Whether there are pushes under way."""
        return bool(self._pushes)

    def on_event(self, scheduler: Scheduler, event: PushEvent, now: float) -> None:
        match event:
            case PushWanted():
                self._accept(event, scheduler, now)
            case PushCancelled(transfer):
                cancelled = self._pushes.get(transfer)
                if cancelled is not None:
                    _log_end(cancelled, "cancelled", now)
                    scheduler.abort(cancelled)
            case PushEnded(transfer, outcome):
                self._ended(scheduler, transfer, outcome, now)
            case _:
                raise EngineError(f"no push of a prompt without staging blocks has {event}")

    def tell_load(self, scheduler: Scheduler) -> None:
        """Tells the nodes whose prompts are computed here how busy this one is."""
        self._transfers.tell_load(self._load(scheduler))

    def _accept(self, order: PushWanted, scheduler: Scheduler, now: float) -> None:
        misfit = self._misfit(order.token_ids, order.sampling)
        if misfit is not None:
            self._refuse(order, misfit, FailureCause.PROMPT)
            return
        if scheduler.num_waiting >= self._max_waiting:
            # The refusal carries the load to the decode node.
            self.tell_load(scheduler)
            self._refuse(order, f"overloaded: {scheduler.num_waiting} prompts are waiting", FailureCause.LOAD)
            return
        request = Request(
            uuid=order.transfer_id.request,
            token_ids=list(order.token_ids),
            num_prompt_tokens=len(order.token_ids),
            sampling=order.sampling,
            arrived=now,
            terms=Terms(prompt=order.terms, deadline_s=order.deadline_s),
            transfer=order.transfer_id,
            first_block=order.first_block,
        )
        log.debug(
            "%s transfer=%s prompt=%d first_block=%d queued",
            request,
            order.transfer_id,
            request.num_prompt_tokens,
            request.first_block,
        )
        for seed in order.child_seeds:
            request.add_child(seed)
        self._pushes[order.transfer_id] = request
        scheduler.add(request)

    def _refuse(self, order: PushWanted, reason: str, cause: FailureCause) -> None:
        log.info("request_id=%s transfer=%s refused: %s", order.request_id or "-", order.transfer_id, reason)
        self._cancelled_blocks[order.transfer_id] = []
        self._transfers.fail_push(order.transfer_id, reason, cause)

    def _ended(self, scheduler: Scheduler, transfer: TransferId, outcome: PushOutcome, now: float) -> None:
        request = self._pushes.pop(transfer, None)
        if request is None:
            self._blocks.free(self._cancelled_blocks.pop(transfer))
            return
        _log_end(request, outcome.value, now)
        request.transfer = None
        scheduler.abort(request)

    def start(self, plan: BatchPlan) -> None:
        """Sends blocks that come from the prefix cache while the rest of the prompt is computed."""
        if not self._pushes:
            return
        for work in plan.work:
            if work.request.serves_push:
                self._push_early(work.request)

    def stepped(self, scheduler: Scheduler, plan: BatchPlan) -> None:
        """Passes on the blocks that became final when ``plan`` was computed."""
        if not self._pushes:
            return
        for work in plan.work:
            request = work.request
            if not request.serves_push or request.transfer is None or request.status is not Status.RUNNING:
                continue
            if not request.prompt_is_computed:
                self._push_early(request)
                continue
            self._push(request, self._order.count(request.first_block, request.num_prompt_tokens))
            family = (request, *request.children)
            tokens = tuple(member.first_token for member in family if member.first_token is not None)
            scores = joined(request.scores) if request.scores else None
            self._transfers.first_token(
                request.transfer, tokens, request.facts.cached_tokens, self._load(scheduler), scores
            )
            scheduler.pushed_all(request)

    def _load(self, scheduler: Scheduler) -> PrefillLoad:
        known = self._placement.step_cost.rate_known
        # Beside streams of its own, this node's steps take fewer tokens of prompts, and longer.
        rate = self._placement.tokens_per_s(*scheduler.decoding) if known else 0.0
        return PrefillLoad(scheduler.queued_prompt_tokens, rate, scheduler.num_streams)

    def _push_early(self, request: Request) -> None:
        """Sends what is final of a prompt that is not computed yet, if the schedule has it leave early."""
        if self._schedule.early(request.num_prompt_tokens - request.first_block * self._blocks.block_size):
            whole = request.num_computed_tokens // self._blocks.block_size
            self._push(request, self._order.final(request.first_block, request.num_prompt_tokens, whole))

    def _push(self, request: Request, final: int) -> None:
        """Sends those of the first ``final`` wanted blocks that are not sent yet."""
        begin = max(0, request.pushed_blocks - request.first_block)
        if request.transfer is not None and final > begin:
            self._finish_writes()
            tokens = request.num_prompt_tokens
            block_ids = self._order.ids(request.block_table, request.first_block, tokens, begin, final)
            self._transfers.push(request.transfer, request.first_block + begin, block_ids)
            request.pushed_blocks = request.first_block + final
            if (notes := request.notes) is not None:
                now = time.monotonic()
                if not notes.is_open(PhaseKind.PUSH):
                    notes.begin(PhaseKind.PUSH, now)
                notes.moment(MomentKind.PUSHED, now, blocks=final - begin)

    def give_up(self, request: Request, reason: str, cause: FailureCause) -> None:
        """Tells the decode node, with ``cause``, that this node is about to end the request by its own decision."""
        if request.transfer is not None:
            _log_end(request, f"failed ({reason})", time.monotonic())
            self._transfers.fail_push(request.transfer, reason, cause)

    def release(self, request: Request) -> None:
        """Frees the request's blocks, or keeps them until ``PushEnded`` says that no send reads them."""
        if request.transfer is None:
            self._blocks.free(request.block_table)
        elif request.status is Status.FINISHED:
            del self._pushes[request.transfer]
            self._cancelled_blocks[request.transfer] = request.block_table
            request.block_table = BlockTable()
        else:
            raise EngineError("a request that serves a push was preempted: its blocks may be in flight")


def _log_end(request: Request, outcome: str, now: float) -> None:
    """Logs one line about a request that is over, and notes how it ended. Unknown values are ``-``."""
    if request.notes is not None:
        kind = outcome.partition(" ")[0]  # a reason may quote the request
        request.notes.outcome = kind
        request.notes.end(PhaseKind.PUSH, now, kind, blocks=request.pushed_blocks - request.first_block)
    if not log.isEnabledFor(logging.INFO):
        return
    log.info(
        "%s transfer=%s prompt=%d cached=%d queue_ms=%s prefill_ms=%s push_ms=%s outcome=%s",
        request,
        request.transfer,
        request.num_prompt_tokens,
        request.facts.cached_tokens,
        _ms(request.arrived, request.facts.admitted),
        _ms(request.facts.admitted, request.facts.first_token_at),
        _ms(request.facts.first_token_at, now),
        outcome,
    )


def _ms(begin: float | None, end: float | None) -> str:
    return "-" if begin is None or end is None else f"{(end - begin) * 1000:.1f}"
