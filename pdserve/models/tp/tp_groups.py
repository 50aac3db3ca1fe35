"""The groups in which the ranks of a node add up their tensors: one class for each backend, and how one is opened.

``SharedMemoryGroup`` is one of the CPUs of one host. Every rank writes its tensor into an exchange area of its own,
raises its counter, waits until all ranks have, and adds up all areas in rank order, so that all ranks get the same
bits. Areas alternate between two sets: before a rank writes to an area again, every rank has begun the collective in
between, and so has read the area. With two ranks on a core each, a sum was measured to take 9 µs for one row of 576
numbers and 11 µs for 16 rows, where gloo over loopback takes 100 µs at its best. SmolLM2-135M takes 61 such sums a
step.

The others go through torch.distributed: ``TorchCollectives`` has a group's two operations. ``GlooGroup`` is a group on
CPUs, and ``NcclGroup`` one on GPUs, where each rank has its own.

In an ``NcclGroup``, only ``finish_step`` waits for a GPU: operations are queued behind the kernels before them, and a
recorded decode step holds them like any other kernel. A rank that does not come keeps the others' GPUs waiting without
end, and no library would notice within a replayed graph. So rank 0 asks whether its GPU is done, instead of blocking
until it is, and looks in between at the clock and at the board, which says when a rank has ended.
"""

from __future__ import annotations

import os
import platform
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from pdserve.config import ParallelConfig, TpBackend
from pdserve.errors import ConfigError, RankLost
from pdserve.models.backend import CPU
from pdserve.models.tp.rank_board import AREA_BYTES, RankBoard
from pdserve.models.tp.shares import TpGroup
from pdserve.patience import PatientWait

# torch declares no types for what these classes have.
_distributed: Any = torch.distributed

MEET_S = 120.0
"""Ranks have this long to meet: they load their libraries at different speeds."""


class TorchCollectives:
    """The two operations of a group. They raise what torch raises. ``backend`` stays open."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self._backend, self._rank, self._size = backend, rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Puts the sum over all ranks into ``x``, and returns it."""
        self._backend.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Does what ``shares.TpGroup`` says. Without rows, it does not involve the other ranks."""
        rows, columns = x.shape
        if rows == 0:
            return x.new_empty(0, self._size * columns)
        options = _distributed.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else []
        self._backend.gather([parts] if parts else [], [x.contiguous()], options).wait()
        return torch.cat(parts, 1) if parts else x.new_empty(rows, 0)


class GlooGroup:
    """Satisfies ``shares.TpGroup`` for CPU tensors, over TCP on the loopback interface."""

    def __init__(self, rendezvous: Path, board: RankBoard, rank: int, size: int, timeout_s: float) -> None:
        """Returns when all ranks have met at the file ``rendezvous``. Raises RankLost if they do not in time.

        The default group of torch.distributed is not used: it would take its addresses from the environment.
        """
        self.rank, self.size = rank, size
        self._board, self._timeout_s = board, timeout_s
        options = _distributed.ProcessGroupGloo._Options()
        options._devices = [_distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=MEET_S)
        try:
            self._gloo = _distributed.ProcessGroupGloo(
                _distributed.FileStore(str(rendezvous), size), rank, size, options
            )
        except RuntimeError as exc:
            raise RankLost(f"the tensor-parallel ranks did not meet in {MEET_S:.0f} s: {exc}") from exc
        self._gloo._set_default_timeout(timedelta(seconds=timeout_s))
        self._collectives = TorchCollectives(self._gloo, rank, size)

    def begin_step(self) -> None:
        """Does nothing: each operation counts itself."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Raises RankLost if a rank is gone or does not come."""
        self._board.advance(self.rank)
        try:
            return self._collectives.all_reduce(x)
        except RuntimeError as exc:
            raise self._lost(exc) from exc

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Raises RankLost if a rank is gone or does not come."""
        if x.shape[0]:
            self._board.advance(self.rank)
        try:
            return self._collectives.gather(x)
        except RuntimeError as exc:
            raise self._lost(exc) from exc

    def finish_step(self) -> None:
        """Does nothing: each operation has waited until it was done."""

    def warmed_up(self) -> None:
        """Does nothing: nothing is compiled in a step on a CPU."""

    def close(self) -> None:
        self._gloo.shutdown()

    def _lost(self, error: RuntimeError) -> RankLost:
        if "imed out" in str(error):
            return RankLost.silent(self._board.behind(self.rank, self.size), self._timeout_s)
        return RankLost(f"a tensor-parallel rank is gone: {error}")


WATCHDOG_S = 600.0
"""After this time torch would end the process without a message. Rank 0 notices before, and says which rank hangs."""
_SPIN_S = 0.02
"""Rank 0 asks without a nap for this long, which is longer than most decode steps take: a nap would make them late."""
_NAP_S = 0.0001

_ENVIRONMENT = {
    # The ranks of a node are on one host: nothing needs to listen beyond it.
    "NCCL_SOCKET_IFNAME": "lo",
    # This is for a thread that would read the meeting file for ever, although it is gone once the ranks have met.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Settings that NCCL and torch read from the environment alone. A value that the user has set stays."""


class NcclGroup:
    """Satisfies ``shares.TpGroup`` for tensors on this rank's own GPU, which is the current one."""

    def __init__(
        self, rendezvous: Path, board: RankBoard, rank: int, size: int, timeout_s: float, device: torch.device
    ) -> None:
        """Returns when all ranks have met at the file ``rendezvous`` and added up one number.

        Raises RankLost if they do not, ConfigError if this torch has no NCCL.
        """
        if not _distributed.is_nccl_available():
            raise ConfigError("tensor-parallel ranks on GPUs need a torch that was built with NCCL")
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.rank, self.size = rank, size
        self._board, self._timeout_s = board, timeout_s
        # Kernels are compiled when they are first launched. Ranks other than 0 never hear that all are: it is rank 0
        # that finds a rank late, and these waits end when it has.
        self._patience_s = max(timeout_s, MEET_S)
        self._lost = False
        store = _distributed.FileStore(str(rendezvous), size)
        store.set_timeout(timedelta(seconds=MEET_S))
        options = _distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=WATCHDOG_S)
        try:
            self._nccl = _distributed.ProcessGroupNCCL(store, rank, size, options)
            self._collectives = TorchCollectives(self._nccl, rank, size)
            # The first operation makes NCCL's connections, which cannot be recorded.
            self.all_reduce(torch.zeros(1, device=device))
        except RuntimeError as exc:
            raise RankLost(f"the tensor-parallel ranks did not meet in {MEET_S:.0f} s: {exc}") from exc
        self._wait(MEET_S)

    def begin_step(self) -> None:
        self._board.advance(self.rank)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Queues the operation. Raises RankLost if NCCL has already noticed that a rank is gone."""
        try:
            return self._collectives.all_reduce(x)
        except RuntimeError as exc:
            raise self._failed(f"a tensor-parallel rank is gone: {exc}") from exc

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Queues the operation. Raises RankLost if NCCL has already noticed that a rank is gone."""
        try:
            return self._collectives.gather(x)
        except RuntimeError as exc:
            raise self._failed(f"a tensor-parallel rank is gone: {exc}") from exc

    def finish_step(self) -> None:
        self._wait(self._patience_s)

    def warmed_up(self) -> None:
        self._patience_s = self._timeout_s

    def close(self) -> None:
        """Closes this rank's part alone, because the others may not be ready to leave.

        Does nothing once a rank is lost: what then waits on a GPU ends with the process.
        """
        if not (self._lost or self._board.abandoned):
            self._nccl.abort()

    def _wait(self, timeout_s: float) -> None:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation
        done.record()
        wait = PatientWait()
        while not self._reached(done):
            if self._board.abandoned:
                raise self._failed("a tensor-parallel rank is gone")
            waited_s = wait.look()
            if waited_s > timeout_s:
                self._lost = True
                raise RankLost.silent(self._board.behind(self.rank, self.size), timeout_s)
            if waited_s < _SPIN_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)

    def _reached(self, event: torch.cuda.Event) -> bool:
        try:
            return bool(event.query())  # type: ignore[no-untyped-call]  # torch has no annotation
        except RuntimeError as exc:
            raise self._failed(f"this rank's GPU failed: {exc}") from exc

    def _failed(self, why: str) -> RankLost:
        self._lost = True
        return RankLost(why)


_SPINS = 200
_YIELD_S = 0.005


def ordered_stores() -> bool:
    """Returns whether other cores see a core's writes in the order in which it made them, as a counter needs it."""
    return platform.machine() in ("x86_64", "AMD64")


class SharedMemoryGroup:
    """Satisfies ``shares.TpGroup`` for CPU tensors, on CPUs with ``ordered_stores``."""

    def __init__(self, board: RankBoard, rank: int, size: int, timeout_s: float) -> None:
        """``timeout_s`` is how long one rank may keep the others waiting."""
        self.rank, self.size = rank, size
        self._board, self._timeout_s = board, timeout_s
        self._others = [other for other in range(size) if other != rank]
        # A tensor that is larger than an area is added up in parts.
        self._areas = torch.frombuffer(board.areas, dtype=torch.uint8).view(2, size, AREA_BYTES)

    def begin_step(self) -> None:
        """Does nothing: each operation counts itself."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Raises RankLost if a rank is gone or does not come."""
        flat = x.view(-1)
        at_once = AREA_BYTES // x.element_size()
        for start in range(0, flat.shape[0], at_once):
            part = flat[start : start + at_once]
            areas = self._share(part)
            self._wait_for(self._others, self._board.progress(self.rank))
            if self.size == 2:
                torch.add(areas[0], areas[1], out=part)
            else:
                total = areas[0].to(torch.float32, copy=True)
                for other in range(1, self.size):
                    total += areas[other]
                part.copy_(total)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Raises RankLost if a rank is gone or does not come."""
        rows, columns = x.shape
        if rows == 0:
            return x.new_empty(0, self.size * columns)
        out = x.new_empty(rows, self.size, columns) if self.rank == 0 else x.new_empty(rows, 0)
        at_once = max(AREA_BYTES // (columns * x.element_size()), 1)
        for start in range(0, rows, at_once):
            part = x[start : start + at_once].contiguous()
            areas = self._share(part.view(-1))
            if self.rank == 0:
                self._wait_for(self._others, self._board.progress(0))
                out[start : start + at_once] = areas.view(self.size, -1, columns).transpose(0, 1)
        return out.view(rows, -1)

    def finish_step(self) -> None:
        """Does nothing: each operation has waited until it was done."""

    def warmed_up(self) -> None:
        """Does nothing: nothing is compiled in a step on a CPU."""

    def close(self) -> None:
        del self._areas

    def _share(self, part: torch.Tensor) -> torch.Tensor:
        """Shows this rank's part to the others. Returns all parts, ``[size, elements]``, which may still come."""
        number = self._board.progress(self.rank) + 1
        # A rank that waits for no other, as in gather, must not run two collectives ahead of one that still reads.
        self._wait_for(self._others, number - 1)
        areas = self._areas[number & 1][:, : part.numel() * part.element_size()].view(part.dtype)
        areas[self.rank].copy_(part)
        self._board.advance(self.rank)
        return areas

    def _wait_for(self, ranks: list[int], number: int) -> None:
        """Waits until all of ``ranks`` have begun collective ``number``."""
        for rank in ranks:
            for _ in range(_SPINS):
                if self._board.progress(rank) >= number:
                    break
            else:
                self._wait_long(rank, number)

    def _wait_long(self, rank: int, number: int) -> None:
        # Ranks with cores of their own differ by microseconds. If ranks share cores, the other rank needs this one's.
        board, wait = self._board, PatientWait()
        while board.progress(rank) < number:
            if board.abandoned:
                raise RankLost("a tensor-parallel rank is gone")
            waited_s = wait.look()
            if waited_s > self._timeout_s:
                raise RankLost.silent(board.behind(self.rank, self.size), self._timeout_s)
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)


def open_group(
    config: ParallelConfig, rank: int, board: RankBoard, rendezvous: Path, device: torch.device = CPU
) -> TpGroup:
    """Opens the group, once the other ranks have come.

    All ranks give the same ``config``, ``board`` and ``rendezvous``, and the same kind of device.


    Raises RankLost if the others do not come, ConfigError if this machine cannot do what the config asks.
    """
    timeout_s = config.timeout_ms / 1000
    match tp_backend(config.backend, device):
        case TpBackend.NCCL:
            torch.cuda.set_device(device)
            return NcclGroup(rendezvous, board, rank, config.tensor_parallel_size, timeout_s, device)
        case TpBackend.GLOO:
            return GlooGroup(rendezvous, board, rank, config.tensor_parallel_size, timeout_s)
        case _:
            return SharedMemoryGroup(board, rank, config.tensor_parallel_size, timeout_s)


def tp_backend(asked: TpBackend, device: torch.device) -> TpBackend:
    """Returns the backend to use on this kind of device, never AUTO. Raises ConfigError if ``asked`` cannot be used."""
    fastest = TpBackend.NCCL if device.type == "cuda" else TpBackend.SHM if ordered_stores() else TpBackend.GLOO
    if asked is TpBackend.AUTO:
        return fastest
    if (asked is TpBackend.NCCL) != (device.type == "cuda"):
        raise ConfigError(
            f"--tp-backend {asked.value} is for {'GPUs' if asked is TpBackend.NCCL else 'CPUs'}, and the ranks compute"
            f" on {'GPUs' if device.type == 'cuda' else 'CPUs'}; take {fastest.value}"
        )
    if asked is TpBackend.SHM and not ordered_stores():
        raise ConfigError("--tp-backend shm needs an x86 CPU; take gloo")
    return asked
