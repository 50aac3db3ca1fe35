"""The program of a simulated engine process: the real engine around a model that is a function of all tokens before.

The model's cache is real memory that real transfers read and write. A slot has a token and a digest of the salt and of
all tokens up to it, computed from the slot before. A step reads its whole context: a block that was shared, moved,
evicted or overwritten wrongly breaks the chain of digests, and one that does not break it gives a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from llguidance import LLTokenizer

from pdserve.config import EngineLaunch, Switch
from pdserve.engine.api_channel import ApiChannel
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector import KvConnector, open_connector
from pdserve.engine.placement.latency_targets import LatencyTargets
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request
from pdserve.engine.sampling.grammar_opener import GrammarOpener
from pdserve.engine.scheduling.request_limits import PromptRule, StopRule
from pdserve.engine.step_loop import StepLoop
from pdserve.engine.wake_up import WakeUp
from pdserve.models.runner import Score, StepRow
from pdserve.wire.engine import Ready, Starting
from pdserve.wire.frame import Secrets
from pdserve.wire.transfer import EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
from tests.simulation.messaging import SimContext
from tests.simulation.reference import EOS, LOGITS, VOCAB, after, beginning, likeliest
from tests.simulation.virtual_time import SimProcess, present_process, present_thread

BLOCK_SIZE = 4
SLOT_WORDS = 2
BLOCK_BYTES = BLOCK_SIZE * SLOT_WORDS * 8
SPEC = EngineSpec(
    protocol=PROTOCOL_VERSION,
    oldest_protocol=OLDEST_PROTOCOL,
    fingerprint="f" * 64,
    dtype="bf16",
    block_size=BLOCK_SIZE,
    num_layers=1,
    kv_heads=1,
    head_dim=8,
    tp_size=1,
)
LINGER_S = 0.5


class WrongCache(Exception):
    """The KV cache holds something else than the keys and values of a request's tokens."""


class SimRunner:
    """Computes steps, each of which takes its time."""

    def __init__(self, memory: memoryview, pace: Pace) -> None:
        self._slots = memory.cast("q")
        self._pace = pace
        self.live: Callable[[], Iterable[Request]] = tuple
        """The requests of the engine, of which a row has only the block table."""

    def run(self, rows: Sequence[StepRow], *, score: Score | None = None) -> torch.Tensor:
        present_thread().block(self._pace.step_s(sum(len(row.token_ids) for row in rows)))
        last: list[int] = []
        scored: list[int] = []
        for row in rows:
            digests = self._compute(row)
            scored += [digests[place] for place in row.scored]
            if row.wants_logits:
                last.append(digests[-1])
        if score is not None:
            score(_logits(scored))
        return _logits(last)

    def _compute(self, row: StepRow) -> list[int]:
        """Computes a row's tokens. Returns the digest after each."""
        slots = self._slots
        salts = [request.cache_salt for request in self.live() if request.block_table is row.block_table]
        digest, digests = beginning(*salts), []
        table = [block * BLOCK_SIZE * SLOT_WORDS for block in row.block_table]
        for position in range(row.start):
            place = table[position // BLOCK_SIZE] + position % BLOCK_SIZE * SLOT_WORDS
            digest = after(digest, slots[place])
            if slots[place + 1] != digest:
                raise WrongCache(f"token {position} of a context of {row.start} is not that of the request")
        for position, token in enumerate(row.token_ids, row.start):
            place = table[position // BLOCK_SIZE] + position % BLOCK_SIZE * SLOT_WORDS
            digest = after(digest, token)
            slots[place], slots[place + 1] = token, digest
            digests.append(digest)
        return digests

    def clear(self, blocks: Sequence[int]) -> None:
        words = BLOCK_SIZE * SLOT_WORDS
        for block in blocks:
            for word in range(block * words, (block + 1) * words):
                self._slots[word] = 0

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        words = BLOCK_SIZE * SLOT_WORDS
        read = [self._slots[block * words : (block + 1) * words].tolist() for block in sources]
        for destination, content in zip(destinations, read, strict=True):
            for i, word in enumerate(content):
                self._slots[destination * words + i] = word


def _logits(digests: Sequence[int]) -> torch.Tensor:
    """Returns the model's logits after each of these prefixes."""
    rows, logits = torch.arange(len(digests)), torch.zeros(len(digests), VOCAB)
    for logit, tokens in zip(LOGITS, zip(*map(likeliest, digests), strict=True), strict=False):
        logits[rows, torch.tensor(tokens, dtype=torch.long)] = logit
    return logits


@dataclass
class Pace:
    """How long a node's steps take. A fault may make them slower."""

    random: Random
    base_s: float = 0.004
    token_s: float = 0.0005
    factor: float = 1.0

    def step_s(self, tokens: int) -> float:
        return (self.base_s + tokens * self.token_s) * self.factor * self.random.uniform(0.8, 1.2)


@dataclass(frozen=True)
class RunningEngine:
    """What the simulation looks at."""

    process: SimProcess
    boot_id: bytes
    blocks: BlockManager
    loop: StepLoop
    connector: KvConnector
    taken: list[int] = field(default_factory=list)
    """Blocks that a fault has taken."""

    def take_blocks(self) -> None:
        """Takes all free blocks, as if others had them."""
        self.blocks.grow(self.taken, (len(self.taken) + self.blocks.num_free) * BLOCK_SIZE)

    def give_blocks_back(self) -> None:
        self.blocks.free(self.taken)
        self.loop._wake_up.set()


@dataclass(frozen=True)
class EngineProgram:
    """The program of all engines of a cluster."""

    pace: Callable[[SimProcess], Pace]
    num_blocks: int
    max_model_len: int
    started: Callable[[RunningEngine], None]
    failed: Callable[[SimProcess, Exception], None]

    def __call__(self, launch: EngineLaunch) -> None:
        with SimContext() as context:
            channel = ApiChannel(context, launch.address)  # type: ignore[arg-type]
            try:
                channel.send(Starting("loading libraries"))
                self._serve(launch, channel)
            except Exception as exc:
                self.failed(present_process(), exc)
                raise
            finally:
                channel.close(LINGER_S)

    def _serve(self, launch: EngineLaunch, channel: ApiChannel) -> None:
        config, process = launch.config, present_process()
        wake_up = WakeUp()
        kv_cache = torch.zeros(self.num_blocks, BLOCK_BYTES, dtype=torch.uint8)
        blocks = BlockManager(self.num_blocks, BLOCK_SIZE, prefix_cache=config.cache.prefix_cache is Switch.ON)
        prompts = PromptRule(VOCAB, self.max_model_len)
        step_cost = StepCost()
        targets = LatencyTargets(config.targets, step_cost, config.role, config.scheduler.batching)
        placement = Placement(
            step_cost, config.transfer, config.scheduler, BLOCK_SIZE, BLOCK_BYTES / BLOCK_SIZE, targets
        )
        secrets = Secrets(config.secret)
        connector, control = open_connector(
            config,
            spec=SPEC,
            kv_cache=kv_cache,
            shared=None,
            blocks=blocks,
            prompts=prompts,
            placement=placement,
            ranks=None,
            secrets=secrets,
            wake=wake_up.set,
        )
        runner = SimRunner(_memory_of(kv_cache), self.pace(process))
        try:
            loop = StepLoop(
                api=channel,
                wake_up=wake_up,
                runner=runner,
                blocks=blocks,
                connector=connector,
                config=config.scheduler,
                stop=StopRule(frozenset({EOS}), self.max_model_len),
                prompts=prompts,
                placement=placement,
                renew=secrets.renew,
                grammars=GrammarOpener(_no_vocabulary, wake_up.set),
            )
            runner.live = loop._scheduler.live
            self.started(RunningEngine(process, config.boot_id, blocks, loop, connector))
            channel.send(
                Ready(
                    control=control,
                    fingerprint=SPEC.fingerprint,
                    num_blocks=self.num_blocks,
                    block_size=BLOCK_SIZE,
                    max_model_len=self.max_model_len,
                    max_running=config.scheduler.max_num_seqs,
                    vocab_size=VOCAB,
                    kernels="simulated",
                )
            )
            loop.run()
        finally:
            connector.close()
            wake_up.close()


def _memory_of(kv_cache: torch.Tensor) -> memoryview:
    return memoryview(kv_cache.flatten().numpy())  # type: ignore[arg-type]  # ndarray is a buffer, unannotated


def _no_vocabulary() -> LLTokenizer:
    raise AssertionError("no grammar is simulated yet")
