"""The program of a simulated engine process: the real engine around a model that is a function of all tokens before.

The model's cache is real memory that real transfers read and write. A slot has a token and a digest of the salt and of
all tokens up to it, computed from the slot before. A step reads its whole context: a block that was shared, moved,
evicted or overwritten wrongly breaks the chain of digests, and one that does not break it gives a wrong answer.

Each KV head has slots of its own, which also know the head. A tensor-parallel rank has those of its heads, and reads
them in each step as rank 0 does: a piece that is missing, or another rank's, is noticed on the rank that lacks it.

The model may have layers with a window, and layers with a state (``CacheShape``). Blocks of a window's group have the
same slots, of which a step reads those that its first token sees. A state has the digest of all tokens so far and their
number: one that is stale, or another request's, is noticed by the step that begins with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from llguidance import LLTokenizer

from lab.simulation.machine.messaging import SimContext, SimZmqSocket
from lab.simulation.machine.rank_group import SimGroup, SimLifeBoard
from lab.simulation.machine.virtual_time import SimProcess, present_process, present_thread
from lab.simulation.plan import CacheShape
from lab.simulation.reference import EOS, LOGITS, VOCAB, after, beginning, likeliest
from pdserve.config import EngineConfig, EngineLaunch, RankLaunch, Switch
from pdserve.control.frame import Secrets
from pdserve.engine.api_channel import ApiChannel, WakeUp
from pdserve.engine.assembly import warm_up
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector import KvConnector, open_connector
from pdserve.engine.placement.latency_targets import LatencyTargets
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.process import _report_failure
from pdserve.engine.request import Request
from pdserve.engine.sampling.grammar_opener import GrammarOpener
from pdserve.engine.scheduling.request_limits import PromptRule, StopRule
from pdserve.engine.step_loop import StepLoop
from pdserve.engine.tp.rank_channel import OrderChannel
from pdserve.engine.tp.rank_program import run_rank
from pdserve.engine.tp.tp_ranks import Ranks, running_ranks
from pdserve.engine.tp.tp_runner import TpRunner, joined_group
from pdserve.liveness import LifeBoard, step_loop
from pdserve.machine.core_share import CoreShare
from pdserve.models.backend import CPU
from pdserve.models.runner import Score, StepRow
from pdserve.models.tp.shares import TpGroup
from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep, laid_out
from pdserve.wire.engine import Ready, Starting
from pdserve.wire.rank import Loaded, LoadModel, RankFailed
from pdserve.wire.transfer import EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
from pdserve_kvtransfer.pieces import heads_of

BLOCK_SIZE = 4
SLOT_WORDS = 2
HEAD_WORDS = BLOCK_SIZE * SLOT_WORDS
"""The words that a block has for each KV head."""
HEAD_BYTES = HEAD_WORDS * 8
FINGERPRINT = "f" * 64
WINDOW = 10
"""A token sees so many in a layer with a window: of three blocks or four."""
STATE_WORDS = 2
"""The words that a state has for each KV head: its digest, and the number of its tokens."""
WARM_UP_TOKENS = 4
LINGER_S = 0.5


def group_specs(shape: CacheShape, kv_heads: int) -> tuple[GroupSpec, ...]:
    """Returns the groups of the model's cache."""
    whole = GroupSpec("keys and values", Keep.ALL, 1, kv_heads, HEAD_BYTES, "fp32")
    window = GroupSpec(f"window {WINDOW}", Keep.WINDOW, 1, kv_heads, HEAD_BYTES, "fp32", WINDOW)
    state = GroupSpec("state", Keep.LATEST, 1, kv_heads, STATE_WORDS * 8, "fp32")
    match shape:
        case CacheShape.WHOLE:
            return (whole,)
        case CacheShape.WINDOW:
            return (whole, window)
        case CacheShape.STATE:
            return (whole, state)
        case CacheShape.ALL_KINDS:
            return (whole, window, state)


def engine_spec(kv_heads: int, tp_size: int, groups: tuple[GroupSpec, ...]) -> EngineSpec:
    return EngineSpec(
        protocol=PROTOCOL_VERSION,
        oldest_protocol=OLDEST_PROTOCOL,
        fingerprint=FINGERPRINT,
        dtype="bf16",
        block_size=BLOCK_SIZE,
        num_layers=1,
        kv_heads=kv_heads,
        head_dim=8,
        tp_size=tp_size,
        groups=groups if len(groups) > 1 else (),
    )


class WrongCache(Exception):
    """The KV cache holds something else than the keys and values of a request's tokens."""


class SimRunner:
    """Computes one rank's part of steps, each of which takes its time."""

    def __init__(self, shape: CacheShape, counts: Sequence[int], kv_heads: int, group: TpGroup, pace: Pace) -> None:
        """``counts`` has the number of blocks of each group."""
        self._heads = heads_of(group.rank, group.size, kv_heads)
        specs = group_specs(shape, kv_heads)
        sizes = [spec.head_bytes * len(self._heads) for spec in specs]
        self.groups, nbytes = laid_out(specs, counts, sizes)
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.cache = SimpleNamespace(memory=memory, groups=self.groups)
        self.kv_cache = memory if len(counts) > 1 else memory.view(counts[0], -1)
        self._slots = _memory_of(memory).cast("q")
        self._whole = self.groups[0]
        self._windows = [(i, each) for i, each in enumerate(self.groups[1:]) if each.spec.keep is Keep.WINDOW]
        self._states = [(i, each) for i, each in enumerate(self.groups[1:]) if each.spec.keep is Keep.LATEST]
        self._group = group if isinstance(group, SimGroup) else None
        self._pace = pace
        self.live: Callable[[], Iterable[Request]] = tuple
        """The requests of the engine, of which a row has only the block table."""

    def run(self, rows: Sequence[StepRow], *, score: Score | None = None) -> torch.Tensor:
        self._pace.before_step()
        begin = self._shown([self._beginning(row) for row in rows])[0]
        present_thread().block(self._pace.step_s(sum(len(row.token_ids) for row in rows)))
        computed = [self._compute(row, digest) for row, digest in zip(rows, begin, strict=True)]
        if any(other != computed for other in self._shown(computed)):
            raise WrongCache("the ranks have not computed the same")
        if score is not None:
            score(
                _logits([digests[place] for row, digests in zip(rows, computed, strict=True) for place in row.scored])
            )
        return _logits([digests[-1] for row, digests in zip(rows, computed, strict=True) if row.wants_logits])

    def _shown(self, digests: object) -> list[Any]:
        """Returns what each rank shows, of which this one shows ``digests``."""
        return [digests] if self._group is None else self._group.exchange(digests)

    def _beginning(self, row: StepRow) -> int:
        """Returns the digest before a row's first token. Rank 0 alone knows it."""
        for request in self.live():
            if request.block_table is row.block_table:
                return beginning(request.terms.prompt.cache_salt)
        return beginning("")

    def _compute(self, row: StepRow, digest: int) -> list[int]:
        """Computes a row's tokens. Returns the digest after each."""
        slots, first, digests, before = self._slots, self._heads.start, list[int](), list[tuple[int, int]]()
        others = [(head, HEAD_WORDS * number) for number, head in enumerate(self._heads)][1:]
        table = _words(self._whole, row.block_table)
        for position in range(row.start):
            place = table[position // BLOCK_SIZE] + position % BLOCK_SIZE * SLOT_WORDS
            digest = after(digest, token := slots[place])
            if slots[place + 1] != digest ^ first:
                raise _wrong_slot(position, row, first)
            for head, away in others:
                if slots[place + away] != token or slots[place + away + 1] != digest ^ head:
                    raise _wrong_slot(position, row, head)
            before.append((token, digest))
        windows = [(group, _words(group, row.others[number])) for number, group in self._windows]
        states = [(group, row.others[number][0], row.others[number][1]) for number, group in self._states]
        for group, blocks in windows:
            self._check_window(row, group, blocks, before)
        for group, source, _ in states:
            self._check_state(row, group, source, digest)
        tables = [table, *(blocks for _, blocks in windows)]
        for position, token in enumerate(row.token_ids, row.start):
            digest = after(digest, token)
            for blocks in tables:
                place = blocks[position // BLOCK_SIZE] + position % BLOCK_SIZE * SLOT_WORDS
                slots[place], slots[place + 1] = token, digest ^ first
                for head, away in others:
                    slots[place + away], slots[place + away + 1] = token, digest ^ head
            digests.append(digest)
        for group, _, destination in states:
            (place,) = _words(group, (destination,))
            for number, head in enumerate(self._heads):
                at = place + STATE_WORDS * number
                slots[at], slots[at + 1] = digest ^ head, row.context_len
        return digests

    def _check_window(
        self, row: StepRow, group: GroupBlocks, blocks: Sequence[int], before: Sequence[tuple[int, int]]
    ) -> None:
        """Reads what a row's first token sees of a group with a window. ``before`` has the tokens and digests."""
        for position in range(max(0, row.start - group.spec.window + 1), row.start):
            token, digest = before[position]
            place = blocks[position // BLOCK_SIZE] + position % BLOCK_SIZE * SLOT_WORDS
            for number, head in enumerate(self._heads):
                at = place + HEAD_WORDS * number
                if self._slots[at] != token or self._slots[at + 1] != digest ^ head:
                    raise _wrong_slot(position, row, head)

    def _check_state(self, row: StepRow, group: GroupBlocks, source: int, digest: int) -> None:
        if (source == -1) != (row.start == 0):
            raise WrongCache(f"a row from token {row.start} on begins with state {source}")
        if source == -1:
            return
        (place,) = _words(group, (source,))
        for number, head in enumerate(self._heads):
            at = place + STATE_WORDS * number
            if self._slots[at] != digest ^ head or self._slots[at + 1] != row.start:
                raise WrongCache(
                    f"head {head} of the state after {row.start} tokens is not that of the request: it is one after "
                    f"{self._slots[at + 1]}"
                )

    def clear(self, blocks: Sequence[int]) -> None:
        for words in map(self._words_of, blocks):
            for word in words:
                self._slots[word] = 0

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        read = [[self._slots[word] for word in self._words_of(block)] for block in sources]
        for destination, content in zip(destinations, read, strict=True):
            for word, number in zip(self._words_of(destination), content, strict=True):
                self._slots[word] = number

    def _words_of(self, block: int) -> range:
        group = next(group for group in self.groups if block in group.ids)
        (first,) = _words(group, (block,))
        return range(first, first + group.block_bytes // 8)


_NOWHERE = 2**62


def _words(group: GroupBlocks, blocks: Sequence[int]) -> list[int]:
    """Returns the first word of each block; of a block that a table lacks, one that no memory has."""
    return [group.place(block) // 8 if block >= 0 else _NOWHERE for block in blocks]


def _wrong_slot(position: int, row: StepRow, head: int) -> WrongCache:
    return WrongCache(f"head {head} of token {position} of a context of {row.start} is not that of the request")


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
    before_step: Callable[[], None] = lambda: None
    """What a fault lets happen at the beginning of a step. It may raise."""

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
    ready: Ready
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
    counts: tuple[int, ...]
    """How many blocks each group of an engine's cache has."""
    cache: CacheShape
    kv_heads: int
    started: Callable[[RunningEngine], None]
    failed: Callable[[SimProcess, Exception], None]

    def __call__(self, launch: EngineLaunch) -> None:
        with SimContext() as context:
            channel = ApiChannel(context, launch.address)  # type: ignore[arg-type]
            try:
                channel.send(Starting("loading libraries"))
                self._serve(launch, channel)
            except Exception as exc:
                self._fail(channel, exc)
            channel.close(LINGER_S)

    def _fail(self, channel: ApiChannel, failure: Exception) -> None:
        """Ends the process as a failure does: the node is told, and nothing is closed."""
        self.failed(present_process(), failure)
        _report_failure(channel, failure)
        _linger(channel.socket)
        present_process().exit(1)

    def _serve(self, launch: EngineLaunch, channel: ApiChannel) -> None:
        with ExitStack() as stack:
            wake_up, life = WakeUp(), SimLifeBoard(launch.life)
            stack.callback(wake_up.close)
            ranks: Ranks | None = None
            if (size := launch.config.parallel.tensor_parallel_size) > 1:
                shares = [CoreShare((), 1)] * size
                ranks = stack.enter_context(running_ranks(launch.config, launch.folder, shares, wake_up.fd, life))
            group = stack.enter_context(joined_group(launch.config, ranks, CPU))
            engine = self._open(launch.config, channel, wake_up, ranks, group, life)
            stack.callback(engine.connector.close)
            if ranks is not None:
                ranks.notify(engine.loop.stop)
            self.started(engine)
            try:
                with life.sign(step_loop(0)).shown_by_this_thread():
                    channel.send(engine.ready)
                    engine.loop.run()
                if ranks is not None:
                    ranks.check()
            except Exception as exc:
                self._fail(channel, exc)

    def _open(
        self,
        config: EngineConfig,
        channel: ApiChannel,
        wake_up: WakeUp,
        ranks: Ranks | None,
        group: TpGroup,
        life: LifeBoard,
    ) -> RunningEngine:
        """Puts the engine together as ``assemble`` does."""
        process, max_model_len = present_process(), config.model.max_model_len
        counts = self.counts
        if ranks is not None:
            ranks.tell(LoadModel(counts[0], max_model_len, counts[1:]))
        own = SimRunner(self.cache, counts, self.kv_heads, group, self.pace(process))
        runner: SimRunner | TpRunner = own
        if ranks is not None:
            ranks.wait_for(Loaded)
            runner = TpRunner(own, ranks, group)  # type: ignore[arg-type]
            warm_up(runner, WARM_UP_TOKENS, BLOCK_SIZE, own.groups[1:])
            runner.warmed_up()
        blocks = BlockManager(
            counts[0],
            BLOCK_SIZE,
            prefix_cache=config.cache.prefix_cache is Switch.ON,
            bounded=own.groups[1:],
            block_bytes=own.groups[0].block_bytes,
        )
        prompts = PromptRule(VOCAB, max_model_len)
        step_cost = StepCost()
        targets = LatencyTargets(config.targets, step_cost, config.role, config.scheduler.batching)
        token_bytes = HEAD_BYTES * self.kv_heads / BLOCK_SIZE
        placement = Placement(step_cost, config.transfer, config.scheduler, BLOCK_SIZE, token_bytes, targets)
        secrets = Secrets(config.secret)
        connector, control = open_connector(
            config,
            spec=engine_spec(self.kv_heads, group.size, group_specs(self.cache, self.kv_heads)),
            kv_cache=own.kv_cache,
            groups=own.groups if len(counts) > 1 else (),
            shared=None,
            blocks=blocks,
            prompts=prompts,
            placement=placement,
            ranks=ranks,
            secrets=secrets,
            wake=wake_up.set,
            life=life,
        )
        try:
            loop = StepLoop(
                api=channel,
                wake_up=wake_up,
                runner=runner,
                blocks=blocks,
                connector=connector,
                config=config.scheduler,
                stop=StopRule(frozenset({EOS}), max_model_len),
                prompts=prompts,
                placement=placement,
                renew=secrets.renew,
                grammars=GrammarOpener(_no_vocabulary, wake_up.set),
                life=life.sign(step_loop(0)),
                ranks_s=0.0 if ranks is None else config.parallel.timeout_ms / 1000,
            )
        except BaseException:
            connector.close()
            raise
        own.live = loop._scheduler.live
        ready = Ready(
            control=control,
            fingerprint=FINGERPRINT,
            num_blocks=counts[0],
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_running=config.scheduler.max_num_seqs,
            vocab_size=VOCAB,
            kernels="simulated",
        )
        return RunningEngine(process, config.boot_id, blocks, loop, connector, ready)


@dataclass(frozen=True)
class RankProgram:
    """The program of all ranks but the engines' own, as ``rank_program.main`` has it."""

    failed: Callable[[SimProcess, Exception], None]

    def __call__(self, launch: RankLaunch) -> None:
        with SimContext() as context:
            life = SimLifeBoard(launch.life)
            sign = life.sign(step_loop(launch.rank))
            channel = OrderChannel(context, launch.address, life=sign)  # type: ignore[arg-type]
            failed: RankFailed | None = None
            try:
                run_rank(launch, channel, life)
            except Exception as exc:
                self.failed(present_process(), exc)
                failed = RankFailed(f"{type(exc).__name__}: {exc}")
            if failed is not None:
                channel.send(failed)
                _linger(channel._socket)
                present_process().exit(1)
            channel.close(LINGER_S)


def _linger(socket: object) -> None:
    """Lets the last words leave."""
    assert isinstance(socket, SimZmqSocket)
    socket.flush(LINGER_S)


def rank_model(cache: CacheShape, kv_heads: int, pace: Callable[[SimProcess], Pace]) -> dict[str, Any]:
    """Returns what ``run_rank`` loads in place of a real model's part, by its modules and names."""

    def load_runner(
        config: EngineConfig, decoder: Any, counts: Sequence[int], max_len: int, tp: TpGroup, *_: Any, **__: Any
    ) -> SimRunner:
        return SimRunner(cache, counts, kv_heads, tp, pace(present_process()))

    loading = "pdserve__engine__runner_loading__"
    return {
        f"{loading}load_runner": load_runner,
        f"{loading}rank_backend": lambda *_: None,
        f"{loading}rank_device": lambda *_: CPU,
        f"{loading}kept_block_kernels": lambda *_: None,
        "pdserve__models__checkpoint__config_reading__read_decoder_config": lambda _: SimpleNamespace(
            kv_heads=kv_heads
        ),
        "pdserve__models__rank_cache__cache_place": lambda *_: ((), 0),
        "pdserve__engine__kv_connector__transfer_memory__shared_memory": lambda *_: None,
        "pdserve__models__tp__tp_groups__open_group": SimGroup.open,
        "pdserve__engine__tp__tp_runner__open_group": SimGroup.open,
        # It would begin to look for garbage in the middle of the run.
        "pdserve__engine__tp__rank_program__loading_libraries": nullcontext,
    }


def _memory_of(kv_cache: torch.Tensor) -> memoryview:
    return memoryview(kv_cache.flatten().numpy())  # type: ignore[arg-type]  # ndarray is a buffer, unannotated


def _no_vocabulary() -> LLTokenizer:
    raise AssertionError("no grammar is simulated yet")
