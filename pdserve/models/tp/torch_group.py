"""Lets ranks add up their tensors through torch.distributed.

``TorchCollectives`` has a group's two operations on either backend. ``GlooGroup`` is a group on CPUs, and ``NcclGroup``
one on GPUs, where each rank has its own.

In an ``NcclGroup``, only ``finish_step`` waits for a GPU: operations are queued behind the kernels before them, and a
recorded decode step holds them like any other kernel. A rank that does not come keeps the others' GPUs waiting without
end, and no library would notice within a replayed graph. So rank 0 asks whether its GPU is done, instead of blocking
until it is, and looks in between at the clock and at the board, which says when a rank has ended.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from pdserve.errors import ConfigError, RankLost
from pdserve.models.tp.rank_board import RankBoard
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
