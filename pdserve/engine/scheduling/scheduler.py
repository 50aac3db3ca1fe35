"""Which tokens the next step computes: the continuous batch.

Decoding requests come first (one token each), then prompts in chunks, within ``max_step_tokens``; then waiting requests
are admitted while blocks last. When a running request needs a block and none is free, a running request is preempted,
the youngest of the client request that holds the most places: its blocks go back and its tokens are computed again
later, so its answer does not change. The same happens where a client request has no place at all, and none is free,
while another one has several.

Static batching, the baseline that continuous batching is measured against, admits a batch only when the one before it
is over, and computes all its prompts before it decodes.

Pure bookkeeping: no tensors, no clocks, no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pdserve.config import Batching, SchedulerConfig
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_tables import BlockTables
from pdserve.engine.placement.placement import Placement
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_admission import BatchAdmission
from pdserve.engine.scheduling.batch_plan import BatchPlan, SchedulerCounters, Work
from pdserve.engine.scheduling.output_collector import OutputCollector
from pdserve.engine.scheduling.queues import Queues
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.errors import EngineError
from pdserve.wire.engine import FinishReason
from pdserve.wire.sampling_params import SampledToken


class Scheduler:
    """Owns every live request. ``release`` takes a request's blocks back when it ends or is preempted."""

    def __init__(
        self,
        blocks: BlockManager,
        config: SchedulerConfig,
        stop: StopRule,
        collector: OutputCollector,
        release: Callable[[Request], None],
        placement: Placement,
        lookahead: int = 0,
    ) -> None:
        """``lookahead`` is how many tokens a step may guess beyond each decoding request's last known one."""
        self.counters = SchedulerCounters()
        self._blocks = BlockTables(blocks)
        self._queues = Queues()
        self._admission = BatchAdmission(self._queues, self._blocks, config, self.counters, release, placement)
        self._max_step_tokens = config.max_step_tokens
        self._static = config.batching is Batching.STATIC
        self._stop = stop
        self._collector = collector
        self._release = release
        self._lookahead = lookahead
        self._by_local_id: dict[int, Request] = {}
        self._now = 0.0
        """When ``schedule`` was last called."""

    # ------------------------------------------------------------ what is here

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_children(self) -> int:
        """Requests that wait for another one's prompt, and then for places like all others."""
        return self._queues.num_children

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_remote(self) -> int:
        return len(self._queues.remote)

    @property
    def queued_prompt_tokens(self) -> int:
        """Tokens of all prompts, admitted or not, that are to be computed here."""
        return self._queues.pending_prompt_tokens + sum(request.num_pending_tokens for request in self._queues.waiting)

    def live(self) -> Iterator[Request]:
        """Every request that holds something or waits for something."""
        return self._queues.live()

    def next_deadline(self) -> float | None:
        return min((request.deadline for request in self.live()), default=None)

    def find(self, local_id: int) -> Request | None:
        return self._by_local_id.get(local_id)

    # ------------------------------------------------------------ a step

    def add(self, request: Request) -> None:
        """Queue a new request and its children."""
        for member in (request, *request.children):
            if member.local_id is not None:
                self._by_local_id[member.local_id] = member
        self._queues.add(request)

    def schedule(self, now: float) -> BatchPlan:
        """Choose the next step's work. A plan without work means: wait for an event."""
        self._now = now
        giving_way = self._giving_way(now)
        if giving_way is not None:
            self._preempt(giving_way)
        plan = BatchPlan(copies=self._blocks.take_copies())
        preemptions = self.counters.preemptions
        budget = self._schedule_running(plan)
        # What was just preempted is not admitted again at once, unless nothing else is left to do.
        if self.counters.preemptions == preemptions or not plan.work:
            self._admission.admit(plan, budget, now)
        plan.work.sort(key=lambda work: work.num_tokens > 1)
        return plan

    def follow(self, plan: BatchPlan) -> list[Request]:
        """The requests of a step under way that decode on in the next one, whatever tokens it chooses for them.

        They have a block for that. Empty if the next step may hold more than them: it is to be scheduled when the
        tokens are known. A request whose next token is certain to be its last is left out.
        """
        if self._static or self._lookahead or len(plan.work) != len(self._queues.running):
            return []
        if self._queues.waiting and (self._admission.has_place or self._giving_way(self._now) is not None):
            return []
        followers = []
        for work in plan.work:
            request = work.request
            if request.num_pending_tokens != 1 or request.children or request.local_id is None:
                return []
            if self._stop.next_is_last(request):
                continue
            if not self._blocks.reserve(request, len(request.token_ids) + 1):
                return []
            followers.append(request)
        return followers

    def advance(self, plan: BatchPlan, sampled: Sequence[Sequence[SampledToken] | None], now: float) -> list[Request]:
        """A step was computed. ``sampled`` has the new tokens of each of the plan's choosers, in order.

        Several tokens mean that the step also computed all of them but the last, as guesses within the work's
        ``lookahead``. They are taken in turn until one ends the request. Returns the requests for which there was no
        token (None), and all that wait for their prompts; they cannot go on.
        """
        chosen = iter(sampled)
        broken = []
        for work in plan.work:
            request, choosers, unanswered = work.request, work.choosers, False
            self._blocks.computed(request, request.num_computed_tokens + work.num_tokens)
            for chooser in choosers:
                tokens = next(chosen)
                if tokens is None:
                    unanswered = True
                    continue
                if not 1 <= len(tokens) <= 1 + work.lookahead:
                    raise EngineError(f"a step chose {len(tokens)} tokens, with room for {1 + work.lookahead}")
                for token in tokens:
                    if not chooser.ended:
                        self.accept_token(chooser, token, now)
                if len(tokens) > 1 and not chooser.ended:
                    self._blocks.computed(chooser, len(chooser.token_ids) - 1)
            if unanswered:
                # The whole family: it is the prompt's blocks that are at fault.
                broken += [request, *request.children]
            else:
                self._settle_children(request)
        return broken

    def accept_token(self, request: Request, token: SampledToken, now: float) -> None:
        """Append a chosen token, tell the client, and end the request if this was its last."""
        if request.first_token is None:
            request.first_token = now
            if request.parent is None:
                self.counters.prompt_tokens += request.num_prompt_tokens
        request.token_ids.append(token.token_id)
        self.counters.generated_tokens += 1
        if request.local_id is None:
            request.first_tokens = (token,)
            return
        self._collector.token(request, token)
        reason = self._stop.ending(request)
        if reason is not None:
            self.finish(request, reason)

    def _settle_children(self, parent: Request) -> None:
        """Once a prompt is in the cache, its children become requests like any other."""
        if not parent.children or parent.local_id is None or parent.num_computed_tokens < parent.num_prompt_tokens:
            return
        for child in list(parent.children):
            ready = child.num_generated_tokens and self._admission.has_place and self._queues.before_waiting(child)
            forked = ready and self._blocks.fork(parent, child)
            self._queues.move(child, Status.RUNNING if forked else Status.WAITING)
        if parent.ended:
            self._retire(parent)

    # ------------------------------------------------------------ remote prefill

    def landed(self, request: Request) -> None:
        """A fetched prompt is in the cache, and its first token is known: decode once there is a place in the batch."""
        self._blocks.computed(request, request.num_prompt_tokens)
        self._queues.move(request, Status.RUNNING if self._admission.has_place else Status.WAITING)
        self._settle_children(request)

    def requeue(self, request: Request, computed_tokens: int) -> None:
        """A fetch failed after ``computed_tokens``: queue the request again, keeping its blocks."""
        self._blocks.computed(request, min(computed_tokens, len(request.token_ids) - 1))
        self._queues.move(request, Status.WAITING)

    def pushed_all(self, request: Request) -> None:
        """A prefill node has computed all of a prompt; its blocks stay until the push ends."""
        self._queues.move(request, Status.PUSHING)

    # ------------------------------------------------------------ endings

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request and tell its client why."""
        if self._end(request):
            if request.parent is None:
                self.counters.prefills[request.prefill_source] += 1
            self._collector.ending(request, reason, error)

    def abort(self, request: Request) -> None:
        """End a request that nobody waits for any more."""
        if self._end(request):
            self._collector.forget(request)

    def expired(self, now: float) -> list[Request]:
        """Requests past their deadline."""
        return [request for request in self.live() if request.deadline <= now]

    def _end(self, request: Request) -> bool:
        if request.ended:
            return False
        request.ended = True
        if request.local_id is not None:
            del self._by_local_id[request.local_id]
            if request.children:
                return True
        self._retire(request)
        return True

    def _retire(self, request: Request) -> None:
        """Take an ended request out of everything."""
        parent = request.parent if request.status is Status.WAITING_FOR_PROMPT else None
        self._queues.move(request, Status.FINISHED)
        self._release(request)
        if parent is not None and parent.ended and not parent.children and parent.status is not Status.FINISHED:
            self._retire(parent)

    # ------------------------------------------------------------ running requests

    def _schedule_running(self, plan: BatchPlan) -> int:
        """Work of admitted requests: first all that decode, then prompts in order. Returns the budget left."""
        budget, running = self._max_step_tokens, self._queues.running
        decoding = [request for request in running if request.num_pending_tokens == 1]
        prefilling = [request for request in running if request.num_pending_tokens > 1]
        if self._static and prefilling:
            decoding = []
        for request in decoding + prefilling:
            if request.status is not Status.RUNNING or budget == 0:
                continue
            tokens = min(request.num_pending_tokens, budget)
            lookahead = self._lookahead_of(request, budget - tokens)
            # Nobody is preempted for guesses: each running request could still grow by a block.
            if lookahead and not self._blocks.reserve(request, len(request.token_ids) + lookahead, len(running)):
                lookahead = 0
            if self._make_room(request, request.num_computed_tokens + tokens, plan):
                plan.work.append(Work(request, tokens, lookahead))
                budget -= tokens + lookahead
        return budget

    def _lookahead_of(self, request: Request, budget: int) -> int:
        """How many tokens may be guessed for a request: none for a prompt, none past the context's end."""
        if request.num_pending_tokens > 1 or request.num_generated_tokens == 0:
            return 0
        return min(self._lookahead, budget, self._stop.max_model_len - len(request.token_ids))

    def _make_room(self, request: Request, tokens: int, plan: BatchPlan) -> bool:
        """Grow a running request's blocks: take them from waiting requests, then from the youngest running ones."""
        while not self._blocks.reserve(request, tokens):
            if self._admission.strip_a_waiting(request):
                continue
            planned = {work.request for work in plan.work}
            others = (other for other in reversed(self._queues.running) if other not in planned)
            victim = max(others, key=self._queues.places_of, default=request)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _giving_way(self, now: float) -> Request | None:
        """Whose place and blocks go to a client request that has no place, where another one has several."""
        if self._static or not self._queues.placeless:
            return None
        rich = self._queues.most_placed()
        if rich is None:
            return None
        first = self._admission.next_in_turn(now)
        if first is None or self._queues.places_of(first) or self._admission.can_admit(first):
            return None
        return rich

    def _preempt(self, request: Request) -> None:
        self.counters.preemptions += 1
        request.num_computed_tokens = 0
        self._queues.move(request, Status.WAITING)
        self._release(request)
