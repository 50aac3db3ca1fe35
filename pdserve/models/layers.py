"""The layers that every decoder is made of, each holding its rank's part of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdserve.models.tensor_parallel import TpGroup, vocab_part, vocab_share
from pdserve.models.weights import Checkpoint
from pdserve_kernels.contract import Kernels, Linear


@dataclass(frozen=True, slots=True)
class Building:
    """What a layer is built from."""

    checkpoint: Checkpoint
    kernels: Kernels
    tp: TpGroup


def column_parallel(building: Building, parts: Sequence[tuple[str, slice]]) -> Linear:
    """One product for several projections: each a name without ``.weight``, and this rank's outputs of it."""
    take = building.checkpoint
    weights = [take.take(f"{name}.weight", rows=rows) for name, rows in parts]
    found = [take.take_optional(f"{name}.bias", rows=rows) for name, rows in parts]
    biases = [bias for bias in found if bias is not None]
    return building.kernels.linear(torch.cat(weights), torch.cat(biases) if biases else None)


class RowParallel:
    """A projection whose inputs are spread over the ranks; the sum of all ranks is its output."""

    def __init__(self, building: Building, name: str, columns: slice) -> None:
        weight = building.checkpoint.take(f"{name}.weight", columns=columns)
        bias = building.checkpoint.take_optional(f"{name}.bias")
        self._tp = building.tp
        # Added once, not once a rank.
        self._linear = building.kernels.linear(weight, bias if self._tp.rank == 0 else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(self._linear(x))


class VocabParallelEmbedding:
    """Each rank knows the vectors of a part of the vocabulary."""

    def __init__(self, building: Building, name: str, vocab_size: int) -> None:
        self._tp = building.tp
        self._part = vocab_share(self._tp, vocab_size)
        self.weight = building.checkpoint.take(f"{name}.weight", rows=self._part)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._tp.size == 1:
            return F.embedding(token_ids, self.weight)
        mine = (token_ids >= self._part.start) & (token_ids < self._part.stop)
        vectors = F.embedding((token_ids - self._part.start).where(mine, 0), self.weight)
        return self._tp.all_reduce(vectors.masked_fill(~mine.unsqueeze(-1), 0))


class VocabParallelHead:
    """Logits: each rank computes a part of the vocabulary's, rank 0 gets all."""

    def __init__(self, building: Building, weight: torch.Tensor, vocab_size: int) -> None:
        """``weight`` holds this rank's rows of the whole."""
        self._tp, self._vocab_size = building.tp, vocab_size
        self._padding = vocab_part(self._tp, vocab_size) - weight.shape[0]
        self._linear = building.kernels.linear(weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden_size]`` to fp32 ``[rows, vocab_size]``; on other ranks than 0, ``[rows, 0]``."""
        part = self._linear(hidden)
        if self._padding:
            part = F.pad(part, (0, self._padding))
        return self._tp.gather(part)[:, : self._vocab_size].float()


def vocab_parallel_head(building: Building, name: str, vocab_size: int) -> VocabParallelHead:
    """A head with a weight of its own, not the embedding's."""
    part = vocab_share(building.tp, vocab_size)
    return VocabParallelHead(building, building.checkpoint.take(f"{name}.weight", rows=part), vocab_size)
