"""The two ends of a benchmarked transfer. Each has as much of an engine as it needs, and no model.

``BenchEngine`` is a KV cache and a transfer thread beside it. ``FetchingEngine`` is the decode side: it fetches
prompts, one or several at a time, and says when they have landed. ``OfferingEngine`` is a decode engine whose answers
grow, so that it offers their blocks. ``PushingEngine`` is a prefill engine that has computed every prompt already, and
fetches what it is offered.
``PrefillProcess`` is the handle of a process with a ``PushingEngine``; they exchange one JSON line each way.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from pdserve.config import Switch, TransferConfig
from pdserve.engine.kv_connector.kv_return import RETURNS_PER_S
from pdserve.engine.kv_connector.transfer_memory import region_of, transport_for
from pdserve.errors import BenchError
from pdserve.process import AnsweringProcess, python_program
from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep, laid_out, moved_blocks
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken, SamplingParams
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import BLOCK_HASH_BYTES, EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kvtransfer.configuration import bound_to_loopback, side_settings
from pdserve_kvtransfer.events import (
    BlocksOffered,
    CachedFetchOrder,
    CachedWanted,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    PushEnded,
    PushWanted,
    TransferThreadDied,
)
from pdserve_kvtransfer.region import SharedMemory
from pdserve_kvtransfer.thread import TransferThread
from pdserve_kvtransfer.transport import StepUnderWay


class TransferSetup(msgspec.Struct, frozen=True):
    """The settings that both engines are started with."""

    config: TransferConfig
    secret: bytes
    cache_dir: str
    """The folder for compiled code."""
    device: str = "cpu"
    """The device whose memory holds the caches, by torch's name."""


class Assignment(msgspec.Struct, frozen=True):
    """The cache that the prefill engine serves, and how it pushes blocks."""

    block_bytes: int
    blocks: int
    setup: TransferSetup
    chunk_blocks: int = 0
    """The number of blocks that are pushed together, like those of a prefill chunk; 0 pushes all at once."""
    chunk_s: float = 0.0
    """The seconds from one such push to the next."""
    state_bytes: int = 0
    """As in ``CacheShape``."""
    window: int = 0
    """As in ``CacheShape``."""

    @property
    def shape(self) -> CacheShape:
        return CacheShape(self.block_bytes, self.blocks, self.state_bytes, self.window)


class Serving(msgspec.Struct, frozen=True):
    """The addresses of the engine, and the thread whose CPU time is its own."""

    control: str
    boot_id: bytes
    thread: int


BLOCK_TOKENS = 16
_STATES = 2
_TILES = 2 * BLOCK_TOKENS * torch.bfloat16.itemsize
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The size of a KV cache: the number and the size of its blocks. ``block_bytes`` is a multiple of 64."""

    block_bytes: int
    blocks: int
    state_bytes: int = 0
    """If not 0, a context has a state of so many bytes, and its blocks have none."""
    window: int = 0
    """If not 0, a half of each block is of layers that see so many tokens, and a cache group of its own."""

    @property
    def specs(self) -> tuple[GroupSpec, ...]:
        """Returns the cache groups; none if there is one."""
        if self.state_bytes:
            state = GroupSpec("state", Keep.LATEST, 1, 1, self.state_bytes, "fp32")
            return GroupSpec("all", Keep.ALL, 0, 0, 0, "bf16"), state
        if self.window:
            half = GroupSpec("all", Keep.ALL, 1, 1, self.block_bytes // 2, "bf16")
            window = msgspec.structs.replace(half, name=f"window {self.window}", keep=Keep.WINDOW, window=self.window)
            return half, window
        return ()

    def place(self) -> tuple[tuple[GroupBlocks, ...], int]:
        """Returns where the blocks of each group are, and the bytes of the cache."""
        if not self.specs:
            return (), self.block_bytes * self.blocks
        counts = (self.blocks, _STATES) if self.state_bytes else (self.blocks, self.blocks)
        return laid_out(self.specs, counts, [spec.head_bytes for spec in self.specs])

    def moved(self, blocks: int) -> tuple[int, ...]:
        """Returns the ids of what moves of a context of ``blocks`` blocks: of each group the first ones."""
        if not self.specs:
            return tuple(number % self.blocks for number in range(blocks))
        groups, _ = self.place()
        moved = moved_blocks(self.specs, BLOCK_TOKENS, 0, blocks * BLOCK_TOKENS)
        return tuple(groups[block.group].first + block.number % groups[block.group].count for block in moved)

    def allocate(self, device: torch.device, shared: SharedMemory | None) -> torch.Tensor:
        """Returns a cache in the engine's layout, with every page of it written once; with groups, its bytes."""
        if self.specs:
            _, nbytes = self.place()
            if shared is not None:
                return torch.frombuffer(shared.bytes, dtype=torch.uint8).fill_(1)
            return torch.ones(nbytes, dtype=torch.uint8, device=device)
        layout = KvLayout(1, 1, BLOCK_TOKENS, self.block_bytes // _TILES, torch.bfloat16)
        cache = layout.allocate(self.blocks, device) if shared is None else layout.over(shared.bytes)
        return cache.fill_(0.5)

    @property
    def spec(self) -> EngineSpec:
        """Returns the specification that both engines agree on."""
        return EngineSpec(
            protocol=PROTOCOL_VERSION,
            oldest_protocol=OLDEST_PROTOCOL,
            fingerprint="pdserve bench transfer",
            dtype="bf16",
            block_size=BLOCK_TOKENS,
            num_layers=1,
            kv_heads=1,
            head_dim=self.block_bytes // _TILES,
            tp_size=1,
            groups=self.specs,
        )


class BenchEngine:
    """A KV cache and its transfer thread. Its start raises TransferError or ConfigError. ``close`` has to be called."""

    def __init__(self, boot_id: bytes, shape: CacheShape, setup: TransferSetup, wake: Callable[[], None]) -> None:
        self.boot_id = boot_id
        device = torch.device(setup.device)
        shares = device.type == "cpu" and setup.config.shared_cache is Switch.ON
        groups, nbytes = shape.place()
        shared = SharedMemory(nbytes) if shares else None
        self.cache = shape.allocate(device, shared)
        self.step = StepUnderWay()
        self.thread = TransferThread(
            boot_id=boot_id,
            secret=setup.secret,
            spec=shape.spec,
            region=region_of(self.cache, shared, groups),
            settings=side_settings(setup.config),
            transport=transport_for(
                setup.config, Path(setup.cache_dir), self.cache.device, loopback=bound_to_loopback(setup.config)
            ),
            wake=wake,
            step=self.step,
        )
        self.control = self.thread.start()

    def cpu_s(self) -> float:
        """Returns the CPU time of the transfer thread so far."""
        return thread_cpu_s(os.getpid(), self.thread.native_id)

    def close(self) -> None:
        self.thread.close(CLOSE_S)


def thread_cpu_s(process: int, thread: int) -> float:
    """Returns the CPU seconds of any thread of this machine, to the nanosecond if the thread is asleep."""
    return int(Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


_DEADLINE_S = 120.0
_TEXT_BLOCKS = 32
"""An offer names so many blocks: a text of 512 tokens."""
_SAMPLING = SamplingParams(max_tokens=1, seed=0)


class FetchingEngine:
    """The decode side of a transfer. ``close`` has to be called."""

    def __init__(self, target: PrefillTarget, shape: CacheShape, setup: TransferSetup) -> None:
        """Raises TransferError if its sockets or UCX cannot be opened."""
        self._target = target
        self._woken = threading.Event()
        self._open = 0
        self._shape = shape
        self._engine = BenchEngine(new_id(), shape, setup, self._woken.set)
        self.cpu_s = self._engine.cpu_s
        self.close = self._engine.close

    def decode(self, step: Callable[[], object]) -> None:
        """Computes a decode step, to which the transfer thread leaves most of the core."""
        self._engine.step.decodes = True
        try:
            step()
        finally:
            self._engine.step.decodes = False

    @property
    def open(self) -> int:
        """Returns the number of fetches under way, as of the last ``turn``."""
        return self._open

    @property
    def bytes_received(self) -> int:
        return self._engine.thread.stats().bytes_received

    def order(self, blocks: int) -> None:
        """Begins to fetch ``blocks`` blocks, at most those of the cache."""
        transfer_id = TransferId(new_id(), 0, self._engine.boot_id)
        tokens, places = [0] * (blocks * BLOCK_TOKENS), self._shape.moved(blocks)
        order = FetchOrder(transfer_id, self._target, tokens, 0, places, _SAMPLING, _DEADLINE_S)
        self._engine.thread.fetch(order)
        self._open += 1

    def turn(self) -> None:
        """Notes which fetches have landed. Raises BenchError if one failed."""
        self._woken.clear()
        for event in self._engine.thread.events():
            match event:
                case FetchLanded():
                    self._open -= 1
                case FetchFailed(reason=reason):
                    raise BenchError(f"a fetch failed: {reason}")
                case TransferThreadDied(message):
                    raise BenchError(f"the decode engine's transfer thread died: {message}")

    def fetch(self, blocks: int) -> float:
        """Returns the seconds from the order until all blocks have landed. Raises BenchError."""
        started = time.perf_counter()
        self.order(blocks)
        self.finish()
        return time.perf_counter() - started

    def fetch_in_a_row(self, blocks: int, count: int, ahead: int) -> float:
        """Returns the seconds that ``count`` fetches take, ``ahead`` of them under way at a time. Raises BenchError."""
        started = time.perf_counter()
        ordered = 0
        while ordered < count or self._open:
            while ordered < count and self._open < ahead:
                self.order(blocks)
                ordered += 1
            self._wait()
        return time.perf_counter() - started

    def finish(self) -> None:
        """Waits until no fetch is under way. Raises BenchError."""
        self.turn()
        while self._open:
            self._wait()

    def _wait(self) -> None:
        """Waits for news from the transfer thread. Raises BenchError."""
        if not self._woken.wait(_DEADLINE_S):
            raise BenchError(f"no fetch landed for {_DEADLINE_S:g} s")
        self.turn()


class OfferingEngine:
    """The decode side of KV return. ``close`` has to be called."""

    def __init__(self, target: PrefillTarget, shape: CacheShape, setup: TransferSetup) -> None:
        """Raises TransferError if its sockets or UCX cannot be opened."""
        self._target = target
        self._woken = threading.Event()
        self._blocks = shape.blocks
        self._offers = 0
        self._next_at = 0.0
        self.returned = 0
        """The number of offers whose block was fetched."""
        self._engine = BenchEngine(new_id(), shape, setup, self._woken.set)
        self.cpu_s = self._engine.cpu_s
        self.close = self._engine.close

    def offer(self) -> None:
        """Names the blocks of a text, whose last one is new to the prefill engine."""
        first = self._offers * _TEXT_BLOCKS
        self._engine.thread.offer(
            self._target, tuple((first + index).to_bytes(BLOCK_HASH_BYTES, "big") for index in range(_TEXT_BLOCKS))
        )
        self._offers += 1

    def turn(self, now: float) -> None:
        """Does what an engine does between two steps: gives blocks that are asked for, and offers one if it is time.

        Raises BenchError if the transfer thread has died.
        """
        self._answer()
        if now >= self._next_at:
            self._next_at = now + 1 / RETURNS_PER_S
            self.offer()

    def finish(self) -> None:
        """Waits until every offered block was fetched. Raises BenchError."""
        self._answer()
        while self.returned < self._offers:
            if not self._woken.wait(_DEADLINE_S):
                raise BenchError(f"no offered block was fetched for {_DEADLINE_S:g} s")
            self._answer()

    def _answer(self) -> None:
        self._woken.clear()
        for event in self._engine.thread.events():
            match event:
                case CachedWanted(transfer_id, hashes):
                    first = self._offers % self._blocks
                    blocks = tuple((first + index) % self._blocks for index in range(len(hashes)))
                    self._engine.thread.push(transfer_id, 0, blocks)
                    self._engine.thread.held(transfer_id, len(hashes))
                case PushEnded():
                    self.returned += 1
                case TransferThreadDied(message):
                    raise BenchError(f"the decode engine's transfer thread died: {message}")


@dataclass(slots=True)
class _ComputedPrompt:
    transfer_id: TransferId
    block_ids: tuple[int, ...]
    next: int
    due: float


class PushingEngine:
    """The prefill side of a transfer. It calls ``wake`` when ``turn`` has work. ``close`` has to be called."""

    def __init__(self, assignment: Assignment, wake: Callable[[], None]) -> None:
        self._assignment = assignment
        self._shape = assignment.shape
        self._pushes: deque[_ComputedPrompt] = deque()
        self._engine = BenchEngine(new_id(), self._shape, assignment.setup, wake)
        self.serving = Serving(self._engine.control, self._engine.boot_id, self._engine.thread.native_id)

    def turn(self) -> float | None:
        """Pushes the blocks that are due. Returns the seconds until there is more to push; None if nothing is left."""
        for event in self._engine.thread.events():
            match event:
                case PushWanted(transfer_id, token_ids):
                    block_ids = self._shape.moved(-(-len(token_ids) // BLOCK_TOKENS))
                    self._pushes.append(_ComputedPrompt(transfer_id, block_ids, 0, time.monotonic()))
                case BlocksOffered(holder, hashes):
                    self._fetch_offered(holder, hashes)
                case TransferThreadDied(message):
                    raise BenchError(f"the prefill engine's transfer thread died: {message}")
        now = time.monotonic()
        for push in self._pushes:
            self._push(push, now)
        self._pushes = deque(push for push in self._pushes if push.next < len(push.block_ids))
        return min((max(0.0, push.due - now) for push in self._pushes), default=None)

    def _fetch_offered(self, holder: PrefillTarget, hashes: tuple[bytes, ...]) -> None:
        """Fetches the last block of a text, as if the others were in the prefix cache."""
        transfer_id = TransferId(new_id(), 0, self._engine.boot_id)
        self._engine.thread.fetch(CachedFetchOrder(transfer_id, holder, hashes[-1:], (0,), _DEADLINE_S))

    def _push(self, push: _ComputedPrompt, now: float) -> None:
        if push.due > now:
            return
        blocks = push.block_ids[push.next :][: self._assignment.chunk_blocks or None]
        self._engine.thread.push(push.transfer_id, push.next, blocks)
        push.next += len(blocks)
        push.due += self._assignment.chunk_s
        if push.next == len(push.block_ids):
            self._engine.thread.first_token(push.transfer_id, (SampledToken(0),), 0)

    def close(self) -> None:
        self._engine.close()


_ANSWER_S = 120.0
_END_S = 10.0


class PrefillProcess:
    """The process of ``prefill_program``, which serves one assignment at a time."""

    def __init__(self, process: AnsweringProcess) -> None:
        self._process = process
        self._serving: Serving | None = None

    def assign(self, assignment: Assignment) -> PrefillTarget:
        """Returns the engine to fetch from. Raises ChildDied if the process does not answer."""
        self._serving = msgspec.json.decode(self._process.ask(assignment, _ANSWER_S), type=Serving)
        return PrefillTarget("prefill", self._serving.control, self._serving.boot_id)

    def cpu_s(self) -> float:
        """Returns the CPU time of its transfer thread so far. ``assign`` comes first."""
        assert self._serving is not None
        return thread_cpu_s(self._process.pid, self._serving.thread)


@contextmanager
def prefill_process(core: int, environ: Mapping[str, str]) -> Iterator[PrefillProcess]:
    """Yields a prefill process on ``core``, which runs until the block ends."""
    command = python_program("pdserve.bench.transfer.prefill_program", str(core))
    process = AnsweringProcess("the prefill process of the benchmark", command, environ)
    try:
        yield PrefillProcess(process)
    finally:
        process.reap(_END_S)
