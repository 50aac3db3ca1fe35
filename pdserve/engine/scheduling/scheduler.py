"""Decides which tokens the next step computes: the continuous batch.

``schedule`` plans a step, the step loop runs it, and ``postprocess`` takes its tokens. Decoding requests come first
(one token each), then answers that are replayed, then prompts in chunks, within the step's tokens and the ITL target
(``step_budget``); then waiting requests are admitted while blocks last. When a running request needs a block and none
is free, a running request is preempted, the youngest of the client request that holds the most places: its blocks go
back, and later its prompt is computed again and its answer replayed (``batch_plan``), so the answer does not change.
The same happens where a client request has no place at all, and none is free, while another one has several.

Static batching, the baseline that continuous batching is measured against, admits a batch only when the one before it
is over, and computes all its prompts before it decodes.

The scheduler has no tensors, no clocks and no sockets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from pdserve.config import Batching, SchedulerConfig
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_tables import BlockTables
from pdserve.engine.placement.latency_targets import OwnItl
from pdserve.engine.placement.placement import Placement
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_admission import BatchAdmission
from pdserve.engine.scheduling.batch_plan import BatchPlan, SchedulerCounters, Work
from pdserve.engine.scheduling.block_shortage import BlockShortage
from pdserve.engine.scheduling.output_collector import OutputCollector, TimelineRecorder
from pdserve.engine.scheduling.queues import Queues
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.engine.scheduling.step_budget import StepBudget
from pdserve.engine.speculation.speculation import Speculation
from pdserve.wire.engine import FinishReason, MoveWanted, PrefillSource
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken, joined
from pdserve.wire.timeline import MomentKind


class Drafted(Protocol):
    """What a step gives of its drafts."""

    def after(self, request: Request, number: int) -> SampledToken | None:
        """Returns the token after the request's first ``number`` drafts, which are its last tokens by now.

        Returns None where a step gives no token.
        """

    def are_finite(self, request: Request) -> bool:
        """Returns whether the logits after all of the request's drafts are finite."""


class Scheduler:
    """Owns every live request.

    ``release`` takes a request's blocks back when it ends or is preempted. ``open_grammars`` is told of every new
    request, whose children are known by then: none of them is admitted until it has the matcher of its grammar.
    """

    def __init__(
        self,
        blocks: BlockManager,
        config: SchedulerConfig,
        stop: StopRule,
        collector: OutputCollector,
        release: Callable[[Request], None],
        placement: Placement,
        open_grammars: Callable[[Request], None] = lambda _: None,
        recorder: TimelineRecorder | None = None,
        *,
        model_drafts: bool = False,
    ) -> None:
        self.counters = SchedulerCounters()
        self._blocks = BlockTables(blocks)
        self._queues = Queues()
        self._admission = BatchAdmission(self._queues, self._blocks, config, self.counters, release, placement)
        self._shortage = BlockShortage(self._queues, self._blocks, stop)
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._step_cost = placement.step_cost
        self._targets = placement.targets
        self._static = config.batching is Batching.STATIC
        self.speculation = Speculation(
            config, self._blocks, stop, self._step_cost, self._targets, by_model=model_drafts
        )
        self._stop = stop
        self._collector = collector
        self._release = release
        self._open_grammars = open_grammars
        self._recorder = recorder
        self._by_local_id: dict[int, Request] = {}
        self._now = 0.0
        """The time at which ``schedule`` was last called."""

    # ------------------------------------------------------------ live requests

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_children(self) -> int:
        """Returns the number of requests that wait for their parents' prompts, and then for places like all others."""
        return self._queues.num_children

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_streams(self) -> int:
        """Returns the number of running requests of this node's own clients, not of other nodes."""
        return sum(not request.serves_push for request in self._queues.running)

    @property
    def decoding(self) -> tuple[int, int, OwnItl]:
        """Returns what ``Queues.decoding`` does."""
        return self._queues.decoding

    @property
    def num_remote(self) -> int:
        return len(self._queues.remote)

    @property
    def num_pushing(self) -> int:
        return len(self._queues.pushing)

    @property
    def queued_prompt_tokens(self) -> int:
        """Returns the number of tokens of all prompts, admitted or not, that are to be computed here."""
        return self._queues.uncomputed_prompt_tokens + sum(
            request.num_uncomputed_tokens for request in self._queues.waiting
        )

    def longest_wait_s(self, now: float) -> float:
        """Returns how long the oldest request has waited whose prompt nobody computes yet; 0 if there is none."""
        waiting = self._queues.waiting
        return max((now - request.arrived for request in waiting if request.facts.first_token_at is None), default=0.0)

    @property
    def blocks_wanted(self) -> list[int]:
        """Returns how many free blocks of each cache group live requests may need next.

        Those are what requests that wait need, and of whole contexts one for each that runs. Requests that are only
        fetched wait until there are more.
        """
        queues = self._queues
        waiting = [request for request in queues.waiting if not request.terms.fetch_only]
        missing = [self._blocks.missing_for(request, len(request.token_ids)) for request in waiting]
        growing = [self._blocks.missing_for(request, len(request.token_ids)) for request in queues.running]
        missing += [[1, *bounded] for _, *bounded in growing]
        return [sum(wanted) for wanted in zip(*missing, strict=True)] or [0] * len(self._blocks.free_by_group())

    def live(self) -> Iterator[Request]:
        """Yields every request that has not ended, and ended parents whose children wait for the prompt."""
        return self._queues.live()

    def next_deadline(self) -> float | None:
        return min((request.deadline for request in self.live()), default=None)

    def find(self, local_id: int) -> Request | None:
        return self._by_local_id.get(local_id)

    # ------------------------------------------------------------ a step

    def add(self, request: Request) -> None:
        """Queues a new request and its children."""
        for member in (request, *request.children):
            if member.local_id is not None:
                self._by_local_id[member.local_id] = member
        if self._recorder is not None:
            self._recorder.begin(request)
        self._queues.add(request)
        self._open_grammars(request)

    def schedule(self, now: float) -> BatchPlan:
        """Plans the next step. A plan without work means that there is nothing to do before the next event."""
        self._now = now
        # First, because until then the copies hold blocks that may be free otherwise.
        plan = BatchPlan(copies=self._blocks.take_copies(), chunk_end=self._blocks.chunk_end)
        preempted = self._preempted_for_turn(now)
        if preempted is not None:
            self._preempt(preempted)
        preemptions = self.counters.preemptions
        budget = StepBudget(self._max_num_batched_tokens, self._step_cost, self._targets)
        self._schedule_running(plan, budget, now)
        # What was just preempted is not admitted again at once, unless nothing else is left to do.
        if self.counters.preemptions == preemptions or not plan.work:
            self._admit(plan, budget, now)
        if any(work.num_tokens > 1 for work in plan.work):
            plan.work.sort(key=lambda work: work.is_chunk)
        self.speculation.add_drafts(plan, budget)
        plan.refused.extend(self._orders_without_blocks())
        return plan

    def _admit(self, plan: BatchPlan, budget: StepBudget, now: float) -> None:
        """Admits waiting requests, those among them that begin to wait because their parents were only to be fetched.

        No event would follow that admits them later.
        """
        ended, children_wait = 0, True
        while children_wait:
            self._admission.admit(plan, budget, now)
            fetched, ended = plan.fetched[ended:], len(plan.fetched)
            children_wait = any(request.children for request in fetched)
            for request in fetched:
                self._end_fetched(request)

    def _orders_without_blocks(self) -> list[Request]:
        """Returns the waiting orders of other nodes for which only fetches of this node hold blocks.

        Those nodes may wait for blocks in the same way, with this node's fetches among their orders: none would end.
        """
        queues = self._queues
        if not queues.remote or queues.running or queues.pushing:
            return []
        return [request for request in queues.waiting if request.serves_push and not request.awaits_grammar]

    def schedule_ahead(
        self, under_way: BatchPlan, can_follow: Callable[[Request], bool], now: float
    ) -> BatchPlan | None:
        """Plans the step after one that is under way, whatever tokens that one gives.

        Requests of that step go on where it ends. Those that decode follow with the token that they get there, if they
        ``can_follow``; the others are in the step after, unless they are the most. A request whose next token is
        certain to be its last is left out. Others join as in any step, but none is preempted.

        Returns None, or a plan without work, if the next step has to be planned once the tokens are known.
        """
        if not self._can_plan_ahead(under_way, now):
            return None
        self._now = now
        plan = BatchPlan(copies=self._blocks.take_copies(), chunk_end=self._blocks.chunk_end)
        budget = StepBudget(self._max_num_batched_tokens, self._step_cost, self._targets)
        followed = self._following(under_way, can_follow, budget)
        if followed is not None and self._plan_beside(followed, under_way, plan, budget, now):
            self._admit(plan, budget, now)
            if not any(work.replays or work.scored_tokens for work in plan.work):
                others = sorted(plan.work, key=lambda work: work.is_chunk)
                return dataclasses.replace(plan, work=followed + others, num_following=len(followed))
        # Blocks that were taken stay taken. The next step looks at these requests first.
        plan.work.clear()
        return plan

    def _can_plan_ahead(self, under_way: BatchPlan, now: float) -> bool:
        """Returns whether nothing that the step under way gives decides which requests run in the next one."""
        if self._static or not under_way.work or self._preempted_for_turn(now) is not None:
            return False
        for work in under_way.work:
            request = work.request
            if work.drafts or work.replays or request.local_id is None:
                return False
            if request.children and work.start + work.num_tokens >= request.num_prompt_tokens:
                # Its children begin behind it.
                return False
        return not self.speculation.is_hopeful(under_way.sampled_requests)

    def _following(
        self, under_way: BatchPlan, can_follow: Callable[[Request], bool], budget: StepBudget
    ) -> list[Work] | None:
        """Returns the work of requests that decode on with what the step under way gives them.

        Returns None if there are too few blocks, or most of these requests cannot follow.
        """
        followed, waiting, context_tokens, noted = list[Work](), 0, 0, None
        for work in under_way.work:
            request, length = work.request, len(work.request.token_ids)
            start = request.num_computed_tokens if work.at is None else work.at
            if start + work.num_tokens < length or self._stop.next_is_last(request):
                continue
            if not can_follow(request):
                waiting += 1
                continue
            if not self._blocks.reserve(request, length + 1):
                return None
            followed.append(Work(request, 1, at=length))
            context_tokens += length + 1
            if (own := request.terms.own_targets) is not noted:
                budget.decode_for(own)
                noted = own
        budget.spend_rows(len(followed), context_tokens)
        return None if waiting > len(followed) else followed

    def _plan_beside(
        self, followed: Sequence[Work], under_way: BatchPlan, plan: BatchPlan, budget: StepBudget, now: float
    ) -> bool:
        """Plans what runs already, beside requests that decode on with what the step under way gives them.

        Returns False if there are too few blocks.
        """
        if len(followed) == len(self._queues.running):
            return True
        ends = {work.request: work.start + work.num_tokens for work in under_way.work}
        others, prompts = list[Request](), list[Request]()
        for request in self._queues.running:
            computed = ends.get(request, request.num_computed_tokens)
            # Those that follow, or end with the token that comes, are computed as far as they are known.
            if request not in ends or computed < len(request.token_ids):
                (prompts if computed < request.num_prompt_tokens else others).append(request)
        if not self._plan_running(others, plan, budget, ends):
            return False
        if prompts:
            self._admission.admit_short(plan, budget, now)
        return self._plan_running(prompts, plan, budget, ends)

    def postprocess(
        self, plan: BatchPlan, sampled: Sequence[SampledToken | None], now: float, drafted: Drafted | None = None
    ) -> list[Request]:
        """Takes the tokens of a computed step: ``sampled`` has one for each of the plan's ``sampled_requests``.

        ``drafted`` has the tokens after the plan's drafts, if there are any.

        A request for which there was no token (None) goes on later if it ``awaits_mask``. Returns those that cannot go
        on: what a grammar ends, which is one answer, or all that another node ordered, and otherwise also the children.
        """
        self._note_chunks(plan, now)
        tokens = iter(sampled)
        failed = []
        for work in plan.work:
            request, members = work.request, work.sampled_requests
            if len(members) == 1 and not (work.drafts or request.children):
                taken = [(request, next(tokens))]
                if (token := taken[0][1]) is not None:
                    # As nearly always: the request's own next token.
                    self._blocks.computed(request, request.num_computed_tokens + work.num_tokens)
                    self.accept_token(request, token, now)
                    self.finish_if_resumed_over(request)
                    continue
            else:
                taken = [(member, next(tokens)) for member in members]
            missing = [member for member, token in taken if token is None]
            awaited, refused = list[Request](), list[Request]()
            if missing:
                awaited = [member for member in missing if member.awaits_mask]
                others = [member for member in missing if not member.awaits_mask]
                refused = [member for member in others if member.grammar_failure is not None]
            faulty = len(missing) > len(awaited) + len(refused)
            if not faulty:
                # Otherwise no block is given back, or found again, before all of them are cleared.
                final = work.num_tokens
                if awaited:
                    final = work.num_final_tokens(keeps_states=self._blocks.keeps_states)
                self._blocks.computed(request, request.num_computed_tokens + final)
            if work.drafts and drafted is not None and not faulty:
                failed += self._take_with_drafts(work, taken[0][1], drafted, now)
                continue
            for member, token in taken:
                if token is not None:
                    self.accept_token(member, token, now)
            if faulty or (refused and request.serves_push):
                # The children fail too: it is the prompt's blocks that are at fault, or one push has all first tokens.
                failed += [request, *request.children]
            else:
                failed += refused
                if request.children:
                    self._settle_children(request)
                self.finish_if_resumed_over(request)
        return failed

    def _take_with_drafts(self, work: Work, token: SampledToken | None, drafted: Drafted, now: float) -> list[Request]:
        """Takes a request's token, and those after its drafts as far as the drafts are what plain decoding gives.

        Returns the request if it cannot go on.
        """
        request, before, drafts = work.request, len(work.request.token_ids), work.drafts
        finite = drafted.are_finite(request)
        if not finite:
            self._blocks.taint(request)
        self.counters.drafts += len(drafts)
        request.facts.drafts += len(drafts)
        number = 0
        while token is not None:
            if number:
                self._count_accepted(request, number)
                self._blocks.computed(request, before + number)
            self.accept_token(request, token, now)
            if request.ended or number == len(drafts) or token.token_id != drafts[number]:
                break
            number += 1
            token = drafted.after(request, number)
        self._blocks.drop_drafts(request)
        if token is None and not request.awaits_mask:
            return [request]
        if not finite and not request.ended:
            # What a wrong draft has left behind the answer must not stay there. Its blocks are cleared.
            request.may_draft = False
            self._preempt(request)
        return []

    def _count_accepted(self, request: Request, number: int) -> None:
        """Counts a request's draft, the one with this number in its step."""
        self.counters.accepted_drafts_by_place[number - 1] += 1
        request.facts.accepted_drafts += 1

    def _note_chunks(self, plan: BatchPlan, now: float) -> None:
        for work in reversed(plan.work):
            if not work.is_chunk:  # as all that come before it
                break
            if (notes := work.request.notes) is not None:
                notes.chunk(self._now, now, work.num_tokens)

    def move_wanted(self, now: float, step_s: float) -> Sequence[MoveWanted]:
        """Returns the client requests that should leave this node now, if blocks run out soon (``block_shortage``)."""
        wanted = self._shortage.look(now, step_s)
        self.counters.moves_wanted += len(wanted)
        return wanted

    def scored(self, request: Request, logprobs: PromptLogprobs) -> None:
        """Takes log probabilities of the prompt's next tokens. The client gets them when it can have all of them."""
        request.scores.append(logprobs)
        request.num_scored_tokens += logprobs.num_tokens
        if request.local_id is not None and not request.needs_scores:
            if not request.ended:
                self._collector.prompt_logprobs(request.local_id, joined(request.scores))
            request.scores = []

    def accept_token(self, request: Request, token: SampledToken, now: float) -> None:
        """Appends a sampled token, tells the client, and ends the request if this was its last token."""
        if request.facts.first_token_at is None:
            request.facts.first_token_at = now
            self._count_prompt(request)
        request.token_ids.append(token.token_id)
        if request.local_id is None:
            # The node that answers counts this token, too.
            request.first_token = token
            return
        self.counters.generated_tokens += 1
        self._collector.token(request, token)
        self.finish_if_over(request)

    def _count_prompt(self, request: Request) -> None:
        """Counts the prompt of an answer that begins.

        The node that answers counts it, once, also where another has computed it, or goes on with the answer later.
        """
        if request.parent is not None or request.serves_push or request.num_emitted_tokens:
            return
        counters, cached, transferred = self.counters, request.facts.cached_tokens, 0
        if request.facts.prefill_source is PrefillSource.REMOTE:
            # What the prefill node had in its own cache came from there, too.
            cached = request.first_block * self._blocks.block_size
            transferred = request.num_prompt_tokens - cached
        counters.prompt_tokens += request.num_prompt_tokens
        counters.cached_prompt_tokens += cached
        counters.transferred_prompt_tokens += transferred

    # ------------------------------------------------------------ remote prefill

    def landed(self, request: Request) -> None:
        """Lets a request go on, or wait for a place, once its fetched prompt is in the cache and its token known."""
        self._blocks.computed(request, request.num_prompt_tokens)
        self._queues.move(request, Status.RUNNING if self._admission.has_place else Status.WAITING)
        self._settle_children(request)
        self.finish_if_resumed_over(request)

    def requeue(self, request: Request, computed_tokens: int) -> None:
        """Queues a request again whose fetch has failed after ``computed_tokens``; the request keeps its blocks."""
        # The last block that a fetch brings holds nothing of the answer, though it is not full.
        fetched = min(computed_tokens, request.num_prompt_tokens)
        if request.needs_scores:
            fetched = min(fetched, self._blocks.whole_blocks(request.num_scored_tokens))
        self._blocks.computed(request, self._blocks.usable(request, min(fetched, len(request.token_ids) - 1)))
        self._queues.move(request, Status.WAITING)
        # The log probabilities of the prompt may have come before its fetch failed.
        self.finish_if_resumed_over(request)

    def reused(self, request: Request, computed_tokens: int) -> None:
        """Queues a request again that has the blocks of its first ``computed_tokens``, all that a holder had."""
        self._blocks.computed(request, self._blocks.usable(request, computed_tokens))
        self._queues.move(request, Status.WAITING)
        self._settle_children(request)

    def pushed_all(self, request: Request) -> None:
        """Keeps the blocks of a prompt that this prefill node has computed until the push ends."""
        self._queues.move(request, Status.PUSHING)

    # ------------------------------------------------------------ endings

    def finish_if_over(self, request: Request) -> None:
        """Ends a request if the last token of its answer ends it."""
        reason = self._stop.ending(request)
        if reason is not None:
            self.finish(request, reason)

    def finish_if_resumed_over(self, request: Request) -> None:
        """Ends a resumed request whose last token the client has, unless log probabilities of its prompt are missing.

        Then the request ends when it has those.
        """
        if not request.num_emitted_tokens:
            return
        goes_on = request.num_generated_tokens > request.num_emitted_tokens or request.needs_scores
        if not goes_on and not request.ended:
            self.finish_if_over(request)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request and tells its client why."""
        if self._end(request, reason.value):
            if request.parent is None and not request.terms.fetch_only and reason is not FinishReason.PREFILL_LOST:
                self.counters.prefills[request.facts.prefill_source] += 1
            self._collector.ending(request, reason, error)

    def abort(self, request: Request) -> None:
        """Ends a request whose client is gone."""
        if self._end(request, "aborted"):
            self._collector.forget(request)

    def expired(self, now: float) -> list[Request]:
        """Returns the requests that are past their deadline."""
        return [request for request in self.live() if request.deadline <= now]

    def _end(self, request: Request, outcome: str) -> bool:
        if request.ended:
            return False
        request.ended = True
        if self._recorder is not None:
            self._recorder.end(request, outcome)
        if request.local_id is not None:
            del self._by_local_id[request.local_id]
            if request.children:
                return True
        self._retire(request)
        return True

    def _end_fetched(self, request: Request) -> None:
        """Ends a request that was only to be fetched; its children's blocks are fetched after those of the prompt."""
        for child in list(request.children):
            self._queues.move(child, Status.WAITING)
        if request.ended:
            self._retire(request)
        else:
            self.finish(request, FinishReason.LENGTH)

    def _retire(self, request: Request) -> None:
        """Takes an ended request out of its queue and gives its blocks to the connector, which frees them."""
        parent = request.parent if request.status is Status.WAITING_FOR_PROMPT else None
        self._queues.move(request, Status.FINISHED)
        self._release(request)
        if parent is not None and parent.ended and not parent.children and parent.status is not Status.FINISHED:
            self._retire(parent)

    # ------------------------------------------------------------ running requests

    def _schedule_running(self, plan: BatchPlan, budget: StepBudget, now: float) -> None:
        """Plans work of running requests: all that decode, then replays, then prompts."""
        running = self._queues.running
        left = [(request, len(request.token_ids) - request.num_computed_tokens) for request in running]
        decoding = [request for request, tokens in left if tokens == 1]
        others = [request for request, tokens in left if tokens > 1]
        # A client who has read a part of its answer waits longest for the rest.
        replays = [request for request in others if request.prompt_is_computed]
        prompts = [request for request in others if not request.prompt_is_computed]
        if self._static:
            # A static batch decodes when nothing else is left to compute, or there are no blocks for it.
            self._plan_running(replays + prompts, plan, budget)
            if not plan.work:
                self._plan_running(decoding, plan, budget)
            return
        preemptions = self.counters.preemptions
        self._plan_running(decoding + replays, plan, budget)
        if prompts and self.counters.preemptions == preemptions:
            self._admission.admit_short(plan, budget, now)
        self._plan_running(prompts, plan, budget)

    def _plan_running(
        self,
        requests: Sequence[Request],
        plan: BatchPlan,
        budget: StepBudget,
        ends: Mapping[Request, int] | None = None,
    ) -> bool:
        """Plans work of these requests. Returns False if there are too few blocks in a plan made ahead.

        Such a plan has ``ends``: where the step under way ends in each request that it has work of. For it, nothing is
        preempted.
        """
        for request in requests:
            if request.status is not Status.RUNNING:
                continue
            if request.sampling.grammar is not None and request.awaits_grammar:
                continue
            at = None if ends is None else ends.get(request)
            work = plan.next_work(request, budget.for_request(request, at), at)
            if work is None:
                continue
            tokens = work.start + work.num_tokens
            if not self._blocks.reserve(request, tokens):
                if ends is not None:
                    return False
                if not self._find_blocks(request, tokens, plan):
                    continue
            plan.work.append(work)
            budget.spend(work)
        return True

    def _find_blocks(self, request: Request, tokens: int, plan: BatchPlan) -> bool:
        """Grows a running request's block table; blocks come from waiting requests, then from the youngest running.

        A request that serves a push got all its blocks of whole contexts when it was admitted, and gives none away: it
        ends by itself when the other node has them. Returns False if the request itself had to be preempted, or waits.
        """
        while not self._blocks.reserve(request, tokens):
            if self._admission.take_back_blocks(keep=request):
                continue
            if request.serves_push:
                # It waits for blocks of windows or states, which others give back as they go on.
                return False
            planned = {work.request for work in plan.work}
            others = (
                other for other in reversed(self._queues.running) if other not in planned and not other.serves_push
            )
            victim = max(others, key=self._queues.places_of, default=request)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempted_for_turn(self, now: float) -> Request | None:
        """Returns the request that has to give its place and blocks to a client request that has no place.

        Returns None unless the next in turn has no place and cannot be admitted, while another client request has
        several places. Nothing that runs here gives way to another node's order, or to blocks that are only fetched.
        """
        if self._static or not self._queues.any_without_place:
            return None
        youngest = self._queues.most_placed()
        if youngest is None:
            return None
        first = self._admission.next_in_turn(now)
        if first is None or first.serves_push:
            return None
        if self._queues.places_of(first) or self._admission.can_admit(first):
            return None
        return youngest

    def _preempt(self, request: Request) -> None:
        self.counters.preemptions += 1
        if request.notes is not None:
            request.notes.moment(MomentKind.PREEMPTED, self._now)
        request.num_computed_tokens, request.own_text = 0, None
        self._queues.move(request, Status.WAITING)
        self._release(request)

    # ------------------------------------------------------------ children

    def _settle_children(self, parent: Request) -> None:
        """Makes children requests like any other once their parent's prompt is in the cache."""
        if not parent.children or parent.local_id is None or not parent.prompt_is_computed:
            return
        for child in list(parent.children):
            ready = child.num_generated_tokens and self._admission.has_place and self._queues.before_waiting(child)
            forked = (
                ready
                and not child.may_ask_holders
                and self._admission.fits_bounded(child)
                and self._blocks.fork(parent, child)
            )
            self._queues.move(child, Status.RUNNING if forked else Status.WAITING)
            if forked:
                self._admission.count_reused(child)
        if parent.ended:
            self._retire(parent)
