"""An engine around the real scheduler, blocks and connectors, with a fake model and a scripted transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.config import Batching, KvOverlap, SchedulerConfig, Speculate
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_table import StateTable
from pdserve.engine.kv_connector import KvConnector
from pdserve.engine.kv_connector.connector import NoTransferConnector
from pdserve.engine.kv_connector.prompt_fetcher import PromptFetcher
from pdserve.engine.kv_connector.prompt_pusher import PromptPusher, PushSchedule
from pdserve.engine.kv_connector.transfers import BlockOrder
from pdserve.engine.launched_step import goes_on, step_rows
from pdserve.engine.placement.placement import Placement
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan, Work
from pdserve.engine.scheduling.output_collector import OutputCollector
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.wire.cache_groups import GroupBlocks
from pdserve.wire.engine import FinishReason, RequestOutput
from pdserve.wire.ids import new_id
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken, SamplingParams
from pdserve.wire.terms import NO_OWN_TARGETS, PrefillTarget, RequestTargets
from pdserve.wire.transfer import FailureCause
from tests.engine.fake_model import EOS, FakeModel, choose, prompt_logprobs
from tests.engine.placements import make_placement
from tests.engine.whole_connector import whole_connector
from tests.terms import PREPARE, made_terms

BLOCK_SIZE = 4
BOOT = new_id()
TARGET = PrefillTarget("p0", "tcp://127.0.0.1:1", new_id())


@dataclass(frozen=True)
class FakeLaunchedStep:
    plan: BatchPlan
    sampled: list[SampledToken]
    scored: list[tuple[Request, PromptLogprobs]] = field(default_factory=list)


@dataclass(frozen=True)
class FakeStepAhead:
    """A ``launched_step.StepAhead`` whose tokens are known already."""

    step: FakeLaunchedStep
    requests: list[Request]

    def joined(self) -> FakeLaunchedStep:
        token_of = dict(zip(self.requests, self.step.sampled, strict=True))
        works = [Work(work.request, work.num_tokens) for work in self.step.plan.work if goes_on(work)]
        return FakeLaunchedStep(
            BatchPlan(works), [token_of[request] for work in works for request in work.sampled_requests]
        )


@dataclass
class FakeGrammars:
    """A ``GrammarOpener`` that a test tells which requests can have no matcher, and why."""

    refused: list[tuple[Request, str]] = field(default_factory=list)

    def open(self, parent: Request) -> None:
        """A request without a grammar needs no matcher."""

    def take(self) -> list[tuple[Request, str]]:
        refused, self.refused = self.refused, []
        return refused


class FakeEngine:
    """One engine whose ``step`` does what a turn of the step loop does."""

    def __init__(
        self,
        *,
        thread: Any = None,
        num_blocks: int = 32,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_len: int = 64,
        batching: Batching = Batching.CONTINUOUS,
        prefix_cache: bool = True,
        overlap: bool = False,
        placement: Placement | None = None,
        groups: Sequence[GroupBlocks] = (),
    ) -> None:
        """``groups`` are the model's cache groups; without them it has one, of ``num_blocks``."""
        num_blocks = groups[0].count if groups else num_blocks
        self.blocks = BlockManager(
            num_blocks,
            BLOCK_SIZE,
            prefix_cache=prefix_cache,
            bounded=groups[1:],
            block_bytes=groups[0].block_bytes if groups else 0,
        )
        self.model = FakeModel(num_blocks, BLOCK_SIZE, groups)
        order = BlockOrder(BLOCK_SIZE, [group.spec for group in groups])
        placement = placement or make_placement(BLOCK_SIZE)
        self.connector: KvConnector
        if thread is None:
            self.connector = NoTransferConnector(self.blocks)
        else:
            pushing = PromptPusher(
                self.blocks,
                thread,
                lambda ids, sampling: None,
                1000,
                PushSchedule(KvOverlap.ON),
                placement,
                order=order,
            )
            fetching = PromptFetcher(self.blocks, thread, 30.0, BOOT, placement, order=order)
            self.connector = whole_connector(thread, self.blocks, fetching, pushing, BOOT, order=order)
        self.collector = OutputCollector()
        self.max_len = max_len
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=100,
            batching=batching,
            speculation=Speculate.OFF,  # a fake step gives one token of each request
        )
        stop = StopRule(frozenset({EOS}), max_len)
        self.grammars = FakeGrammars()
        self.scheduler = Scheduler(
            self.blocks, config, stop, self.collector, self.connector.release, placement, self.grammars.open
        )
        self.outputs: dict[int, list[int]] = {}
        self.endings: dict[int, RequestOutput] = {}
        self.scores: dict[int, PromptLogprobs] = {}
        """The log probabilities that came for prompts, by the parents' ``local_id``."""
        self.now = 0.0
        self._overlap = overlap
        self._ahead: FakeStepAhead | None = None
        self.num_ahead = 0
        """Steps that were launched before the tokens of the one before were known."""
        self.can_follow: Callable[[Request], bool] = lambda _: True
        """Whether a request's next token can be sampled before its last one is known."""

    def add(
        self,
        local_id: int,
        prompt: Sequence[int],
        max_tokens: int = 4,
        seeds: Sequence[int] = (0,),
        *,
        salt: str = "",
        remote: bool = False,
        group_id: int = 0,
        emitted: Sequence[Sequence[int]] = (),
        holders: int = 0,
        fetch_only: bool = False,
        scored: bool = False,
        movable: bool = False,
        priority: int = 0,
        own_targets: RequestTargets = NO_OWN_TARGETS,
        deadline_s: float = 10_000,
    ) -> Request:
        """Adds one prompt. Its answers are ``local_id``, ``local_id + 1`` and so on, one for each seed.

        ``emitted`` has the tokens that each answer's client has from another node. A turn takes one second.
        """
        own, *others = emitted or [()] * len(seeds)
        request = Request(
            uuid=new_id(),
            token_ids=[*prompt, *own],
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, seed=seeds[0], prompt_logprobs=0 if scored else None),
            arrived=self.now,
            terms=made_terms(
                deadline_s,
                cache_salt=salt,
                priority=priority,
                own_targets=own_targets,
                prefill=(TARGET, TARGET) if remote else (),
                holders=(TARGET,) * holders,
                resume=PREPARE if fetch_only else None,
                movable=movable,
            ),
            local_id=local_id,
            group_id=group_id or b"",
            num_emitted_tokens=len(own),
        )
        for i, (seed, tokens) in enumerate(zip(seeds[1:], others, strict=True), 1):
            request.add_child(seed, local_id + i, tokens)
        self.scheduler.add(request)
        for member in [request, *request.children]:
            self.scheduler.finish_if_resumed_over(member)
        return request

    def step(self) -> BatchPlan:
        """Does what a turn of ``StepLoop.run`` does, in its order (``test_fake_engine.py``)."""
        self.now += 1
        self.connector.poll(self.scheduler, self.now)
        self._expire()
        self._take_grammars()
        step = self._launch() if self._ahead is None else self._ahead.joined()
        self._ahead = None if step is None else self._launch_ahead(step)
        if step is not None:
            self._postprocess(step)
        self.blocks.clean(self.model.clear)
        self.collect()
        return BatchPlan() if step is None else step.plan

    def _expire(self) -> None:
        for request in self.scheduler.expired(self.now):
            self.connector.give_up(request, "deadline passed", FailureCause.DEADLINE)
            self.scheduler.finish(request, FinishReason.DEADLINE)

    def _take_grammars(self) -> None:
        for request, why in self.grammars.take():
            self.connector.give_up(request, why, FailureCause.PROMPT)
            self.scheduler.finish(request, FinishReason.REFUSED, why)

    def _launch(self) -> FakeLaunchedStep | None:
        plan = self.scheduler.schedule(self.now)
        self._begin(plan)
        if not plan.work:
            return None
        scored = [
            (work.request, prompt_logprobs(work.request.token_ids, work.scored_tokens))
            for work in plan.work
            if work.scored_tokens
        ]
        return FakeLaunchedStep(plan, [token for work in plan.work for token in self._compute(work)], scored)

    def _begin(self, plan: BatchPlan) -> None:
        if plan.copies:
            self.model.copy(plan.copies)
        self.connector.start(plan, self.now)
        for request in plan.refused:
            self.connector.give_up(request, "overloaded", FailureCause.LOAD)
            self.scheduler.abort(request)

    def _launch_ahead(self, step: FakeLaunchedStep) -> FakeStepAhead | None:
        """Does what ``launched_step.launch_ahead`` does, on tokens that the scheduler does not know yet."""
        if not self._overlap:
            return None
        plan = self.scheduler.schedule_ahead(step.plan, self.can_follow, self.now)
        if plan is None:
            return None
        self._begin(plan)
        if not plan.work:
            return None
        self.num_ahead += 1
        token_of = dict(zip(step.plan.sampled_requests, step.sampled, strict=True))
        sampled = [
            self._compute_ahead(work.request, token_of[work.request]) for work in plan.work[: plan.num_following]
        ]
        sampled += [token for work in plan.work[plan.num_following :] for token in self._compute(work)]
        requests = [request for work in plan.work for request in work.sampled_requests]
        return FakeStepAhead(FakeLaunchedStep(plan, sampled), requests)

    def _postprocess(self, step: FakeLaunchedStep) -> None:
        for request, logprobs in step.scored:
            self.scheduler.scored(request, logprobs)
        assert self.scheduler.postprocess(step.plan, step.sampled, self.now) == []
        self.connector.stepped(self.scheduler, step.plan, self.now)

    def _compute_ahead(self, request: Request, unread: SampledToken) -> SampledToken:
        start, known = len(request.token_ids), [*request.token_ids, unread.token_id]
        assert start < min(len(request.block_table) * BLOCK_SIZE, self.max_len)
        assert self.blocks.num_holders(request.block_table[start // BLOCK_SIZE]) == 1
        table = request.block_table
        self._check_written(request, start, len(known))
        (digest,) = self.model.run(
            known, start, known[start:], table, request.terms.prompt.cache_salt, table.row_tables()
        )
        return SampledToken(choose(digest, request.sampling.seed))

    def _compute(self, work: Work) -> list[SampledToken]:
        """Returns the tokens of one work's sampled requests."""
        request, start = work.request, work.start
        known = request.token_ids[start : start + work.num_tokens]
        end = start + len(known)
        assert end <= len(request.block_table) * BLOCK_SIZE
        assert end <= self.max_len
        assert not work.is_chunk or end <= request.num_prompt_tokens, "a chunk has tokens of an answer"
        self._check_written(request, start, end)
        salt = request.terms.prompt.cache_salt
        digests: list[int] = []
        for row in step_rows(work, True):
            digests = self.model.run(request.token_ids, row.start, row.token_ids, row.block_table, salt, row.others)
        return [SampledToken(choose(digests[-1], member.sampling.seed)) for member in work.sampled_requests]

    def _check_written(self, request: Request, start: int, end: int) -> None:
        """Checks that a step which computes the tokens from ``start`` to ``end`` writes to blocks of the request."""
        written = list(request.block_table[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
        for held in request.block_table.others:
            written += (
                [held.next, *held.drafted]
                if isinstance(held, StateTable)
                else held[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
            )
        for block in written:
            assert self.blocks.num_holders(block) == 1, "a step writes to a shared block"

    def collect(self) -> None:
        step = self.collector.take()
        for output in step.outputs if step else []:
            assert output.local_id not in self.endings
            if output.prompt_logprobs is not None:
                assert not self.outputs.get(output.local_id), "tokens came before the prompt's log probabilities"
                self.scores[output.local_id] = output.prompt_logprobs
            self.outputs.setdefault(output.local_id, []).extend(output.new_token_ids)
            if output.finish is not None:
                self.endings[output.local_id] = output

    def run(self, limit: int = 3000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(limit):
            # Everything that a step launched ahead decodes may have ended in the step before it.
            was_ahead = self._ahead is not None
            if not self.step().work and not was_ahead:
                return
        raise AssertionError("the scheduler does not come to an end")

    @property
    def idle(self) -> bool:
        """Returns whether no request lives and every block is free."""
        free = all(pool.num_free == len(pool.ids) for pool in self.blocks.pools)
        return free and not list(self.scheduler.live())
