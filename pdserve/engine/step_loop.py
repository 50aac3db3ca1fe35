"""The engine: wait for events, schedule, compute, tell.

Each turn of ``run`` is one step. With nothing to compute it blocks until the API process, the transfer thread, a
deadline or a signal has something for it, so an idle engine uses no CPU.
"""

from __future__ import annotations

import os
import time

import torch
import zmq

from pdserve.config import SchedulerConfig
from pdserve.engine.api_channel import ApiChannel
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.kv_connector import KvConnector
from pdserve.engine.outbox import Outbox
from pdserve.engine.plan import Plan
from pdserve.engine.prompt_rule import PromptRule
from pdserve.engine.request import Request
from pdserve.engine.sampler import sample
from pdserve.engine.sampling_row import SamplingRow
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step_runner import StepRunner
from pdserve.engine.stop_rule import StopRule
from pdserve.models.step_batch import StepRow
from pdserve.wire.engine import Abort, EngineStats, FinishReason, PrefillSource, Shutdown, Stats, Submit

STATS_INTERVAL_S = 0.25

NOT_FINITE = "the model's logits are not finite"


class WakeUp:
    """An eventfd: any thread or signal handler sets it, the step loop polls and clears it."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)


class StepLoop:
    """Ties the parts of one engine together; owns none of them but the scheduler."""

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
    ) -> None:
        self._api = api
        self._wake_up = wake_up
        self._runner = runner
        self._blocks = blocks
        self._connector = connector
        self._outbox = Outbox()
        self._scheduler = Scheduler(blocks, config, stop, self._outbox, connector.release)
        self._prompts = prompts
        self._eos_token_ids = stop.eos_token_ids
        self._steps = 0
        self._stats_sent = EngineStats()
        self._stats_at = 0.0
        self._stopping = False
        self._poller = zmq.Poller()
        self._poller.register(api.socket, zmq.POLLIN)
        self._poller.register(wake_up.fd, zmq.POLLIN)

    def stop(self) -> None:
        """End ``run`` after the step under way. Safe in a signal handler."""
        self._stopping = True
        self._wake_up.set()

    def run(self) -> None:
        """Serve until ``stop`` or a Shutdown message. Raises EngineError when the engine cannot go on."""
        busy = False
        while not self._stopping:
            self._wait(busy)
            self._receive()
            now = time.monotonic()
            self._connector.poll(self._scheduler, now)
            self._expire(now)
            plan = self._scheduler.schedule(now)
            if plan.copies:
                self._runner.copy_blocks(list(plan.copies.values()), list(plan.copies))
            self._connector.start(plan, now)
            if plan.work:
                self._compute(plan)
            self._blocks.clean(self._runner.clear)
            self._tell()
            busy = bool(plan.work)

    def _wait(self, busy: bool) -> None:
        if busy:
            timeout_ms = 0
        else:
            self._tell_stats(idle=True)
            deadline = self._scheduler.next_deadline()
            timeout_ms = -1 if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1)
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake_up.fd in ready:
            self._wake_up.clear()

    def _receive(self) -> None:
        for message in self._api.receive():
            match message:
                case Submit():
                    self._submit(message)
                case Abort(request_ids):
                    for client in request_ids:
                        request = self._scheduler.find(client)
                        if request is not None:
                            self._scheduler.abort(request)
                case Shutdown():
                    self._stopping = True

    def _submit(self, submit: Submit) -> None:
        now = time.monotonic()
        request = Request(
            uuid=submit.uuid,
            token_ids=list(submit.token_ids),
            num_prompt_tokens=len(submit.token_ids),
            sampling=submit.sampling,
            arrived=now,
            deadline=now + submit.deadline_s,
            client=submit.request_id,
            targets=submit.prefill,
            cache_salt=submit.cache_salt,
        )
        family = [request, *(request.add_sibling(sibling.seed, sibling.request_id) for sibling in submit.siblings)]
        self._scheduler.add(request)
        misfit = self._prompts.misfit(submit.token_ids)
        if misfit is not None:
            for member in family:
                self._scheduler.finish(member, FinishReason.ERROR, misfit)

    def _expire(self, now: float) -> None:
        for request in self._scheduler.expired(now):
            self._connector.give_up(request, "deadline passed")
            self._scheduler.finish(request, FinishReason.DEADLINE)

    def _compute(self, plan: Plan) -> None:
        rows = []
        for work in plan.work:
            request, start = work.request, work.request.num_computed_tokens
            new = request.token_ids[start : start + work.num_tokens]
            rows.append(StepRow(new, start, request.block_table, work.wants_token))
        logits = self._runner.run(rows)
        rows_of_choosers = [SamplingRow.of(request) for request in plan.choosers]
        tokens = sample(_logits_of_choosers(logits, plan), rows_of_choosers, self._eos_token_ids)
        choices = [None if token is None else (token,) for token in tokens]
        self._steps += 1
        for request in self._scheduler.advance(plan, choices, time.monotonic()):
            self._connector.give_up(request, NOT_FINITE)
            self._blocks.taint(request.block_table)
            self._scheduler.finish(request, FinishReason.ERROR, NOT_FINITE)
        self._connector.stepped(self._scheduler, plan)

    def _tell(self) -> None:
        output = self._outbox.take()
        if output is not None:
            self._api.send(output)
        self._tell_stats(idle=False)

    def _tell_stats(self, idle: bool) -> None:
        now = time.monotonic()
        if not idle and now - self._stats_at < STATS_INTERVAL_S:
            return
        stats = self._stats()
        if stats != self._stats_sent:
            self._api.send(Stats(stats))
            self._stats_sent, self._stats_at = stats, now

    def _stats(self) -> EngineStats:
        scheduler, transfers = self._scheduler, self._connector.stats()
        prefills = scheduler.counters.prefills
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_for_remote=scheduler.num_remote,
            total_blocks=self._blocks.num_blocks,
            free_blocks=self._blocks.num_free,
            quarantined_blocks=self._blocks.num_quarantined,
            cached_blocks=self._blocks.num_cached,
            steps=self._steps,
            prompt_tokens=scheduler.counters.prompt_tokens,
            generated_tokens=scheduler.counters.generated_tokens,
            preemptions=scheduler.counters.preemptions,
            prefix_cache_queries=scheduler.counters.prefix_cache_queries,
            prefix_cache_hits=scheduler.counters.prefix_cache_hits,
            prefills_local=prefills[PrefillSource.LOCAL],
            prefills_remote=prefills[PrefillSource.REMOTE],
            prefills_fallback=prefills[PrefillSource.FALLBACK],
            transfer_bytes_sent=transfers.bytes_sent,
            transfer_bytes_received=transfers.bytes_received,
            transfers_sent=transfers.transfers_sent,
            transfers_received=transfers.transfers_received,
            transfer_seconds=transfers.transfer_seconds,
            transfer_failures={kind.value: count for kind, count in transfers.failures.items()},
            leases_expired=transfers.leases_expired,
            stale_blocks_dropped=transfers.stale_blocks_dropped,
        )


def _logits_of_choosers(logits: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A row for each chooser, from one for each work that wants a token: siblings choose by the same logits."""
    wanting = [work for work in plan.work if work.wants_token]
    rows = [row for row, work in enumerate(wanting) for _ in work.choosers]
    # Nearly always it is so already, and a copy of all logits takes milliseconds.
    return logits if rows == list(range(len(logits))) else logits[rows]
