"""The two operations of a tensor-parallel group on one of torch.distributed's backends: gloo's or NCCL's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

# torch does not declare what these classes have.
_torch: Any = torch.distributed


class TorchCollectives:
    """Does not own ``backend``. Raises what torch raises."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self._backend, self._rank, self._size = backend, rank, size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in ``x``."""
        self._backend.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See ``tensor_parallel.TpGroup``; asks the others nothing where there are no rows."""
        rows, columns = x.shape
        if rows == 0:
            return x.new_empty(0, self._size * columns)
        options = _torch.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else []
        self._backend.gather([parts] if parts else [], [x.contiguous()], options).wait()
        return torch.cat(parts, 1) if parts else x.new_empty(rows, 0)
