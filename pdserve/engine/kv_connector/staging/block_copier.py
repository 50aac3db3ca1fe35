"""Copies KV blocks between a cache and its staging blocks, beside the step loop, on one rank or on all.

Staging blocks are page-locked host memory. ``staged`` is always a list of their ids.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from pdserve.engine.kv_connector.transfer_memory import CacheParts
from pdserve.engine.tp.tp_ranks import Ranks
from pdserve.liveness import SHOWN_EVERY_S, LifeSign, unseen_sign
from pdserve.wire.rank import DownloadBlocks, UploadBlocks
from pdserve_kernels import reference

log = logging.getLogger(__name__)

Key = TypeVar("Key")

BATCH_BYTES = 32 * 2**20
"""One gather or scatter moves at most this much: enough to keep the bus busy, with a small buffer."""


JOB_S = 60.0
"""A job may take this long: a GPU first does what the engine had launched before, such as a step that compiles."""


class CopyKernels(Protocol):
    """Copies blocks of a cache to the first blocks of a buffer (``gather``), and back (``scatter``)."""

    def gather(self, cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None: ...

    def scatter(self, cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None: ...


class _TorchKernels:
    @staticmethod
    def gather(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None:
        buffer[: len(blocks)] = reference.gather_blocks(cache, blocks)

    @staticmethod
    def scatter(cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None:
        reference.scatter_blocks(cache, blocks, buffer[: len(blocks)])


class _TritonKernels:
    def __init__(self) -> None:
        from pdserve_kernels.triton import cache_ops

        self.gather = cache_ops.gather_blocks
        self.scatter = cache_ops.scatter_blocks


def copy_kernels(device: torch.device) -> CopyKernels:
    """Returns the kernels for a cache on this device."""
    return _TorchKernels() if device.type == "cpu" else _TritonKernels()


@dataclass(frozen=True, slots=True)
class _Copy(Generic[Key]):
    key: Key
    blocks: tuple[int, ...]
    staged: tuple[int, ...]
    upload: bool
    after: torch.cuda.Event | None
    """The event that is over when the GPU has done all that the engine had launched before the job."""


class Copier(Protocol[Key]):
    """A ``BlockCopier``, or a ``RanksCopier`` over several ranks. It does jobs in the order in which it gets them."""

    @property
    def failure(self) -> str | None:
        """The reason why no more jobs will end; None while they do."""

    def download(self, key: Key, blocks: Sequence[int], staged: Sequence[int]) -> None:
        """Copies final blocks of the cache to staging blocks. They must not change until ``done`` returns ``key``."""

    def upload(self, key: Key, staged: Sequence[int], blocks: Sequence[int]) -> None:
        """Copies staging blocks to blocks of the cache, which nothing else may touch until ``done`` returns ``key``."""

    def done(self) -> list[Key]:
        """Returns the keys of the jobs that have ended since the last call, in order."""

    def close(self, timeout_s: float) -> None:
        """Drops jobs that have not begun. Returns when none reads or writes any more, or after ``timeout_s``."""


class BlockCopier(Generic[Key]):
    """Copies in a thread with a stream of its own: neither the step loop nor the GPU's computing waits for a copy.

    Satisfies ``Copier``. ``wake`` is called from the thread after ``done`` or ``failure`` has news.
    """

    def __init__(
        self,
        cache: CacheParts | torch.Tensor,
        staging: torch.Tensor,
        kernels: CopyKernels,
        wake: Callable[[], None],
        life: LifeSign | None = None,
    ) -> None:
        """``staging`` is host memory ``[staging blocks, ...]`` with the shape and dtype of the cache's blocks, or of
        bytes for the largest block if the model has cache groups.

        ``life`` is where the thread shows life.
        """
        self._life = unseen_sign() if life is None else life
        self._cache = cache if isinstance(cache, CacheParts) else CacheParts.of(cache)
        self._kernels, self._wake = kernels, wake
        self._device = self._cache.parts[0].device
        self._on_gpu = self._device.type == "cuda"
        self._parts = [_copied_part(part, staging) for part in self._cache.parts]
        self._warm_up()
        self._jobs: deque[_Copy[Key]] = deque()
        self._news = threading.Condition()
        self._done: deque[Key] = deque()
        self._closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="kv-staging", daemon=True)
        self._thread.start()

    def download(self, key: Key, blocks: Sequence[int], staged: Sequence[int]) -> None:
        self._order(key, blocks, staged, upload=False)

    def upload(self, key: Key, staged: Sequence[int], blocks: Sequence[int]) -> None:
        self._order(key, blocks, staged, upload=True)

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

    @torch.inference_mode()
    def _warm_up(self) -> None:
        # The first call compiles a GPU's kernel, and no prompt should wait for that. Block 0 gets what it has.
        block = torch.zeros(1, dtype=torch.int32, device=self._device)
        for part in self._parts:
            if part.cache.numel():
                self._kernels.gather(part.cache, block, part.buffer)
                self._kernels.scatter(part.cache, block, part.buffer)

    def _order(self, key: Key, blocks: Sequence[int], staged: Sequence[int], *, upload: bool) -> None:
        if len(blocks) != len(staged):
            raise ValueError(f"{len(blocks)} blocks do not fit {len(staged)} staging blocks")
        after = None
        if self._on_gpu:
            after = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation
            after.record(torch.cuda.current_stream(self._device))
        with self._news:
            self._jobs.append(_Copy(key, tuple(blocks), tuple(staged), upload, after))
            self._news.notify()

    def _run(self) -> None:
        try:
            with self._life.shown_by_this_thread(computes=not self._on_gpu):
                if self._on_gpu:
                    stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # as above
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
            self._life.show(JOB_S)
            self._carry_out(job)
            self._done.append(job.key)
            self._wake()

    def _next(self) -> _Copy[Key] | None:
        with self._news:
            self._life.show()
            while not self._news.wait_for(lambda: self._closing or self._jobs, SHOWN_EVERY_S):
                self._life.show()
            return None if self._closing else self._jobs.popleft()

    @torch.inference_mode()
    def _carry_out(self, job: _Copy[Key]) -> None:
        stream = torch.cuda.current_stream(self._device) if self._on_gpu else None
        if stream is not None and job.after is not None:
            stream.wait_event(job.after)
        if len(self._parts) == 1:
            self._copy(self._parts[0], job.blocks, job.staged, upload=job.upload)
        else:
            self._copy_by_group(job)
        if stream is not None:
            stream.synchronize()

    def _copy_by_group(self, job: _Copy[Key]) -> None:
        places: dict[int, list[int]] = {}
        for place, block in enumerate(job.blocks):
            places.setdefault(self._cache.group_of(block), []).append(place)
        for group, of_group in places.items():
            first = self._cache.firsts[group]
            blocks = [job.blocks[place] - first for place in of_group]
            self._copy(self._parts[group], blocks, [job.staged[place] for place in of_group], upload=job.upload)

    def _copy(self, part: _CopiedPart, blocks: Sequence[int], staged: Sequence[int], *, upload: bool) -> None:
        """``blocks`` are counted from the part's first one."""
        batch, buffer = len(part.buffer), part.buffer
        for first in range(0, len(blocks), batch):
            index = torch.tensor(blocks[first : first + batch], dtype=torch.int32, device=self._device)
            runs = _adjacent_runs(staged[first : first + batch])
            if upload:
                for offset, run in runs:
                    buffer[offset : offset + len(run)].copy_(part.staging[run.start : run.stop], non_blocking=True)
                self._kernels.scatter(part.cache, index, buffer)
            else:
                self._kernels.gather(part.cache, index, buffer)
                for offset, run in runs:
                    part.staging[run.start : run.stop].copy_(buffer[offset : offset + len(run)], non_blocking=True)


@dataclass(frozen=True, slots=True)
class _CopiedPart:
    """The blocks of one group."""

    cache: torch.Tensor
    """``[blocks, ...]``"""
    staging: torch.Tensor
    """``[staging blocks, ...]``"""
    buffer: torch.Tensor
    """``[blocks of a batch, ...]``, on the cache's device."""


def _copied_part(cache: torch.Tensor, staging: torch.Tensor) -> _CopiedPart:
    nbytes = cache.shape[1:].numel() * cache.itemsize
    if staging.shape[1:] != cache.shape[1:] or staging.dtype != cache.dtype:
        staging = staging[:, :nbytes].view(cache.dtype)
    batch = max(1, min(len(staging), BATCH_BYTES // max(1, nbytes)))
    buffer = torch.empty(batch, *cache.shape[1:], dtype=cache.dtype, device=cache.device)
    return _CopiedPart(cache, staging, buffer)


def _adjacent_runs(staged: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Yields neighbouring staging blocks as ranges, each with its place in the list."""
    start = 0
    for end in range(1, len(staged) + 1):
        if end == len(staged) or staged[end] != staged[end - 1] + 1:
            yield start, range(staged[start], staged[end - 1] + 1)
            start = end


class RanksCopier(Generic[Key]):
    """Satisfies ``Copier``. The other ranks get each order between the same steps as rank 0's own copier.

    Every rank carries out its orders one after another, so counting them says which are done everywhere.
    """

    def __init__(self, own: BlockCopier[Key], ranks: Ranks) -> None:
        """``own`` is rank 0's copier, which this object closes."""
        self._own, self._ranks = own, ranks
        self._done_here: deque[Key] = deque()
        self._done_everywhere = 0

    @property
    def failure(self) -> str | None:
        return self._own.failure

    def download(self, key: Key, blocks: Sequence[int], staged: Sequence[int]) -> None:
        self._ranks.tell(DownloadBlocks(list(blocks), list(staged)))
        self._own.download(key, blocks, staged)

    def upload(self, key: Key, staged: Sequence[int], blocks: Sequence[int]) -> None:
        self._ranks.tell(UploadBlocks(list(staged), list(blocks)))
        self._own.upload(key, staged, blocks)

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
