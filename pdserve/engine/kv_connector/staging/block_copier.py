"""Copies KV blocks between a cache and page-locked host memory, beside the step loop, on one rank or on all."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from pdserve.engine.tp.tp_ranks import Ranks
from pdserve.wire.rank import DownloadBlocks, UploadBlocks
from pdserve_kernels import reference

log = logging.getLogger(__name__)

Key = TypeVar("Key")

BATCH_BYTES = 32 * 2**20
"""What one gather or scatter moves at most: keeps the bus busy, in a buffer that does not matter."""


class CopyKernels(Protocol):
    """``reference.gather_blocks`` into a buffer and ``reference.scatter_blocks`` out of it; its first blocks count."""

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None: ...

    def scatter(self, cache: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None: ...


class _TorchKernels:
    @staticmethod
    def gather(cache: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        staged[: len(blocks)] = reference.gather_blocks(cache, blocks)

    @staticmethod
    def scatter(cache: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        reference.scatter_blocks(cache, blocks, staged[: len(blocks)])


class _TritonKernels:
    def __init__(self) -> None:
        from pdserve_kernels.triton import cache_ops

        self.gather = cache_ops.gather_blocks
        self.scatter = cache_ops.scatter_blocks


def copy_kernels(device: torch.device) -> CopyKernels:
    """Those for a cache on this device."""
    return _TorchKernels() if device.type == "cpu" else _TritonKernels()


@dataclass(frozen=True, slots=True)
class _Job(Generic[Key]):
    key: Key
    blocks: tuple[int, ...]
    slots: tuple[int, ...]
    upload: bool
    after: torch.cuda.Event | None
    """All that the engine had given the GPU to do when the job was ordered."""


class Copier(Protocol[Key]):
    """``BlockCopier``, or ``RanksCopier`` over several ranks. Jobs are done in the order in which they were given."""

    @property
    def failure(self) -> str | None:
        """Why no job ends any more, if so."""

    def download(self, key: Key, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy final blocks of the cache to slots; they must stay what they are until ``done`` says ``key``."""

    def upload(self, key: Key, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy slots to blocks of the cache that nobody else touches until ``done`` says ``key``."""

    def done(self) -> list[Key]:
        """Keys of the jobs that have ended since the last call, in order."""

    def close(self, timeout_s: float) -> None:
        """Jobs not begun are dropped; returns when none reads or writes any more, or after ``timeout_s``."""


class BlockCopier(Generic[Key]):
    """A thread with a stream of its own: neither the step loop nor the GPU's computing waits for a copy.

    Satisfies ``Copier``. ``wake`` is called from the thread after ``done`` or ``failure`` has news.
    """

    def __init__(self, cache: torch.Tensor, slots: torch.Tensor, copies: CopyKernels, wake: Callable[[], None]) -> None:
        """``slots`` is host memory ``[num_slots, ...]`` with the shape and dtype of the cache's blocks."""
        self._cache, self._slots, self._copies, self._wake = cache, slots, copies, wake
        self._on_gpu = cache.device.type == "cuda"
        self._batch = max(1, min(len(slots), BATCH_BYTES // cache[0].nbytes))
        self._buffer = torch.empty(self._batch, *cache.shape[1:], dtype=cache.dtype, device=cache.device)
        self._jobs: deque[_Job[Key]] = deque()
        self._news = threading.Condition()
        self._done: deque[Key] = deque()
        self._closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="kv-staging", daemon=True)
        self._thread.start()

    def download(self, key: Key, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._order(key, blocks, slots, upload=False)

    def upload(self, key: Key, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._order(key, blocks, slots, upload=True)

    def done(self) -> list[Key]:
        ended = []
        while self._done:
            ended.append(self._done.popleft())
        return ended

    def close(self, timeout_s: float) -> None:
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(timeout_s)

    def _order(self, key: Key, blocks: Sequence[int], slots: Sequence[int], *, upload: bool) -> None:
        if len(blocks) != len(slots):
            raise ValueError(f"{len(blocks)} blocks do not fit {len(slots)} slots")
        after = None
        if self._on_gpu:
            after = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation
            after.record(torch.cuda.current_stream(self._cache.device))
        with self._news:
            self._jobs.append(_Job(key, tuple(blocks), tuple(slots), upload, after))
            self._news.notify()

    def _run(self) -> None:
        try:
            if self._on_gpu:
                stream = torch.cuda.Stream(self._cache.device)  # type: ignore[no-untyped-call]  # as above
                with torch.cuda.stream(stream):
                    self._work()
            else:
                self._work()
        except Exception as exc:
            log.exception("the copying of KV blocks died")
            self.failure = f"{type(exc).__name__}: {exc}"
            self._wake()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._move(job)
            self._done.append(job.key)
            self._wake()

    def _next(self) -> _Job[Key] | None:
        with self._news:
            self._news.wait_for(lambda: self._closing or self._jobs)
            return None if self._closing else self._jobs.popleft()

    @torch.inference_mode()
    def _move(self, job: _Job[Key]) -> None:
        stream = torch.cuda.current_stream(self._cache.device) if self._on_gpu else None
        if stream is not None and job.after is not None:
            stream.wait_event(job.after)
        for first in range(0, len(job.blocks), self._batch):
            slots = job.slots[first : first + self._batch]
            blocks = torch.tensor(job.blocks[first : first + self._batch], dtype=torch.int32, device=self._cache.device)
            if job.upload:
                for offset, run in _adjacent_runs(slots):
                    self._buffer[offset : offset + len(run)].copy_(self._slots[run.start : run.stop], non_blocking=True)
                self._copies.scatter(self._cache, blocks, self._buffer)
            else:
                self._copies.gather(self._cache, blocks, self._buffer)
                for offset, run in _adjacent_runs(slots):
                    self._slots[run.start : run.stop].copy_(self._buffer[offset : offset + len(run)], non_blocking=True)
        if stream is not None:
            stream.synchronize()


def _adjacent_runs(slots: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Neighbouring slots as ranges, each with its place in the list."""
    start = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1:
            yield start, range(slots[start], slots[end - 1] + 1)
            start = end


class RanksCopier(Generic[Key]):
    """Satisfies ``Copier``. The other ranks get each order between the same steps as rank 0's own copier.

    Every rank carries out its orders one after another, so counting them says which are done everywhere.
    """

    def __init__(self, own: BlockCopier[Key], ranks: Ranks) -> None:
        """``own`` is this object's to close."""
        self._own, self._ranks = own, ranks
        self._done_here: deque[Key] = deque()
        self._done_everywhere = 0

    @property
    def failure(self) -> str | None:
        return self._own.failure

    def download(self, key: Key, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._ranks.tell(DownloadBlocks(list(blocks), list(slots)))
        self._own.download(key, blocks, slots)

    def upload(self, key: Key, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._ranks.tell(UploadBlocks(list(slots), list(blocks)))
        self._own.upload(key, slots, blocks)

    def done(self) -> list[Key]:
        self._done_here += self._own.done()
        everywhere = self._ranks.copied
        ended = []
        while self._done_here and self._done_everywhere < everywhere:
            ended.append(self._done_here.popleft())
            self._done_everywhere += 1
        return ended

    def close(self, timeout_s: float) -> None:
        self._own.close(timeout_s)
