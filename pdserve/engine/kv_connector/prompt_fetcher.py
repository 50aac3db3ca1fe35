"""The part of a connector that fetches: it has the prompts of this node's clients computed by other nodes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.engine.kv_connector.transfers import BlockOrder, Fetches
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.prefill_node import PrefillNode
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.engine import FinishReason, PrefillSource
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve.wire.timeline import MomentKind, PhaseKind
from pdserve_kvtransfer.events import (
    BlocksReleased,
    FailureKind,
    FetchCancelled,
    FetchEvent,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
    LoadHeard,
    PrefillNodeMet,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _OrderedFetch:
    """A fetch under way. ``sampled_requests`` get a first token from it, in order."""

    request: Request
    sampled_requests: tuple[Request, ...]
    node: PrefillNode
    boot_id: bytes
    credible: bool = True
    """False once the prefill node has sent a false answer: the prompt is computed here when the fetch ends."""


class PromptFetcher:
    """Prompts come from prefill nodes, or are computed here when those fail.

    It asks only for blocks that the prefix cache here does not hold.
    """

    def __init__(
        self,
        blocks: BlockManager,
        transfers: Fetches,
        timeout_s: float,
        boot_id: bytes,
        placement: Placement,
        vocab_size: int = 2**31,
        finish_writes: Callable[[], None] = lambda: None,
        order: BlockOrder | None = None,
    ) -> None:
        """``timeout_s`` is what a prefill node gets for one prompt beyond the time that it is estimated to need.

        ``vocab_size`` is the model's: an answer of a prefill node with a token beyond it is false.
        ``finish_writes`` returns when the kernels that were to write a fetch's blocks before have ended: a chunk may
        have been launched for a request that is gone by now, and its blocks given to the next one. UCX knows nothing of
        a GPU's stream. On other ranks, those kernels come before the sums that this one has waited for. ``order`` is
        that of the model's blocks; without it, the model has no cache groups.
        """
        self._blocks = blocks
        self._transfers = transfers
        self._timeout_s = timeout_s
        self._boot_id = boot_id
        self._placement = placement
        self._vocab_size = vocab_size
        self._finish_writes = finish_writes
        self._order = order or BlockOrder(blocks.block_size)
        self._fetches: dict[TransferId, _OrderedFetch] = {}
        self._cancelled_blocks: dict[TransferId, list[int]] = {}

    def start(self, plan: BatchPlan, now: float) -> None:
        """Asks prefill nodes for the prompts that this plan does not compute itself."""
        for request in plan.fetches:
            target = request.targets[0]
            transfer = TransferId(request.uuid, request.attempts, self._boot_id)
            request.attempts += 1
            request.transfer = transfer
            request.facts.prefill_node = target.name
            request.first_block = request.num_computed_tokens // self._blocks.block_size
            cached = request.num_computed_tokens
            missing = request.num_prompt_tokens - cached
            # The time is estimated before the order is noted, because the prompt does not wait for itself.
            time_s = self._timeout_s + self._placement.needed_s(target, missing, cached, now)
            node = self._placement.ordered(target, transfer, missing, cached, now)
            log.debug("%s transfer=%s prefill=%s missing=%d ordered", request, transfer, target.name, missing)
            self._fetches[transfer] = _OrderedFetch(request, (request, *request.children), node, target.boot_id)
            if (notes := request.notes) is not None:
                notes.begin(PhaseKind.FETCH, now, node=target.name, tokens=missing)
            self._finish_writes()
            self._transfers.fetch(
                FetchOrder(
                    transfer_id=transfer,
                    target=target,
                    token_ids=request.token_ids[: request.num_prompt_tokens],
                    first_block=request.first_block,
                    block_ids=self._order.ids(request.block_table, request.first_block, request.num_prompt_tokens),
                    sampling=request.sampling,
                    deadline_s=max(0.001, min(time_s, request.deadline - now)),
                    child_seeds=tuple(child.sampling.seed for child in request.children),
                    terms=msgspec.structs.replace(
                        request.terms.prompt, trace=None if notes is None else notes.context_of(PhaseKind.FETCH)
                    ),
                )
            )

    def on_event(self, scheduler: Scheduler, event: FetchEvent, now: float) -> None:
        match event:
            case FirstTokenArrived(transfer):
                fetch = self._fetches.get(transfer)
                if fetch is not None:
                    self._on_first_token(scheduler, fetch, event, now)
            case PrefillNodeMet(boot_id, max_prompt_tokens):
                self._placement.met(boot_id, max_prompt_tokens)
                self._note_handshake(boot_id, now)
            case LoadHeard(boot_id, load):
                self._placement.heard(boot_id, load, now)
            case FetchLanded():
                self._on_landed(scheduler, event, now)
            case FetchFailed():
                self._on_failed(scheduler, event, now)
            case FetchCancelled(transfer, quarantined):
                self._blocks.quarantine(quarantined)
                self._free_cancelled(transfer)
            case BlocksReleased(block_ids):
                self._blocks.end_quarantine(block_ids)
            case _:
                raise EngineError(f"no fetch without pace has {event}")

    def _note_handshake(self, boot_id: bytes, now: float) -> None:
        for fetch in self._fetches.values():
            if fetch.boot_id == boot_id and fetch.request.notes is not None:
                fetch.request.notes.moment(MomentKind.HANDSHAKE, now, node=fetch.request.facts.prefill_node)

    def _on_first_token(self, scheduler: Scheduler, fetch: _OrderedFetch, event: FirstTokenArrived, now: float) -> None:
        transfer, request = event.transfer_id, fetch.request
        if not all(0 <= token.token_id < self._vocab_size for token in event.tokens):
            log.error("%s prefill node %s sent tokens that the model lacks", request, request.facts.prefill_node)
            self._fetches[transfer] = dataclasses.replace(fetch, credible=False)
            return
        if request.needs_scores and not self._take_scores(scheduler, request, event.prompt_logprobs):
            log.error("%s prefill node %s sent no log probabilities that fit", request, request.facts.prefill_node)
            self._fetches[transfer] = dataclasses.replace(fetch, credible=False)
            return
        fetch.node.answered(transfer, event.cached_tokens, event.load, now)
        request.facts.cached_tokens = event.cached_tokens
        request.facts.prefill_source = PrefillSource.REMOTE
        self._accept(scheduler, fetch, event.tokens, now)

    def _take_scores(self, scheduler: Scheduler, request: Request, scores: PromptLogprobs | None) -> bool:
        """Takes the log probabilities of a prompt. Returns False if they are not those of all its tokens."""
        if scores is None or not scores.fits(request.num_prompt_tokens - 1, request.sampling.prompt_logprobs or 0):
            return False
        # This node may have begun with the prompt.
        request.scores, request.num_scored_tokens = [], 0
        scheduler.scored(request, scores)
        return True

    def _accept(self, scheduler: Scheduler, fetch: _OrderedFetch, tokens: tuple[SampledToken, ...], now: float) -> None:
        # If a prefill node sends too few tokens, the others are sampled here.
        for request, token in zip(fetch.sampled_requests, tokens, strict=False):
            # A token that a client has is never replaced, and no client waits for those of an ended request.
            if not request.ended and request.num_generated_tokens == 0:
                scheduler.accept_token(request, token, now)

    def _record_failure(self, fetch: _OrderedFetch, transfer: TransferId, kind: FailureKind, now: float) -> None:
        """Counts a failure against the prefill node, unless it could not have moved this prompt in any case."""
        out_of_time = kind is FailureKind.DEADLINE and now >= fetch.request.deadline
        if out_of_time or kind in (FailureKind.REFUSED, FailureKind.OVERLOADED, FailureKind.CLOSED):
            fetch.node.withdrawn(transfer)
        elif kind is FailureKind.DEADLINE:
            fetch.node.timed_out(transfer, now)
        else:
            fetch.node.failed(transfer, now)

    def _on_landed(self, scheduler: Scheduler, event: FetchLanded, now: float) -> None:
        fetch = self._fetches.pop(event.transfer_id, None)
        if fetch is None:
            self._free_cancelled(event.transfer_id)
            return
        if not fetch.credible:
            scheduler.counters.prefills_failed[FailureKind.CORRUPT.value] += 1
            fetch.node.failed(event.transfer_id, now)
            self._retry(scheduler, fetch.request, 0, ())
            return
        fetch.node.landed(event.tail_bytes, event.tail_s)
        request = fetch.request
        request.transfer = None
        request.facts.prefill_source = PrefillSource.REMOTE
        request.facts.transfer_seconds = event.tail_s
        if request.notes is not None:
            request.notes.end(
                PhaseKind.FETCH, now, "landed", blocks=event.landed, moved_bytes=event.bytes, tail_s=event.tail_s
            )
        for member in (request, *request.children):
            member.offered_blocks = request.num_prompt_tokens // self._blocks.block_size
        scheduler.landed(request)

    def _on_failed(self, scheduler: Scheduler, event: FetchFailed, now: float) -> None:
        transfer = event.transfer_id
        self._blocks.quarantine(event.quarantined)
        fetch = self._fetches.pop(transfer, None)
        if fetch is None:
            self._free_cancelled(transfer)
            return
        request, kind = fetch.request, event.kind
        name, reason = request.facts.prefill_node, event.reason
        log.info("%s transfer=%s prefill=%s failed (%s): %s", request, transfer, name, kind.value, reason)
        if request.notes is not None:
            request.notes.end(PhaseKind.FETCH, now, kind.value, blocks=event.landed)
        scheduler.counters.prefills_failed[kind.value] += 1
        self._record_failure(fetch, transfer, kind, now)
        if request.terms.gives_back and event.asked and kind is FailureKind.PEER_LOST:
            self._return_request(scheduler, request)
        else:
            self._retry(scheduler, request, event.landed, event.quarantined)

    def _return_request(self, scheduler: Scheduler, request: Request) -> None:
        """Ends a request with which its prefill node was lost. Its blocks are free but for those in quarantine."""
        request.transfer = None
        for member in (request, *request.children):
            scheduler.finish(member, FinishReason.PREFILL_LOST, request.facts.prefill_node)

    def _retry(self, scheduler: Scheduler, request: Request, landed_blocks: int, quarantined: tuple[int, ...]) -> None:
        request.transfer = None
        request.facts.prefill_node = ""
        request.facts.prefill_source = PrefillSource.FALLBACK
        landed_blocks += request.first_block
        computed = landed_blocks * self._blocks.block_size
        if self._order.has_groups:
            computed = self._usable_tokens(request, landed_blocks)
        if not self._blocks.replace(request.block_table, quarantined) or (self._order.has_groups and not computed):
            self._blocks.free(request.block_table)
            computed = request.num_computed_tokens = 0
        scheduler.requeue(request, computed)

    def _usable_tokens(self, request: Request, landed_blocks: int) -> int:
        """Returns how many tokens of a model with cache groups are there after its fetch has failed.

        All blocks together are what the answer's second token needs, and no use for a token before that. Without them
        there is what was there before; but the fetch may have written to the block behind that.
        """
        tokens = request.num_prompt_tokens
        wanted = request.first_block + self._order.count(request.first_block, tokens)
        if landed_blocks == wanted and request.num_generated_tokens and not request.needs_scores:
            return tokens
        before = request.num_computed_tokens
        return before if before == request.first_block * self._blocks.block_size else 0

    def release(self, request: Request) -> None:
        """Frees the request's blocks, or cancels their fetch and keeps them until that ends: ``_free_cancelled``."""
        if request.transfer is None:
            self._blocks.free(request.block_table)
            return
        self._fetches.pop(request.transfer).node.withdrawn(request.transfer)
        self._cancelled_blocks[request.transfer] = request.block_table
        request.block_table = BlockTable()
        self._transfers.cancel_fetch(request.transfer)
        request.transfer = None

    def _free_cancelled(self, transfer: TransferId) -> None:
        """Frees a cancelled request's blocks; quarantined ones are free when ``BlocksReleased`` names them."""
        self._blocks.free(self._cancelled_blocks.pop(transfer))
