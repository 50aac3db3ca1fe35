"""``benchmarks host`` times what a step takes of the step loop's thread, with everything but the model.

The loop, the scheduler, the blocks, the sampler and the channel to the API process are real. The runner fills the
inputs of a recorded decode step, as on a GPU, and computes nothing: all logits are equal. Time is that of the thread on
a core, so that other programs of the machine matter little.
"""

from __future__ import annotations

import enum
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec
import torch
import zmq
from llguidance import LLTokenizer

from benchmarks.settings import BenchHostConfig
from pdserve.bench.report import Better, Figure, Report, Row, Unit, chip_name, this_machine
from pdserve.config import SchedulerConfig, Speculate, TargetsConfig, TransferConfig
from pdserve.engine.api_channel import ApiChannel, WakeUp
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.connector import NoTransferConnector
from pdserve.engine.placement.latency_targets import LatencyTargets
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.sampling.grammar_opener import GrammarOpener
from pdserve.engine.scheduling.output_collector import TimelineRecorder
from pdserve.engine.scheduling.request_limits import PromptRule, StopRule
from pdserve.engine.step_loop import StepLoop
from pdserve.engine.tp.rank_rows import SentRows
from pdserve.errors import EngineError
from pdserve.models.backend import CPU
from pdserve.models.rank_cache import KvGroup, StateGroup
from pdserve.models.runner import DecodeGraphs, DecodeInputs, Score, StepRow
from pdserve.process import collect_rarely
from pdserve.settings import to_environ
from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep, context_blocks, laid_out
from pdserve.wire.discovery import Role
from pdserve.wire.engine import Submit
from pdserve.wire.ids import new_id
from pdserve.wire.rank import Numbered
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.terms import Terms
from pdserve_kernels.kv_layout import KvLayout

_WANTED_STEP_US, _WANTED_REQUEST_US, _WANTED_1K_US = 250.0, 8.0, 1.0
_WANTED_MESSAGE_BYTES, _WANTED_REQUEST_BYTES = 2048, 16

_WINDOW = 512
_STATE_BLOCKS = 16
"""A state has as many bytes as so many blocks."""
_VOCAB_SIZE = 64
_FIRST_STEPS = 8
"""So many steps are not counted: buffers are made in them."""
_STEPS = 16
"""The mean of so many steps is one measurement. They fill a block, which is taken and found once for each request."""
_MEASUREMENTS = 11
"""The median of so many is the figure."""
_ANSWER = _FIRST_STEPS + (_MEASUREMENTS + 2) * _STEPS
"""No request ends before the last measurement."""


class HostPath(enum.Enum):
    """How steps follow each other."""

    IN_TURN = "in turn"
    """A step is launched when the tokens of the last one are known, as on a CPU."""
    AHEAD = "ahead"
    """A step is launched before that, as on a GPU."""
    RANKS = "ranks"
    """In turn, and each step is also a message to other ranks."""
    RANKS_WINDOW = "ranks, window"
    """The same, and half of the model's layers see a window."""
    RANKS_STATES = "ranks, states"
    """The same, and that half keeps states instead."""


_NOTES = (
    "medians of means over 16 steps, of the CPU time of the step loop's thread; scheduler, blocks, sampler and message "
    "to the API process are real, the runner fills the inputs of a recorded step and computes nothing",
    "in turn: as on a CPU; ahead: a step is launched before the last one's tokens are known, as on a GPU; ranks: in "
    "turn, with a message to other ranks; window: of a model that has layers with a window of 512 tokens, too",
    "wanted: 0.25 ms + 8 µs a request + 1 µs for each 1,000 tokens of its context; 2 KiB + 16 bytes a request",
)
_TOLD = (HostPath.RANKS, HostPath.RANKS_WINDOW, HostPath.RANKS_STATES)
"""Paths on which other ranks are told."""


@dataclass(frozen=True, slots=True)
class _Unrecorded:
    """A ``Graph`` that computes once, when it is captured."""

    def capture(self, compute: Callable[[], None]) -> None:
        compute()

    def replay(self) -> None:
        pass


class IdleRunner:
    """A ``StepRunner`` and ``AheadRunner`` that fills the inputs of a step and computes nothing."""

    def __init__(self, requests: int, context: int, groups: Sequence[GroupBlocks], block_size: int) -> None:
        layout = KvLayout(1, 1, block_size, 1, torch.float32)
        attention, states = list[KvGroup](), list[StateGroup]()
        for number, group in enumerate(groups):
            if group.spec.keep is Keep.LATEST:
                states.append(StateGroup(number, group, ()))
            else:
                attention.append(KvGroup(number, group, layout, torch.empty(0), 1))
        self._graphs = DecodeGraphs(_equal_logits, _Unrecorded, requests, context, attention, states, CPU)
        self.on_decode: Callable[[], None] = _nothing
        """What is called when a decode step of all requests begins."""
        self.sent = 0
        """The bytes that other ranks were told."""
        self._requests = requests

    def run(
        self, rows: Sequence[StepRow], tokens: torch.Tensor | None = None, score: Score | None = None
    ) -> torch.Tensor:
        if len(rows) == self._requests and len(rows[-1].token_ids) == 1:
            self.on_decode()
        logits = self._graphs.run(rows, tokens)
        return torch.zeros(sum(row.wants_logits for row in rows), _VOCAB_SIZE) if logits is None else logits

    def clear(self, blocks: Sequence[int]) -> None:
        pass

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        pass


class TellingRunner(IdleRunner):
    """The same, with other ranks: makes the messages that they would be told, and counts their bytes."""

    def __init__(self, requests: int, context: int, groups: Sequence[GroupBlocks], block_size: int) -> None:
        super().__init__(requests, context, groups, block_size)
        self._rows = SentRows()
        self._encoder = msgspec.msgpack.Encoder()
        self._number = 0

    def run(
        self, rows: Sequence[StepRow], tokens: torch.Tensor | None = None, score: Score | None = None
    ) -> torch.Tensor:
        self._number += 1
        self.sent += len(self._encoder.encode(Numbered(self._number, self._rows.step(rows))))
        return super().run(rows, tokens, score)


class _Clock:
    """Measures steps, each from the beginning of one to that of the next, ``_MEASUREMENTS`` times."""

    def __init__(self, runner: IdleRunner, over: Callable[[], None]) -> None:
        self._runner, self._over = runner, over
        self._steps, self._began, self._sent = -_FIRST_STEPS, 0.0, 0
        self.step_s: list[float] = []
        self.step_bytes: list[float] = []

    def tick(self) -> None:
        if self._steps >= 0 and not self._steps % _STEPS:
            now, sent = time.thread_time(), self._runner.sent
            if self._steps:
                self.step_s.append((now - self._began) / _STEPS)
                self.step_bytes.append((sent - self._sent) / _STEPS)
            if len(self.step_s) == _MEASUREMENTS:
                self._over()
            self._began, self._sent = now, sent
        self._steps += 1


def run(config: BenchHostConfig) -> Report:
    """Measures each number of requests, length of their contexts and ``HostPath``."""
    return Report("host", this_machine(chip_name()), to_environ(config), _NOTES, tuple(_rows(config)))


def _rows(config: BenchHostConfig) -> Iterator[Row]:
    threads, garbage = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    # As in an engine.
    collect_rarely()
    try:
        for each in config.host.requests:
            for context in config.host.contexts:
                for path in HostPath:
                    yield _row(each, context, path, config.host.block_size)
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*garbage)
        gc.unfreeze()


def _row(requests: int, context: int, path: HostPath, block_size: int) -> Row:
    """Returns the row of decode steps with so many requests, whose contexts have about ``context`` tokens each."""
    print(f"host: {requests} × {context} tokens, {path.value}", file=sys.stderr, flush=True)
    clock = _measured(requests, context, path, block_size)
    step_us = statistics.median(clock.step_s) * 1e6
    wanted_us = _WANTED_STEP_US + requests * (_WANTED_REQUEST_US + _WANTED_1K_US * context / 1000)
    figures = [
        Figure("CPU of a step", step_us, Unit.US, Better.LOWER),
        Figure("CPU : wanted", step_us / wanted_us, Unit.RATIO, Better.LOWER),
    ]
    if path in _TOLD:
        size = statistics.median(clock.step_bytes)
        wanted = _WANTED_MESSAGE_BYTES + requests * _WANTED_REQUEST_BYTES
        figures += [
            Figure("message", size / 1024, Unit.KIB, Better.LOWER),
            Figure("message : wanted", size / wanted, Unit.RATIO, Better.LOWER),
        ]
    return Row("host's part of a step", {"requests": requests, "context": context, "path": path.value}, tuple(figures))


def _measured(requests: int, context: int, path: HostPath, block_size: int) -> _Clock:
    kind = TellingRunner if path in _TOLD else IdleRunner
    groups = _groups(requests, context, path, block_size)
    runner = kind(requests, context + _ANSWER, groups, block_size)
    blocks = BlockManager(groups[0].count, block_size, bounded=groups[1:], block_bytes=groups[0].block_bytes)
    # All tokens are equal: each step would draft as many as it may.
    config = SchedulerConfig(
        max_num_seqs=requests, max_num_batched_tokens=requests * context, speculation=Speculate.OFF
    )
    step_cost = StepCost()
    targets = LatencyTargets(TargetsConfig(), step_cost, Role.MIXED)
    with zmq.Context() as zmq_context, closing(WakeUp()) as wake_up:
        api = zmq_context.socket(zmq.PAIR)
        api.bind("inproc://engine")
        channel = ApiChannel(zmq_context, "inproc://engine")
        loop = StepLoop(
            api=channel,
            wake_up=wake_up,
            runner=runner,
            blocks=blocks,
            connector=NoTransferConnector(blocks),
            config=config,
            stop=StopRule(frozenset(), context + _ANSWER),
            prompts=PromptRule(_VOCAB_SIZE, context + _ANSWER),
            placement=Placement(step_cost, TransferConfig(), config, block_size, 1.0, targets),
            ahead_runner=runner if path is HostPath.AHEAD else None,
            grammars=GrammarOpener(_no_vocabulary, wake_up.set),
            recorder=TimelineRecorder(),
        )
        clock = _Clock(runner, loop.stop)
        runner.on_decode = clock.tick
        try:
            for request in range(requests):
                api.send(msgspec.msgpack.encode(_submit(request, context, block_size)))
            loop.run()
        finally:
            channel.close(0)
            api.close(0)
    return clock


def _groups(requests: int, context: int, path: HostPath, block_size: int) -> tuple[GroupBlocks, ...]:
    """Returns the cache groups of the model, with blocks for all requests at once."""
    tokens, block_bytes = context + _ANSWER, KvLayout(1, 1, block_size, 1, torch.float32).block_bytes
    specs = [GroupSpec("all", Keep.ALL, 1, 1, block_bytes, "fp32")]
    counts, sizes = [requests * -(-tokens // block_size)], [block_bytes]
    if path is HostPath.RANKS_WINDOW:
        specs.append(GroupSpec(f"window {_WINDOW}", Keep.WINDOW, 1, 1, block_bytes, "fp32", _WINDOW))
        # All prompts may be one step, whose tokens have blocks beside the windows'.
        counts.append(counts[0] + requests * context_blocks(Keep.WINDOW, _WINDOW, tokens, block_size))
        sizes.append(block_bytes)
    if path is HostPath.RANKS_STATES:
        sizes.append(_STATE_BLOCKS * block_bytes)
        specs.append(GroupSpec("states", Keep.LATEST, 1, 1, sizes[-1], "fp32"))
        # As many again for the prefix cache.
        counts.append(2 * requests * context_blocks(Keep.LATEST, 0, tokens, block_size))
    return laid_out(specs, counts, sizes)[0]


def _submit(request: int, context: int, block_size: int) -> Submit:
    # Contexts end at different places of a block, as those of clients do.
    tokens = [request % _VOCAB_SIZE, request // _VOCAB_SIZE] * (context // 2)
    return Submit(
        local_id=request + 1,
        uuid=new_id(),
        token_ids=tokens[: context - request % block_size],
        sampling=SamplingParams(max_tokens=_ANSWER, seed=0, temperature=0.0, ignore_eos=True),
        terms=Terms(deadline_s=3600.0),
    )


def _equal_logits(inputs: DecodeInputs) -> torch.Tensor:
    return torch.zeros(len(inputs.token_ids), _VOCAB_SIZE)


def _no_vocabulary() -> LLTokenizer:
    raise EngineError("no request of this measurement has a grammar")


def _nothing() -> None:
    pass
