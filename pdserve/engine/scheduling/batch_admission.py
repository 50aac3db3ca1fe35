"""Decides which waiting requests join the batch, and with which blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.config import Batching, SchedulerConfig
from pdserve.engine.kv_cache.block_tables import BlockTables
from pdserve.engine.placement.placement import Placement, PlacementDecision
from pdserve.engine.placement.prefill_cost import PromptSize
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_plan import BatchPlan, SchedulerCounters, Work
from pdserve.engine.scheduling.queues import Queues

_LOOKS = 32
"""At so many requests for which no fetch can be ordered now the search ends: it is made at every step."""


class BatchAdmission:
    """In turn (``queues``), while there is a place and there are blocks for all of a request's known tokens.

    A request whose prompt is being fetched has no place in the batch: as many as the batch holds may be on their way or
    have landed and wait for a place, with their blocks. So a slow prefill node keeps nobody out that can run here.

    It cannot deadlock: idle blocks of the prefix cache are free, what waiting requests kept of failed fetches is taken
    back when nothing else runs, and a request that is longer than all blocks together is refused on arrival.
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
        self._max_running = config.max_running
        self._static = config.batching is Batching.STATIC
        self._counters = counters
        self._release = release
        self._placement = placement

    @property
    def has_place(self) -> bool:
        """In the batch."""
        return len(self._queues.running) < self._max_running

    def can_admit(self, request: Request) -> bool:
        """Whether there are a place and blocks for a waiting request while others run."""
        return self.has_place and self._has_room(request, self._blocks.find(request))

    def next_in_turn(self, now: float) -> Request | None:
        """The waiting request that gets the next place; not one whose prompt waits to be ordered elsewhere."""
        looks, fetches, queued = _LOOKS, self._free_fetches(), self._queues.pending_prompt_tokens
        for request in self._queues.in_turn():
            if fetches or not request.targets:
                return request
            decision = self._decide(request, self._blocks.find(request), queued, now)
            if decision is None or not decision.remote:
                return request
            looks -= 1
            if not looks:
                break
        return None

    def admit(self, plan: BatchPlan, budget: int, now: float) -> None:
        """Add to ``plan`` what is admitted, with at most ``budget`` tokens of work."""
        if not self._queues.waiting or not self.has_place or (self._static and self._queues.num_admitted):
            return
        budget = self._admit_landed(plan, budget, now)
        looks, fetches = _LOOKS, self._free_fetches()
        queued = self._queues.pending_prompt_tokens
        for request in self._queues.in_turn():
            if not self.has_place or not looks:
                return
            # A static batch takes whom it can get; a continuous one whom it can work on, or have worked on.
            idle = budget == 0 and not self._static
            if idle and not request.targets:
                continue
            found = self._blocks.find(request)
            decision = self._decide(request, found, queued, now)
            fetch = decision is not None and decision.remote
            if idle and not fetch:
                continue
            if fetch and not fetches:
                looks -= 1
                continue
            if not self._has_room(request, found):
                return
            self._blocks.admit(request, found)
            if request.admitted is None:
                self._first_admission(request, now)
            if decision is not None:
                self._placement.decided(decision)
            if fetch:
                self._queues.move(request, Status.WAITING_FOR_REMOTE_KVS)
                plan.fetches.append(request)
                fetches -= 1
                continue
            self._queues.move(request, Status.RUNNING)
            queued += request.num_pending_tokens
            tokens = min(request.num_pending_tokens, budget)
            if tokens:
                plan.work.append(Work(request, tokens))
                budget -= tokens

    def _admit_landed(self, plan: BatchPlan, budget: int, now: float) -> int:
        """Those that have all but one of their tokens in their blocks decode on. Returns the budget left.

        They need few blocks or none, so they do not wait behind somebody for whom there are not enough. They do wait
        for their turn behind somebody who can begin now.
        """
        if not budget or not any(map(_landed, self._queues.waiting)):
            return budget
        first = self.next_in_turn(now)
        for request in filter(_landed, self._queues.in_turn()):
            if not self.has_place or not budget:
                break
            if first is not None and self._comes_before(first, request):
                continue
            if self._has_room(request, ()):
                self._blocks.admit(request, ())
                self._queues.move(request, Status.RUNNING)
                plan.work.append(Work(request, 1))
                budget -= 1
        return budget

    def _comes_before(self, first: Request, landed: Request) -> bool:
        """Whether the one that is next in turn, if not landed itself, takes the place of one that has landed."""
        if _landed(first) or self._queues.places_of(first) >= self._queues.places_of(landed):
            return False
        return self.can_admit(first)

    def _free_fetches(self) -> int:
        """How many prompts may be ordered from prefill nodes beside those that are on their way or wait for a place."""
        taken = len(self._queues.remote)
        if taken < self._max_running:
            taken += sum(_landed(request) for request in self._queues.waiting)
        return max(0, self._max_running - taken)

    def strip_a_waiting(self, keep: Request) -> bool:
        """Take back what the last waiting request with blocks kept of a failed fetch. False if there is none."""
        for other in reversed(self._queues.waiting):
            if other is not keep and other.block_table:
                other.num_computed_tokens = 0
                self._release(other)
                return True
        return False

    def _first_admission(self, request: Request, now: float) -> None:
        request.admitted = now
        if request.parent is None:
            request.cached_tokens = request.num_computed_tokens
            self._counters.prefix_cache_queries += request.num_prompt_tokens
            self._counters.prefix_cache_hits += request.num_computed_tokens

    def _decide(self, request: Request, found: Sequence[int], queued: int, now: float) -> PlacementDecision | None:
        """Where a prompt is computed; None if it is no question: no prefill node is left to be tried."""
        if not request.targets or request.num_generated_tokens:
            return None
        computed = max(request.num_computed_tokens, len(found) * self._blocks.block_size)
        missing = request.num_prompt_tokens - computed
        return self._placement.choose(
            PromptSize(missing, computed, queued, self._queues.num_admitted), request.targets[0], now
        )

    def _has_room(self, request: Request, found: Sequence[int]) -> bool:
        """Whether a waiting request's known tokens fit, leaving a block for each running request to grow into."""
        missing = self._blocks.missing(request, found)
        if self._blocks.free_beside(found) >= missing + len(self._queues.running):
            return True
        if self._queues.num_admitted or self._queues.pushing:
            return False
        while self._blocks.free_beside(found) < missing and self.strip_a_waiting(request):
            pass
        return self._blocks.free_beside(found) >= missing


def _landed(request: Request) -> bool:
    """Whether a waiting request needs nothing but a place: its prompt came from a prefill node."""
    return bool(request.block_table) and request.num_generated_tokens > 0 and request.num_pending_tokens == 1
