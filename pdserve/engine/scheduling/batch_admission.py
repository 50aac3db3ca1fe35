"""Decides which waiting requests join the batch, and with which blocks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pdserve.config import Batching, SchedulerConfig
from pdserve.engine.kv_cache.block_tables import BlockTables
from pdserve.engine.placement.latency_targets import OwnItl
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.placement_rule import PlacementDecision, PromptSize
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_plan import BatchPlan, Reuse, SchedulerCounters
from pdserve.engine.scheduling.queues import Queues
from pdserve.engine.scheduling.step_budget import StepBudget
from pdserve.wire.engine import PrefillReason, PrefillSource
from pdserve.wire.ids import BootId
from pdserve.wire.sampling_params import can_be_sent

MAX_TRIED = 32
"""The search ends after so many requests for which no fetch can be ordered now, because each step searches."""

LEAST_KEPT = 3
"""A prompt that runs would be left a single token, perhaps, if it were left fewer (``chunk_tokens``)."""

_UNASSIGNED = PlacementDecision(PrefillSource.LOCAL, PrefillReason.UNASSIGNED)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ahead:
    """The tokens that a prompt finds before it, as one search through the waiting requests has met them."""

    queued: int
    """The tokens of prompts that this node computes."""
    rows: int
    """The requests that decode now."""
    context_tokens: int
    """The tokens of their contexts."""
    own_itl: OwnItl
    """The ITL targets that they have of their own."""
    leaving: Counter[BootId] = field(default_factory=Counter)
    """The tokens of prompts that go to each prefill node and have not left this one yet."""
    held: set[BootId] = field(default_factory=set)
    """The prefill nodes for which a prompt waits: none that comes after it goes there before it."""

    def noted(self, decision: PlacementDecision, prompt: PromptSize, boot_id: BootId) -> PlacementDecision:
        """Returns what comes of a decision about the next prompt and this prefill node, and notes it."""
        if decision.remote and prompt.may_wait and boot_id in self.held:
            decision = PlacementDecision(None, decision.reason)
        if decision.waits:
            self.held.add(boot_id)
        if decision.remote or decision.waits:
            self.leaving[boot_id] += prompt.missing_tokens
        else:
            self.queued += prompt.missing_tokens
        return decision


class BatchAdmission:
    """Admits requests in turn (``queues``), while there are places, and blocks for all of a request's known tokens.

    A request whose prompt is being fetched has no place in the batch: as many as the batch holds may be on their way or
    have landed and wait for a place, with their blocks. So a slow prefill node keeps no request out that can run here.
    A prompt that placement lets wait is passed over: it goes to whichever node is free for it first. Prompts that wait
    for the same prefill node go there in turn, so that none is overtaken again and again by those that come later.

    Admission cannot deadlock: idle blocks of the prefix cache are free, the blocks that waiting requests kept of failed
    fetches are taken back when nothing else runs, and a request that is longer than all blocks together is refused on
    arrival.
    """

    def __init__(
        self,
        queues: Queues,
        blocks: BlockTables,
        config: SchedulerConfig,
        counters: SchedulerCounters,
        release: Callable[[Request], None],
        placement: Placement,
    ) -> None:
        self._queues = queues
        self._blocks = blocks
        self._max_num_seqs = config.max_num_seqs
        self._step_tokens = config.max_num_batched_tokens
        self._static = config.batching is Batching.STATIC
        self._counters = counters
        self._release = release
        self._placement = placement

    @property
    def has_place(self) -> bool:
        """Whether the batch has a place for one more request."""
        return len(self._queues.running) < self._max_num_seqs

    def can_admit(self, request: Request) -> bool:
        """Returns whether there are a place and blocks for a waiting request while others run."""
        return self.has_place and self._has_room(request, self._blocks.find(request))

    def next_in_turn(self, now: float) -> Request | None:
        """Returns the waiting request that gets the next place.

        Requests that wait for a fetch, a grammar or a node that is free for their prompt are passed over, and so are
        those that are only fetched: they need no place.
        """
        tries, fetches, ahead = MAX_TRIED, self._free_fetches(), self._ahead()
        for request in self._queues.in_turn():
            if request.terms.fetch_only or request.awaits_grammar:
                continue
            if not (request.targets or request.may_ask_holders):
                return request
            found = self._blocks.find(request)
            if self._asks_holder(request, found):
                if fetches:
                    return request
            else:
                decision = self._place(request, found, ahead, now)
                if decision is None or not (decision.waits or (decision.remote and not fetches)):
                    return request
            tries -= 1
            if not tries:
                break
        return None

    def admit(self, plan: BatchPlan, budget: StepBudget, now: float) -> None:
        """Admits requests and adds their work to ``plan``, as much as ``budget`` allows."""
        if not self._queues.waiting or not self.has_place or (self._static and self._queues.num_admitted):
            return
        self._admit_landed(plan, budget, now)
        prompt_budget = budget.for_prompt()
        tries, fetches, ahead = MAX_TRIED, self._free_fetches(), self._ahead()
        for request in self._queues.in_turn():
            if not self.has_place or not tries:
                return
            if request.awaits_grammar:
                continue
            # A static batch takes every request; a continuous one those that it, or a prefill node, can compute now.
            left = budget.tokens if request.prompt_is_computed else prompt_budget
            no_budget = not left and not self._static
            if no_budget and not (request.targets or request.may_ask_holders or request.terms.fetch_only):
                continue
            found = self._blocks.find(request)
            reuses = self._asks_holder(request, found)
            if request.terms.fetch_only and not reuses:
                request.facts.reused_tokens = self._reused_blocks(request, found) * self._blocks.block_size
                plan.fetched.append(request)
                continue
            decision = None if reuses else self._place(request, found, ahead, now)
            fetch = reuses or (decision is not None and decision.remote)
            if no_budget and not fetch:
                tries -= 1
                continue
            if (fetch and not fetches) or (decision is not None and decision.waits):
                tries -= 1
                continue
            if request.terms.fetch_only and not self._has_spare_room(request, found):
                tries -= 1
                continue
            if not self._has_room(request, found):
                return
            self._blocks.admit(request, found)
            coming = self._blocks.reusable(request) * self._blocks.block_size if reuses else request.num_prompt_tokens
            if fetch and not self._has_landing(request, coming):
                request.num_computed_tokens = 0
                self._release(request)
                return
            if reuses:
                self._queues.move(request, Status.WAITING_FOR_REMOTE_KVS)
                plan.reuses.append(Reuse(request, self._blocks.hashes(request)))
                fetches -= 1
                continue
            self._begin(request, decision, now)
            if fetch:
                self._queues.move(request, Status.WAITING_FOR_REMOTE_KVS)
                plan.fetches.append(request)
                fetches -= 1
                continue
            if decision is None:
                ahead.queued += request.num_uncomputed_tokens
            if self._run(request, plan, budget):
                prompt_budget = budget.for_prompt()

    def admit_short(self, plan: BatchPlan, budget: StepBudget, now: float) -> None:
        """Admits prompts that half of what the step has for prompts computes completely, before those that run go on.

        What is replayed behind a prompt counts as well. Only client requests that hold no place get one in this way, in
        turn. They take no blocks that a request before them needs. They find nothing ahead of them, because this step
        computes them.
        """
        kept = (budget.for_prompt() + 1) // 2
        if not self._queues.waiting or kept < LEAST_KEPT:
            return
        tries, ahead = MAX_TRIED, replace(self._ahead(), queued=0)
        for request in self._queues.in_turn():
            if not self.has_place or not tries or budget.for_prompt() <= kept or self._queues.places_of(request):
                return
            if request.awaits_grammar or request.terms.fetch_only or request.prompt_is_computed:
                continue
            tries -= 1
            found = self._blocks.find(request)
            if not self._has_spare_room(request, found):
                return
            computed = self._computed_tokens(request, found)
            fits = len(request.token_ids) - computed <= budget.for_prompt(computed) - kept
            if not fits or self._asks_holder(request, found):
                continue
            decision = self._place(request, found, ahead, now)
            if decision is not None and (decision.remote or decision.waits):
                continue
            self._blocks.admit(request, found)
            self._begin(request, decision, now)
            self._run(request, plan, budget)

    def _admit_landed(self, plan: BatchPlan, budget: StepBudget, now: float) -> None:
        """Admits requests whose complete prompts are in their blocks.

        They need few blocks or none, so they do not wait behind a request for which there are not enough. They do wait
        for their turn behind a request that can begin now.
        """
        if not budget.tokens or not any(map(_landed, self._queues.waiting)):
            return
        first = self.next_in_turn(now)
        for request in filter(_landed, self._queues.in_turn()):
            if not self.has_place or not budget.tokens:
                break
            if first is not None and self._comes_before(first, request):
                continue
            if self._has_room(request, ()):
                self._blocks.admit(request, ())
                if request.facts.admitted is None:
                    self._first_admission(request, now)
                self._run(request, plan, budget)

    def _run(self, request: Request, plan: BatchPlan, budget: StepBudget) -> bool:
        """Gives an admitted request its place in the batch. Returns whether this step has work of it."""
        self._queues.move(request, Status.RUNNING)
        work = plan.next_work(request, budget.for_request(request))
        # The blocks of whole contexts are there. Where others are not, the next step looks for them again.
        if work is None or not self._blocks.reserve(request, request.num_computed_tokens + work.num_tokens):
            return False
        plan.work.append(work)
        budget.spend(work)
        return True

    def _comes_before(self, first: Request, landed: Request) -> bool:
        """Returns whether the request that is next in turn, if not landed itself, goes before one that has landed."""
        if _landed(first) or self._queues.places_of(first) >= self._queues.places_of(landed):
            return False
        return self.can_admit(first)

    def _free_fetches(self) -> int:
        """Returns how many more prompts may be ordered from prefill nodes.

        Prompts that are on their way, and those that have landed and wait for a place, count against the limit.
        """
        taken = len(self._queues.remote)
        if taken < self._max_num_seqs:
            taken += sum(_landed(request) for request in self._queues.waiting)
        return max(0, self._max_num_seqs - taken)

    def _has_landing(self, request: Request, tokens: int) -> bool:
        """Takes the blocks that a transfer brings beside whole contexts, if need be as ``_has_room`` does."""
        while not self._blocks.reserve_landing(request, tokens):
            if self._queues.num_admitted or self._queues.pushing or not self.take_back_blocks(keep=request):
                return False
        return True

    def take_back_blocks(self, keep: Request) -> bool:
        """Frees the blocks that the last waiting request, other than ``keep``, has from a fetch.

        Returns False if there is no such request.
        """
        for other in reversed(self._queues.waiting):
            if other is not keep and other.block_table:
                other.num_computed_tokens = 0
                self._release(other)
                return True
        return False

    def _begin(self, request: Request, decision: PlacementDecision | None, now: float) -> None:
        """Notes that a request has its blocks, and where its prompt is computed."""
        if request.facts.admitted is None:
            self._first_admission(request, now)
        placed = _UNASSIGNED if _is_unassigned(request) else decision
        if placed is not None and placed.source is not None:
            self._placement.count(placed)
            request.facts.placed = placed.reason
            log.debug("%s placed=%s reason=%s", request, placed.source.value, placed.reason.value)

    def _first_admission(self, request: Request, now: float) -> None:
        request.facts.admitted = now
        if request.parent is None:
            # The blocks that were found may hold a part of an answer that another node has begun.
            request.facts.cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self._counters.prefix_cache_queries += request.num_prompt_tokens
            self._counters.prefix_cache_hits += request.facts.cached_tokens
        self.count_reused(request)

    def count_reused(self, request: Request) -> None:
        """Counts the blocks that a resumed answer begins with here, once the holders have given what they have."""
        if request.num_emitted_tokens:
            reused = request.num_computed_tokens // self._blocks.block_size
            request.facts.reused_tokens = reused * self._blocks.block_size
            self._counters.resume_blocks_wanted += self._blocks.fillable(request)
            self._counters.resume_blocks_reused += reused

    def _asks_holder(self, request: Request, found: Sequence[int]) -> bool:
        """Returns whether the next thing that a waiting request does is to ask a holder for blocks.

        Without a prefix cache, what is only fetched would be lost at once.
        """
        if not request.may_ask_holders or (request.terms.fetch_only and not self._blocks.caching):
            return False
        return self._blocks.reusable(request) > self._reused_blocks(request, found)

    def _reused_blocks(self, request: Request, found: Sequence[int]) -> int:
        """Returns how many full blocks a waiting request has, or has found."""
        return max(len(found), request.num_computed_tokens // self._blocks.block_size)

    def _computed_tokens(self, request: Request, found: Sequence[int]) -> int:
        """Returns how many tokens are in blocks that a waiting request has, or has found."""
        return max(request.num_computed_tokens, len(found) * self._blocks.block_size)

    def _ahead(self) -> Ahead:
        return Ahead(self._queues.uncomputed_prompt_tokens, *self._queues.decoding)

    def _place(self, request: Request, found: Sequence[int], ahead: Ahead, now: float) -> PlacementDecision | None:
        """Decides where a prompt is computed, and notes it in ``ahead`` for the next one.

        Returns None if no prefill node is left to be tried, if this node has given tokens of the answer already, or if
        the log probabilities of the prompt are too many for a message.
        """
        if not request.targets or request.num_generated_tokens > request.num_emitted_tokens:
            return None
        if request.needs_scores and not can_be_sent(request.num_prompt_tokens, request.sampling.prompt_logprobs or 0):
            return None
        computed = self._computed_tokens(request, found)
        target = request.targets[0]
        prompt = PromptSize(
            request.num_prompt_tokens - computed,
            computed,
            ahead.queued,
            self._queues.num_admitted,
            rows=ahead.rows,
            context_tokens=ahead.context_tokens,
            own_itl=ahead.own_itl,
            own_ttft_ms=request.terms.own_targets.ttft_ms,
            own_itl_ms=request.terms.own_targets.itl_ms,
            leaving_tokens=ahead.leaving[target.boot_id],
            waited_s=now - request.arrived,
            may_wait=bool(self._queues.running),
        )
        return ahead.noted(self._placement.decide(prompt, target, now), prompt, target.boot_id)

    def _has_spare_room(self, request: Request, found: Sequence[int]) -> bool:
        """Returns whether a waiting request's known tokens fit and each running request can still grow by a block."""
        missing = self._blocks.missing(request, found)
        room = self._blocks.free_beside(found) >= missing + len(self._queues.running)
        return room and self.fits_bounded(request)

    def fits_bounded(self, request: Request) -> bool:
        """Returns whether the groups of the cache that are no whole contexts have room for one more request."""
        active = [*self._queues.running, *self._queues.remote]
        return self._blocks.fits_bounded(request, active, self._step_tokens)

    def _has_room(self, request: Request, found: Sequence[int]) -> bool:
        """Returns whether there are blocks, if need be without what other requests that wait have of their fetches."""
        if self._has_spare_room(request, found):
            return True
        if self._queues.num_admitted or self._queues.pushing:
            return False
        missing = self._blocks.missing(request, found)
        while self._blocks.free_beside(found) < missing and self.take_back_blocks(keep=request):
            pass
        return self._blocks.free_beside(found) >= missing


def _is_unassigned(request: Request) -> bool:
    """Returns whether the proxy has named no prefill node for a client's prompt, which begins here."""
    begins = request.facts.placed is None and request.parent is None and not request.attempts
    return begins and request.local_id is not None and not request.targets


def _landed(request: Request) -> bool:
    """Returns whether a waiting request needs nothing but a place: its prompt came from another node."""
    there = bool(request.block_table) and request.prompt_is_computed
    return there and not request.may_ask_holders and not request.terms.fetch_only
