"""Builds the products with weights that all parts are made of. Each holds its rank's part of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.weights import ALL, Checkpoint, Columns, Rows
from pdserve.models.tp.shares import TpGroup
from pdserve_kernels.contract import (
    BlockKernels,
    BlockLinear,
    BlockWeight,
    Kernels,
    Linear,
    UnreadKernels,
    UnreadWeight,
)
from pdserve_kernels.cpu.torch_kernels import TorchKernels


@dataclass(frozen=True, slots=True)
class Building:
    """The checkpoint, kernels and ranks that a layer is built from."""

    checkpoint: Checkpoint
    kernels: Kernels
    tp: TpGroup
    block_kernels: BlockKernels | None = None
    """The kernels for weights that stay in the blocks of their file. Without them, all weights are dequantised."""
    unread_kernels: UnreadKernels | None = None
    """The same kernels if they may have packed weights without reading them. Without them, all weights are read."""

    def unread(self) -> Building:
        """Returns what builds the same layers without reading a weight."""
        return Building(self.checkpoint.unread(), TorchKernels(), self.tp)

    def weight(
        self, name: str, shape: tuple[int, int], rows: Rows = ALL, columns: Columns = ALL, *, transposed: bool = False
    ) -> UnreadWeight | BlockWeight:
        """Takes a weight ``[out, in]`` in the form in which it is multiplied. See ``Checkpoint.take``."""
        if self.block_kernels is not None:
            blocks = self.checkpoint.take_blocks(
                name, shape, rows, columns, transposed=transposed, on_gpu=self.block_kernels.on_gpu
            )
            if blocks is not None:
                return blocks
        if transposed:
            assert isinstance(columns, slice), "no transposed weight has its inputs in another order"
            return self.checkpoint.take_transposed(name, shape, rows, columns)
        return self.checkpoint.take_unread(name, shape, rows, columns)

    def linear(self, weight: torch.Tensor | UnreadWeight | BlockWeight, bias: torch.Tensor | None = None) -> Linear:
        """Returns the product with a weight in any form."""
        if isinstance(weight, BlockWeight):
            assert self.block_kernels is not None
            return self.block_kernels.block_linear(weight, bias)
        if isinstance(weight, UnreadWeight):
            if self.unread_kernels is not None:
                return self.unread_kernels.unread_linear(weight, bias)
            weight = weight.read()
        return self.kernels.linear(weight, bias)

    def table(self, weight: UnreadWeight | BlockWeight) -> torch.Tensor | BlockLinear:
        """Returns a weight in the form in which rows are looked up. That of blocks is multiplied by, too."""
        if isinstance(weight, BlockWeight):
            assert self.block_kernels is not None
            return self.block_kernels.block_linear(weight)
        return weight.read() if self.unread_kernels is None else self.unread_kernels.unread_table(weight)


@dataclass(frozen=True, slots=True)
class Projection:
    """A projection of the checkpoint, of which this rank computes some outputs."""

    name: str
    """The tensor's name without ``.weight``."""
    outputs: int
    mine: Rows
    biased: bool = False
    transposed: bool = False
    """Whether the checkpoint has the weight as ``[in, out]``."""


def column_parallel(building: Building, inputs: int, parts: Sequence[Projection]) -> Linear:
    """Returns one product for several projections of the same ``inputs``, or one for each number format among them."""
    weights, found = column_weights(building, inputs, parts)
    linears: list[Linear] = []
    for _, group in groupby(zip(weights, found, strict=True), key=lambda each: _form(each[0])):
        alike = list(group)
        biases = [bias for _, bias in alike if bias is not None]
        linears.append(building.linear(_stacked([each for each, _ in alike]), torch.cat(biases) if biases else None))
    return linears[0] if len(linears) == 1 else SideBySide(tuple(linears))


def column_weights(
    building: Building, inputs: int, parts: Sequence[Projection]
) -> tuple[list[UnreadWeight | BlockWeight], list[torch.Tensor | None]]:
    """Takes the weights and the biases of several projections of the same ``inputs``: all have biases, or none."""
    weights = [
        building.weight(f"{part.name}.weight", (part.outputs, inputs), rows=part.mine, transposed=part.transposed)
        for part in parts
    ]
    found = [
        building.checkpoint.take(f"{part.name}.bias", (part.outputs,), rows=part.mine) if part.biased else None
        for part in parts
    ]
    lacking = [part.name for part, bias in zip(parts, found, strict=True) if bias is None]
    if 0 < len(lacking) < len(parts):
        raise ModelError(f"{building.checkpoint.path}: {lacking[0]!r} has no bias, but the layers beside it have one")
    return weights, found


def _form(weight: UnreadWeight | BlockWeight) -> object:
    return weight.format if isinstance(weight, BlockWeight) else None


def _stacked(weights: Sequence[UnreadWeight | BlockWeight]) -> UnreadWeight | BlockWeight:
    """Returns one weight with the outputs of several, which have the same form."""
    if len(weights) == 1:
        return weights[0]
    key = " ".join(weight.key for weight in weights)
    blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
    if blocks:
        stacked = torch.cat([weight.blocks for weight in blocks])
        return BlockWeight(blocks[0].format, stacked, key, blocks[0].dtype)
    unread = tuple(weight for weight in weights if isinstance(weight, UnreadWeight))
    shape = (sum(weight.shape[0] for weight in unread), unread[0].shape[1])
    return UnreadWeight(key, shape, unread[0].dtype, lambda: torch.cat([weight.read() for weight in unread]), unread)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several products of the same inputs, with their outputs side by side."""

    linears: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self.linears], 1)


class RowParallel:
    """A projection whose inputs are spread over the ranks; the sum of all ranks is its output."""

    def __init__(
        self,
        building: Building,
        name: str,
        shape: tuple[int, int],
        columns: Columns,
        *,
        biased: bool,
        transposed: bool = False,
    ) -> None:
        """Takes this rank's ``columns`` of the weight, which has ``shape`` as a whole."""
        weight = building.weight(f"{name}.weight", shape, columns=columns, transposed=transposed)
        bias = building.checkpoint.take(f"{name}.bias", shape[:1]) if biased else None
        self._tp = building.tp
        # Only rank 0 adds the bias, because the sum over the ranks has to have it once.
        self._linear = building.linear(weight, bias if self._tp.rank == 0 else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(self._linear(x))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what this rank adds to the sum."""
        return self._linear(x)
