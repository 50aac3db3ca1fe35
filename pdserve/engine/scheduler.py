"""Which tokens the next step computes: the continuous batch.

Decoding requests come first (one token each), then prompts in chunks, within ``max_step_tokens``; then waiting requests
are admitted while blocks last. When a running request needs a block and none is free, the youngest running request is
preempted: its blocks go back and its tokens are computed again later, so its answer does not change.

Pure bookkeeping: no tensors, no clocks, no sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.config import SchedulerConfig
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.outbox import Outbox
from pdserve.engine.request import Request, Status
from pdserve.wire.engine import FinishReason, PrefillSource
from pdserve.wire.sampling import SampledToken


@dataclass(frozen=True, slots=True)
class StopRule:
    """When generation ends, as far as the model decides it."""

    eos_token_ids: frozenset[int]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Work:
    """The next ``num_tokens`` uncomputed tokens of one request."""

    request: Request
    num_tokens: int

    @property
    def wants_token(self) -> bool:
        """Whether it reaches the last known token, so that the next one can be chosen."""
        return self.num_tokens == self.request.num_pending_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: ``work`` with single tokens first, and the requests whose prompts go to a prefill node."""

    work: list[Work] = field(default_factory=list)
    fetches: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Since the engine's start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefills: dict[PrefillSource, int] = field(default_factory=lambda: dict.fromkeys(PrefillSource, 0))


class Scheduler:
    """Owns every live request. ``release`` takes a request's blocks back when it ends or is preempted."""

    def __init__(
        self,
        blocks: BlockManager,
        config: SchedulerConfig,
        stop: StopRule,
        outbox: Outbox,
        release: Callable[[Request], None],
    ) -> None:
        self.counters = Counters()
        self._blocks = blocks
        self._config = config
        self._stop = stop
        self._outbox = outbox
        self._release = release
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._remote: set[Request] = set()
        self._pushing: set[Request] = set()
        self._clients: dict[int, Request] = {}

    # ------------------------------------------------------------ what is here

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_remote(self) -> int:
        return len(self._remote)

    def live(self) -> Iterator[Request]:
        """Every request that is not finished."""
        yield from self._waiting
        yield from self._running
        yield from self._remote
        yield from self._pushing

    def next_deadline(self) -> float | None:
        return min((request.deadline for request in self.live()), default=None)

    def find(self, client: int) -> Request | None:
        return self._clients.get(client)

    # ------------------------------------------------------------ a step

    def add(self, request: Request) -> None:
        """Queue a new request."""
        if request.client is not None:
            self._clients[request.client] = request
        self._waiting.append(request)

    def schedule(self, now: float) -> Plan:
        """Choose the next step's work. An empty plan means: wait for an event."""
        plan = Plan()
        preemptions = self.counters.preemptions
        budget = self._schedule_running(plan)
        # What was just preempted is not admitted again at once, unless nothing else is left to do.
        if self.counters.preemptions == preemptions or not plan.work:
            self._admit(plan, budget, now)
        plan.work.sort(key=lambda work: work.num_tokens > 1)
        return plan

    def advance(self, plan: Plan, tokens: Sequence[SampledToken | None], now: float) -> list[Request]:
        """A step was computed: ``tokens`` are the choices for the work that wanted one, in order.

        Returns the requests for which there was no choice; they cannot go on.
        """
        chosen = iter(tokens)
        broken = []
        for work in plan.work:
            wants_token = work.wants_token
            work.request.num_computed_tokens += work.num_tokens
            if wants_token:
                token = next(chosen)
                if token is None:
                    broken.append(work.request)
                else:
                    self.accept_token(work.request, token, now)
        return broken

    def accept_token(self, request: Request, token: SampledToken, now: float) -> None:
        """Append a chosen token, tell the client, and end the request if this was its last."""
        if request.first_token is None:
            request.first_token = now
            self.counters.prompt_tokens += request.num_prompt_tokens
        request.token_ids.append(token.token_id)
        self.counters.generated_tokens += 1
        if request.client is None:
            request.first_tokens = (token,)
        self._outbox.token(request, token)
        reason = self._ended_by(request, token.token_id)
        if reason is not None and request.client is not None:
            self.finish(request, reason)

    # ------------------------------------------------------------ remote prefill

    def landed(self, request: Request) -> None:
        """A fetched prompt is in the cache, and its first token is known: decode from the next step on."""
        request.num_computed_tokens = request.num_prompt_tokens
        self._remote.discard(request)
        request.move(Status.RUNNING)
        self._running.append(request)

    def requeue(self, request: Request, computed_tokens: int) -> None:
        """A fetch failed after ``computed_tokens``: queue the request again, keeping its blocks."""
        self._remote.discard(request)
        request.num_computed_tokens = min(computed_tokens, len(request.token_ids) - 1)
        request.move(Status.WAITING)
        self._queue_by_arrival(request)

    def pushed_all(self, request: Request) -> None:
        """A prefill node has computed all of a prompt; its blocks stay until the push ends."""
        self._running.remove(request)
        request.move(Status.PUSHING)
        self._pushing.add(request)

    # ------------------------------------------------------------ endings

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request and tell its client why."""
        if self._end(request):
            self.counters.prefills[request.prefill_source] += 1
            self._outbox.ending(request, reason, error)

    def abort(self, request: Request) -> None:
        """End a request that nobody waits for any more."""
        if self._end(request):
            self._outbox.forget(request)

    def expired(self, now: float) -> list[Request]:
        """Requests past their deadline."""
        return [request for request in self.live() if request.deadline <= now]

    def _end(self, request: Request) -> bool:
        if request.status is Status.FINISHED:
            return False
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        elif request.status is Status.RUNNING:
            self._running.remove(request)
        self._remote.discard(request)
        self._pushing.discard(request)
        if request.client is not None:
            del self._clients[request.client]
        request.move(Status.FINISHED)
        self._release(request)
        return True

    def _ended_by(self, request: Request, token_id: int) -> FinishReason | None:
        sampling = request.sampling
        if token_id in self._stop.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if request.num_generated_tokens >= sampling.max_tokens or len(request.token_ids) >= self._stop.max_model_len:
            return FinishReason.LENGTH
        return None

    # ------------------------------------------------------------ choosing

    def _schedule_running(self, plan: Plan) -> int:
        """Work of admitted requests: first all that decode, then prompts in order. Returns the budget left."""
        budget = self._config.max_step_tokens
        decoding = [request for request in self._running if request.num_pending_tokens == 1]
        prefilling = [request for request in self._running if request.num_pending_tokens > 1]
        for request in decoding + prefilling:
            if request.status is not Status.RUNNING or budget == 0:
                continue
            tokens = min(request.num_pending_tokens, budget)
            if self._make_room(request, request.num_computed_tokens + tokens, plan):
                plan.work.append(Work(request, tokens))
                budget -= tokens
        return budget

    def _make_room(self, request: Request, tokens: int, plan: Plan) -> bool:
        """Grow a running request's blocks: take them from waiting requests, then from the youngest running ones."""
        while not self._blocks.grow(request.block_table, tokens):
            if self._strip_a_waiting(request):
                continue
            planned = {work.request for work in plan.work}
            victim = next((other for other in reversed(self._running) if other not in planned), request)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.counters.preemptions += 1
        self._running.remove(request)
        request.num_computed_tokens = 0
        request.move(Status.WAITING)
        self._release(request)
        self._queue_by_arrival(request)

    def _queue_by_arrival(self, request: Request) -> None:
        """Back among the waiting, before all that came later."""
        later = (i for i, other in enumerate(self._waiting) if other.arrived > request.arrived)
        self._waiting.insert(next(later, len(self._waiting)), request)

    def _admit(self, plan: Plan, budget: int, now: float) -> None:
        for request in list(self._waiting):
            if len(self._running) + len(self._remote) >= self._config.max_running:
                return
            fetch = self._should_fetch(request)
            if not fetch and budget == 0:
                continue
            if not self._has_room(request):
                return
            self._blocks.grow(request.block_table, len(request.token_ids))
            self._waiting.remove(request)
            if request.admitted is None:
                request.admitted = now
            if fetch:
                request.move(Status.WAITING_FOR_REMOTE_KVS)
                self._remote.add(request)
                plan.fetches.append(request)
                continue
            request.move(Status.RUNNING)
            self._running.append(request)
            tokens = min(request.num_pending_tokens, budget)
            plan.work.append(Work(request, tokens))
            budget -= tokens

    def _should_fetch(self, request: Request) -> bool:
        """A prompt goes to a prefill node if one is left to be tried and more than the last token is missing."""
        return (
            bool(request.targets)
            and request.num_generated_tokens == 0
            and request.num_computed_tokens < request.num_prompt_tokens - 1
        )

    def _has_room(self, request: Request) -> bool:
        """Whether a waiting request's known tokens fit, leaving a block for each running request to grow into."""
        missing = self._blocks.blocks_for(len(request.token_ids)) - len(request.block_table)
        if self._blocks.num_free >= missing + len(self._running):
            return True
        if self._running or self._remote or self._pushing:
            return False
        while self._blocks.num_free < missing and self._strip_a_waiting(request):
            pass
        return self._blocks.num_free >= missing

    def _strip_a_waiting(self, keep: Request) -> bool:
        """Take back what the last waiting request with blocks kept of a failed fetch. False if there is none."""
        for other in reversed(self._waiting):
            if other is not keep and other.block_table:
                other.num_computed_tokens = 0
                self._release(other)
                return True
        return False
