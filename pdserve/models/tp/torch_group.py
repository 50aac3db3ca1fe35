"""Lets ranks add up their tensors through torch.distributed.

``TorchCollectives`` has a group's two operations on either backend, gloo's or NCCL's; ``GlooGroup`` is a group on CPUs.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from pdserve.errors import RankLost
from pdserve.models.tp.rank_board import RankBoard

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
