"""Runs the engine's steps: receive, schedule, launch, postprocess, send.

Each turn of ``StepLoop.run`` is one step. With nothing to compute it blocks until the API process, the transfer thread,
a deadline or a signal has something for it, so an idle engine uses no CPU but for showing life once a second.

A step is launched, and its tokens are read later. On a GPU the loop has work of its own in between: it sends the tokens
of the step before, and, while nothing but decoding is to be done, it launches the next step as well
(``launched_step``), so that the GPU goes from one step to the next without waiting for the host.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
import zmq

from pdserve.config import SchedulerConfig
from pdserve.engine.api_channel import ApiChannel, WakeUp
from pdserve.engine.core_lending import Cores, OwnCores
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector import KvConnector
from pdserve.engine.launched_step import (
    AheadDrafter,
    AheadRunner,
    DraftRunner,
    LaunchedStep,
    StepAhead,
    StepRunner,
    Tables,
    UnderWay,
    complete_ahead,
    complete_late,
    decodes_on,
    known_rows,
    launch,
    launch_ahead,
    tables_of_prompts,
)
from pdserve.engine.placement.latency_targets import LatencyTargets, OwnItl
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request
from pdserve.engine.sampling.grammar_opener import GrammarOpener
from pdserve.engine.sampling.token_choice import guess
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.output_collector import OutputCollector, TimelineRecorder
from pdserve.engine.scheduling.request_limits import PromptRule, StopRule
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.speculation.draft_model import DraftModel
from pdserve.errors import EngineError
from pdserve.liveness import SHOWN_EVERY_MS, LifeSign, unseen_sign
from pdserve.machine.memory import REST_S
from pdserve.wire.discovery import LinkCounts
from pdserve.wire.engine import (
    STEP_TOKEN_BOUNDS,
    Abort,
    AskStats,
    Assign,
    EngineStats,
    FinishReason,
    Meet,
    Renew,
    Shutdown,
    Stats,
    StepStats,
    Submit,
)
from pdserve.wire.engine_counts import CacheStats, CoreStats, QueueStats, ReturnCounts, SchedulerCounts, TransferCounts
from pdserve.wire.transfer import FailureCause

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
REST_MS = int(REST_S * 1000)

NOT_FINITE = "the model's logits are not finite"
NO_BLOCKS = "overloaded: all blocks wait for prompts that other nodes compute"

FIRST_STEP_S = 60.0
"""The first step of its kind, of about as many requests and tokens, may take so long: kernels may be compiled."""
LONGER = 5.0
"""A later step may take so many times what steps like it took."""


class StepWatch:
    """Learns from each step what steps cost, and counts how those with prompts beside streams kept the ITL target.

    It takes the plan and the time of each step before the plan's requests move on. Before a step, it says for how long
    that may keep the step loop from showing life.
    """

    def __init__(self, step_cost: StepCost, targets: LatencyTargets, ranks_s: float = 0.0) -> None:
        """``ranks_s`` is how long another rank may keep this one waiting in a step."""
        self._step_cost = step_cost
        self._ranks_s = ranks_s
        self._kinds: set[tuple[int, int, bool]] = set()
        """The kinds of steps that there were."""
        self._targets = targets
        self._target_s = 0.0
        self._shared = 0
        self._shared_prompt_tokens = 0
        self._shared_late = 0
        self._num_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._tokens = 0
        self._computed_prompt_tokens = 0

    def expected_s(self, plan: BatchPlan, drafting: bool = False) -> float:
        """Returns how long a step that is about to be computed may take, generously.

        ``drafting`` asks for how long the model may take to draft what follows it.
        """
        # Chunks are few. To add up the contexts of all requests would cost more than this is worth.
        chunks = plan.chunks
        tokens = sum(work.num_tokens for work in chunks)
        rows = len(plan.work) + sum(len(work.drafts) for work in plan.work)
        kind = (rows.bit_length(), tokens.bit_length(), drafting)
        least_s = 0.0 if kind in self._kinds else FIRST_STEP_S
        self._kinds.add(kind)
        before = max((work.request.num_computed_tokens for work in chunks), default=0)
        cost = self._step_cost
        decoding_s = cost.decode_step_s * rows / max(1, len(plan.work))
        return max(least_s, LONGER * (decoding_s + cost.prompt_s(tokens, before))) + self._ranks_s

    def count(self, plan: BatchPlan) -> None:
        """Counts the tokens of a step."""
        tokens = sum([work.num_tokens + len(work.drafts) for work in plan.work])
        prompts = [work for work in plan.work if work.request.num_computed_tokens < work.request.num_prompt_tokens]
        self._computed_prompt_tokens += sum(work.num_tokens for work in prompts)
        self._tokens += tokens
        self._num_tokens[bisect_left(STEP_TOKEN_BOUNDS, tokens)] += 1

    def note(self, plan: BatchPlan, seconds: float, now: float) -> None:
        """Notes a step that took ``seconds`` until ``now``."""
        rows, context_tokens, prompt_tokens = plan.num_decoding, plan.context_tokens, plan.num_prompt_tokens
        decoding = [work.request for work in plan.work if work.num_tokens == 1 and work.request.prompt_is_computed]
        if decoding:
            own = OwnItl.of([request.terms.own_targets for request in decoding])
            self._target_s = self._targets.itl_s(rows, context_tokens, own) or 0.0
        if decoding and prompt_tokens:
            self._shared += 1
            self._shared_prompt_tokens += prompt_tokens
            self._shared_late += 0 < self._target_s < seconds
        self._step_cost.observe(
            rows, context_tokens, prompt_tokens, seconds, prompt_context=plan.prompt_context, now=now
        )

    def stats(self) -> StepStats:
        return StepStats(
            num_tokens=tuple(self._num_tokens),
            tokens=self._tokens,
            computed_prompt_tokens=self._computed_prompt_tokens,
            shared=self._shared,
            shared_prompt_tokens=self._shared_prompt_tokens,
            shared_late=self._shared_late,
            itl_target_s=self._target_s,
            parts=self._step_cost.parts,
        )


class StepLoop:
    """Connects the parts of one engine. It owns only the scheduler."""

    def __init__(
        self,
        *,
        api: ApiChannel,
        wake_up: WakeUp,
        runner: StepRunner,
        blocks: BlockManager,
        connector: KvConnector,
        config: SchedulerConfig,
        stop: StopRule,
        prompts: PromptRule,
        placement: Placement,
        ahead_runner: AheadRunner | None = None,
        ahead_drafter: AheadDrafter | None = None,
        drafter: DraftRunner | None = None,
        draft_model: DraftModel | None = None,
        renew: Callable[[bytes], None] = lambda _: None,
        grammars: GrammarOpener,
        cores: Cores | None = None,
        give_back: Callable[[], object] | None = None,
        recorder: TimelineRecorder | None = None,
        life: LifeSign | None = None,
        ranks_s: float = 0.0,
    ) -> None:
        """``ahead_runner`` is ``runner`` if decode steps are to be launched before the tokens of the last are known.

        Everything else that writes to the KV cache then has to do it behind the steps that were launched before.
        ``drafter`` is the runner if the model drafts tokens after its steps, and ``draft_model`` what drafts instead.
        ``ahead_drafter`` is ``ahead_runner`` if the model drafts.
        ``give_back`` gives free memory back. It is called once when nothing was to be done for a while.
        ``renew`` takes a new cluster secret. Without a ``recorder`` no timelines are noted. ``life`` is where the loop
        shows life, and ``ranks_s`` how long another rank may keep it waiting.
        """
        self._api = api
        self._wake_up = wake_up
        self._runner = runner
        self._ahead_runner = ahead_runner
        if ahead_runner is not None and blocks.keeps_states:
            # A token that turns out to be refused would be in the state already.
            raise EngineError("steps of a model that keeps states cannot be launched ahead of their tokens")
        self._drafter, self._ahead_drafter, self._draft_model = drafter, ahead_drafter, draft_model
        self._blocks = blocks
        self._connector = connector
        self._collector = OutputCollector()
        self._recorder = recorder
        self._scheduler = Scheduler(
            blocks,
            config,
            stop,
            self._collector,
            connector.release,
            placement,
            grammars.open,
            recorder,
            model_drafts=drafter is not None or draft_model is not None,
        )
        self._grammars = grammars
        self._cores = OwnCores() if cores is None else cores
        self._prompts = prompts
        self._renew = renew
        self._placement = placement
        self._watch = StepWatch(placement.step_cost, placement.targets, ranks_s)
        self._eos_token_ids = stop.eos_token_ids
        self._give_back = give_back
        self._life = unseen_sign() if life is None else life
        self._steps_ahead = 0
        self._steps, self._steps_at_rest = 0, -1  # loading a model, too, leaves free memory
        self._stats_sent = EngineStats()
        self._stats_at = 0.0
        self._stats_asked, self._stats_answered = 0, 0
        self._stopping = False
        self._poller = zmq.Poller()
        self._poller.register(api.socket, zmq.POLLIN)
        self._poller.register(wake_up.fd, zmq.POLLIN)

    def stop(self) -> None:
        """Ends ``run`` after the step under way. A signal handler may call this."""
        self._stopping = True
        self._wake_up.set()

    def run(self) -> None:
        """Serves until ``stop`` or a Shutdown message. Raises EngineError when the engine cannot go on."""
        busy, ahead = False, None
        while not self._stopping:
            self._life.show()
            self._wait(busy)
            self._receive()
            now = time.monotonic()
            self._connector.poll(self._scheduler, now)
            self._expire(now)
            self._take_grammars()
            step = self._launch(self._schedule(now)) if ahead is None else self._join(ahead)
            ahead = self._launch_ahead(step, now)
            if self._ahead_runner is not None:
                # The tokens of the step before leave while this one computes.
                self._send_output()
            if step is not None:
                self._postprocess(step, ahead, began=now)
            self._blocks.clean(self._runner.clear)
            if self._ahead_runner is None or ahead is not None:
                self._send_output()
            busy = step is not None
        if self._ahead_runner is not None:
            self._send_output()
        self._grammars.close()

    # ------------------------------------------------------------ events

    def _wait(self, busy: bool) -> None:
        if busy:
            timeout_ms = 0
        else:
            self._cores.sleep()
            self._send_stats(idle=True)
            deadline = self._scheduler.next_deadline()
            timeout_ms = -1 if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1)
        if self._give_back is not None and self._steps != self._steps_at_rest and not 0 <= timeout_ms <= REST_MS:
            if not self._poll(REST_MS):
                self._give_back()
                self._steps_at_rest = self._steps
            return
        self._poll(timeout_ms)

    def _poll(self, timeout_ms: int) -> bool:
        """Waits for something to do, and shows life meanwhile. Returns whether there is something."""
        left_ms = timeout_ms
        while True:
            part_ms = SHOWN_EVERY_MS if left_ms < 0 else min(left_ms, SHOWN_EVERY_MS)
            ready = dict(self._poller.poll(part_ms))
            if ready or part_ms == left_ms:
                break
            self._life.show()
            left_ms -= part_ms if left_ms > 0 else 0
        if self._wake_up.fd in ready:
            self._wake_up.clear()
        return bool(ready)

    def _receive(self) -> None:
        for message in self._api.receive():
            match message:
                case Submit():
                    self._submit(message)
                case Abort(local_ids):
                    for local_id in local_ids:
                        self._abort(local_id)
                case Renew(secret):
                    self._renew(secret)
                case Assign(role):
                    self._placement.targets.role = role
                case Meet(number, nodes):
                    self._connector.meet(number, nodes)
                case AskStats(number):
                    self._stats_asked = number
                case Shutdown():
                    self._stopping = True

    def _submit(self, submit: Submit) -> None:
        request = Request(
            uuid=submit.uuid,
            token_ids=[*submit.token_ids, *submit.emitted],
            num_prompt_tokens=len(submit.token_ids),
            sampling=submit.sampling,
            arrived=time.monotonic(),
            terms=submit.terms,
            local_id=submit.local_id,
            group_id=submit.group_id,
            num_emitted_tokens=len(submit.emitted),
        )
        children = [request.add_child(child.seed, child.local_id, child.emitted) for child in submit.children]
        family = [request, *children]
        log.debug(
            "%s local_id=%d prompt=%d answers=%d emitted=%d queued",
            request,
            submit.local_id,
            len(submit.token_ids),
            len(family),
            sum(member.num_emitted_tokens for member in family),
        )
        self._scheduler.add(request)
        emitted = [submit.emitted, *(child.emitted for child in submit.children)]
        misfit = self._prompts.misfit(submit.token_ids, submit.sampling, emitted)
        for member in family:
            if misfit is not None:
                self._scheduler.finish(member, FinishReason.ERROR, misfit)
            else:
                self._scheduler.finish_if_resumed_over(member)

    def _abort(self, local_id: int) -> None:
        request = self._scheduler.find(local_id)
        if request is not None:
            log.debug("%s local_id=%d aborted", request, local_id)
            self._scheduler.abort(request)

    def _expire(self, now: float) -> None:
        for request in self._scheduler.expired(now):
            self._connector.give_up(request, "deadline passed", FailureCause.DEADLINE)
            self._scheduler.finish(request, FinishReason.DEADLINE)

    def _take_grammars(self) -> None:
        for request, why in self._grammars.take():
            self._connector.give_up(request, why, FailureCause.PROMPT)
            self._scheduler.finish(request, FinishReason.REFUSED, why)

    # ------------------------------------------------------------ a step

    def _schedule(self, now: float) -> BatchPlan:
        """Plans the next step, copies the blocks that it begins with, and orders the prompts that it does not hold."""
        plan = self._scheduler.schedule(now)
        self._begin(plan, now)
        return plan

    def _begin(self, plan: BatchPlan, now: float) -> None:
        """Does what comes before a plan's work."""
        if plan.copies:
            self._runner.copy_blocks(list(plan.copies.values()), list(plan.copies))
        self._connector.start(plan, now)
        for request in plan.refused:
            self._connector.give_up(request, NO_BLOCKS, FailureCause.LOAD)
            self._scheduler.abort(request)
        if plan.fetched:
            # An answer moves here as soon as that is known, and not after a step.
            self._send_output()

    def _launch(self, plan: BatchPlan) -> LaunchedStep | None:
        """Launches a planned step; returns None if there is nothing to compute."""
        if not plan.work:
            return None
        self._life.show(self._watch.expected_s(plan))
        self._cores.begin_step()
        self._placement.step_cost.borrowing = self._cores.borrowed > 0
        return launch(self._runner, plan, self._eos_token_ids, on_device=self._ahead_runner is not None)

    def _join(self, ahead: StepAhead) -> LaunchedStep:
        """Returns what is left of a step that was launched ahead, now that the step before it has ended."""
        step = ahead.joined()
        self._life.show(self._watch.expected_s(step.plan))
        return step

    def _launch_ahead(self, step: LaunchedStep | None, now: float) -> StepAhead | None:
        """Launches the step after ``step``, if it does not depend on its tokens which requests that holds."""
        if self._ahead_runner is None or step is None:
            return None
        before = UnderWay.of(step)
        plan = self._scheduler.schedule_ahead(step.plan, before.can_follow, now)
        if plan is None:
            return None
        self._begin(plan, now)
        if not plan.work:
            return None
        # Launching it may compile kernels, and the step under way may not have ended meanwhile.
        self._life.show(self._watch.expected_s(step.plan) + self._watch.expected_s(plan))
        self._steps_ahead += 1
        if self._ahead_drafter is not None:
            complete_ahead(self._ahead_drafter, step, before)
        return launch_ahead(self._ahead_runner, plan, before, self._eos_token_ids)

    def _postprocess(self, step: LaunchedStep, ahead: StepAhead | None, began: float) -> None:
        """Waits for a step's tokens and passes on what became final.

        Behind a step with another one ``ahead`` of its tokens, nothing is drafted.
        """
        sampled = step.read()
        for request, logprobs in step.scored():
            self._scheduler.scored(request, logprobs)
        self._steps += 1
        now = time.monotonic()
        self._watch.count(step.plan)
        if not step.plan.replays and step.scores is None:
            self._watch.note(step.plan, now - began, now)
        tables = tables_of_prompts(step) if self._drafter is not None and self._blocks.caching else {}
        for request in self._scheduler.postprocess(step.plan, sampled, now, step.drafts):
            if (why := _grammar_failure(request)) is not None:
                self._connector.give_up(request, why, FailureCause.PROMPT)
                self._scheduler.finish(request, FinishReason.REFUSED, why)
                continue
            self._connector.give_up(request, NOT_FINITE, FailureCause.PROMPT)
            self._blocks.taint_context(request.block_table, request.block_hashes)
            self._scheduler.finish(request, FinishReason.ERROR, NOT_FINITE)
        if ahead is not None:
            self._end_ahead(step, ahead, tables)
        elif self._drafter is not None:
            self._draft(step, self._drafter, tables)
        elif self._draft_model is not None:
            self._draft_beside(step, self._draft_model)
        self._connector.stepped(self._scheduler, step.plan, now)
        for wanted in self._scheduler.move_wanted(now, self._placement.step_cost.decode_step_s):
            self._api.send(wanted)

    def _end_ahead(self, step: LaunchedStep, ahead: StepAhead, tables: Tables) -> None:
        """Does what has to be done for drafts behind a step with another one ahead of its tokens."""
        if self._ahead_drafter is not None:
            complete_late(self._ahead_drafter, step, ahead.before, tables)
        if self._draft_model is not None:
            self._draft_model.forget_ended()

    def _draft(self, step: LaunchedStep, drafter: DraftRunner, tables: Tables) -> None:
        """Has the model draft what may follow a step's tokens, and complete what it keeps of them.

        Blocks are passed on only then. The tokens leave before.
        """
        speculation, began = self._scheduler.speculation, time.monotonic()
        wanting, count = self._wanted_drafts(step)
        rows = known_rows(step, set(wanting), tables)
        if not rows:
            return
        self._life.show(self._watch.expected_s(step.plan, drafting=True))
        drafted = [request for request, row in rows if row.wanted]

        def choose(logits: torch.Tensor, places: Sequence[int], number: int) -> torch.Tensor:
            going = [drafted[place] for place in places]
            positions = [request.num_generated_tokens + number for request in going]
            return guess(logits, [request.sampling for request in going], positions)[0]

        drafts = drafter.draft([row for _, row in rows], count, choose)
        for request, tokens in zip(drafted, drafts, strict=True):
            speculation.put(request, tokens)
        if count and not step.plan.num_prompt_tokens:
            # The known tokens are computed first, in about the time of a draft.
            speculation.drafted_for(count + 1, time.monotonic() - began)

    def _draft_beside(self, step: LaunchedStep, model: DraftModel) -> None:
        """Has the smaller model draft what may follow a step's tokens."""
        speculation, began = self._scheduler.speculation, time.monotonic()
        wanting, count = self._wanted_drafts(step)
        if wanting:
            self._life.show(self._watch.expected_s(step.plan, drafting=True))
        drafts = model.draft(wanting, count, speculation.may_read(wanting) if wanting else 0)
        for request, drafted in zip(wanting, drafts, strict=True):
            speculation.put(request, drafted)
        if model.num_runs:
            speculation.drafted_for(model.num_runs, time.monotonic() - began, model.num_read)

    def _wanted_drafts(self, step: LaunchedStep) -> tuple[list[Request], int]:
        """Sends a step's tokens, and returns the requests of which drafts are wanted now, and how many of each."""
        self._send_output()
        going = [work.request for work in step.plan.work if work.request.num_uncomputed_tokens == 1]
        return self._scheduler.speculation.wanted([request for request in going if decodes_on(request)])

    # ------------------------------------------------------------ output

    def _send_output(self) -> None:
        output = self._collector.take()
        if output is not None:
            self._api.send(output)
        if self._recorder is not None and (recorded := self._recorder.take()) is not None:
            self._api.send(recorded)
        self._send_stats(idle=False)

    def _send_stats(self, idle: bool) -> None:
        now, asked = time.monotonic(), self._stats_asked
        if not idle and now - self._stats_at < STATS_INTERVAL_S and asked == self._stats_answered:
            return
        stats = self._stats()
        if stats != self._stats_sent or asked != self._stats_answered:
            self._api.send(Stats(stats, asked))
            self._stats_sent, self._stats_at, self._stats_answered = stats, now, asked

    def _stats(self) -> EngineStats:
        scheduler, transfers, now = self._scheduler, self._connector.stats(), time.monotonic()
        counters, reasons = scheduler.counters, transfers.failures_by_name
        rate = self._placement.tokens_per_s(*scheduler.decoding)
        return EngineStats(
            queue=QueueStats(
                running=scheduler.num_running,
                waiting=scheduler.num_waiting + scheduler.num_children,
                waiting_for_remote=scheduler.num_remote,
                pushing=scheduler.num_pushing,
                queue_s=max(scheduler.longest_wait_s(now), scheduler.queued_prompt_tokens / rate),
            ),
            cache=CacheStats(
                total_blocks=self._blocks.num_blocks,
                free_blocks=self._blocks.num_free,
                quarantined_blocks=self._blocks.num_quarantined,
                cached_blocks=self._blocks.num_cached,
                group_blocks={pool.name: len(pool.ids) for pool in self._blocks.pools[1:]},
                group_free_blocks={pool.name: pool.num_free for pool in self._blocks.pools[1:]},
            ),
            cores=CoreStats(borrowed=self._cores.borrowed, borrowed_s=self._cores.borrowed_s),
            steps=self._steps,
            steps_ahead=self._steps_ahead,
            scheduler=SchedulerCounts.copied(counters),
            accepted_drafts=counters.accepted_drafts,
            accepted_drafts_by_place={str(place): n for place, n in sorted(counters.accepted_drafts_by_place.items())},
            prefills={source.value: count for source, count in counters.prefills.items()},
            prefills_failed={name: counters.prefills_failed[name] for name in reasons},
            transfer=TransferCounts.copied(transfers),
            transfer_failures=reasons,
            returns=ReturnCounts.copied(self._connector.returns()),
            clock_skew_s=transfers.clocks.worst_s(),
            links=LinkCounts.of(transfers.links),
            prefill=self._placement.stats(now),
            step=self._watch.stats(),
        )


def _grammar_failure(request: Request) -> str | None:
    """Returns why the grammar of a request, or of an answer that fails with it, leaves no token."""
    family = (request, *request.children)
    return next((failure for member in family if (failure := member.grammar_failure) is not None), None)
