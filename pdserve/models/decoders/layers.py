"""Builds the layers that every decoder is made of. Each holds its rank's part of the weights.

They are the projections, the embedding and the head, split over the ranks, and, made of these, a layer's attention and
its gated feed-forward part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.checkpoint.weights import ALL, Checkpoint
from pdserve.models.tp.shares import TpGroup, kv_share, share, spread, vocab_part, vocab_share
from pdserve_kernels.contract import (
    Attention,
    BlockKernels,
    BlockLinear,
    BlockWeight,
    HeadNorms,
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
        self, name: str, shape: tuple[int, int], rows: slice = ALL, columns: slice = ALL
    ) -> UnreadWeight | BlockWeight:
        """Takes a weight in the form in which it is multiplied. See ``Checkpoint.take``."""
        if self.block_kernels is not None:
            blocks = self.checkpoint.take_blocks(name, shape, rows, columns)
            if blocks is not None:
                return blocks
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
    mine: slice
    biased: bool = False


def column_parallel(building: Building, inputs: int, parts: Sequence[Projection]) -> Linear:
    """Returns one product for several projections of the same ``inputs``, or one for each number format among them."""
    weights = [building.weight(f"{part.name}.weight", (part.outputs, inputs), rows=part.mine) for part in parts]
    found = [
        building.checkpoint.take(f"{part.name}.bias", (part.outputs,), rows=part.mine) if part.biased else None
        for part in parts
    ]
    lacking = [part.name for part, bias in zip(parts, found, strict=True) if bias is None]
    if 0 < len(lacking) < len(parts):
        raise ModelError(f"{building.checkpoint.path}: {lacking[0]!r} has no bias, but the layers beside it have one")
    linears: list[Linear] = []
    for _, group in groupby(zip(weights, found, strict=True), key=lambda each: _form(each[0])):
        alike = list(group)
        biases = [bias for _, bias in alike if bias is not None]
        linears.append(building.linear(_stacked([each for each, _ in alike]), torch.cat(biases) if biases else None))
    return linears[0] if len(linears) == 1 else SideBySide(tuple(linears))


def _form(weight: UnreadWeight | BlockWeight) -> object:
    return weight.format if isinstance(weight, BlockWeight) else None


def _stacked(weights: Sequence[UnreadWeight | BlockWeight]) -> UnreadWeight | BlockWeight:
    """Returns one weight with the outputs of several, which have the same form."""
    if len(weights) == 1:
        return weights[0]
    key = " ".join(weight.key for weight in weights)
    blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
    if blocks:
        return BlockWeight(blocks[0].format, torch.cat([weight.blocks for weight in blocks]), key)
    unread = [weight for weight in weights if isinstance(weight, UnreadWeight)]
    shape = (sum(weight.shape[0] for weight in unread), unread[0].shape[1])
    return UnreadWeight(key, shape, unread[0].dtype, lambda: torch.cat([weight.read() for weight in unread]))


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several products of the same inputs, with their outputs side by side."""

    linears: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self.linears], 1)


class RowParallel:
    """A projection whose inputs are spread over the ranks; the sum of all ranks is its output."""

    def __init__(self, building: Building, name: str, shape: tuple[int, int], columns: slice, *, biased: bool) -> None:
        """Takes this rank's ``columns`` of the weight, which has ``shape`` as a whole."""
        weight = building.weight(f"{name}.weight", shape, columns=columns)
        bias = building.checkpoint.take(f"{name}.bias", shape[:1]) if biased else None
        self._tp = building.tp
        # Only rank 0 adds the bias, because the sum over the ranks has to have it once.
        self._linear = building.linear(weight, bias if self._tp.rank == 0 else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(self._linear(x))


class VocabParallelEmbedding:
    """The embedding. Each rank holds the vectors of a part of the vocabulary."""

    def __init__(self, building: Building, name: str, config: FamilyConfig) -> None:
        self._tp = building.tp
        self._part = vocab_share(self._tp, config.vocab_size)
        shape = (config.vocab_size, config.hidden_size)
        weight = building.weight(f"{name}.weight", shape, rows=self._part)
        self.key = weight.key
        self.table = building.table(weight)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._tp.size == 1:
            return self._vectors(token_ids)
        mine = (token_ids >= self._part.start) & (token_ids < self._part.stop)
        vectors = self._vectors((token_ids - self._part.start).where(mine, 0))
        return self._tp.all_reduce(vectors.masked_fill(~mine.unsqueeze(-1), 0))

    def _vectors(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.table) if isinstance(self.table, torch.Tensor) else self.table.rows(ids)


class VocabParallelHead:
    """The head. Each rank computes the logits of a part of the vocabulary, and rank 0 gets all of them."""

    def __init__(self, tp: TpGroup, linear: Linear, vocab_size: int) -> None:
        """Takes the product with this rank's rows of the whole weight."""
        self._tp, self._vocab_size = tp, vocab_size
        mine = vocab_share(tp, vocab_size)
        self._padding = vocab_part(tp, vocab_size) - (mine.stop - mine.start)
        self._linear = linear

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps ``[rows, hidden_size]`` to fp32 ``[rows, vocab_size]``, on ranks other than 0 to ``[rows, 0]``."""
        part = self._linear(hidden)
        if self._padding:
            part = F.pad(part, (0, self._padding))
        return self._tp.gather(part)[:, : self._vocab_size].float()


def vocab_parallel_head(
    building: Building, embedding: VocabParallelEmbedding, config: FamilyConfig
) -> VocabParallelHead:
    """Returns the head: with the embedding's weight if the configuration ties them, and otherwise with its own.

    A tied head has its own too if the checkpoint has another one in spite of the configuration. transformers does the
    same: such a checkpoint's configuration is wrong, and its tensors are not.
    """
    name, shape = "lm_head.weight", (config.vocab_size, config.hidden_size)
    part = vocab_share(building.tp, config.vocab_size)
    if not config.tied_embeddings:
        linear = building.linear(building.weight(name, shape, rows=part))
    else:
        linear = _tied_head(building, embedding, building.checkpoint.take_optional(name, shape, rows=part))
    return VocabParallelHead(building.tp, linear, config.vocab_size)


def _tied_head(building: Building, embedding: VocabParallelEmbedding, own: torch.Tensor | None) -> Linear:
    table = embedding.table
    if not isinstance(table, torch.Tensor):
        return table if own is None else building.linear(own)
    # Before weights are read, what they are is not known.
    if own is not None and not own.is_meta and not torch.equal(own, table):
        return building.linear(own)
    outer, inner = table.shape
    return building.linear(UnreadWeight(embedding.key, (outer, inner), table.dtype, lambda: table))


class SelfAttention:
    """This rank's heads of layer ``index``, whose tensors are named ``prefix``."""

    def __init__(
        self, config: FamilyConfig, building: Building, prefix: str, index: int, norm_offset: float = 0.0
    ) -> None:
        """Takes the layer's tensors. ``norm_offset`` is added to the weights of the query and key norms, if any."""
        checkpoint, tp = building.checkpoint, building.tp
        self._index = index
        self._window = config.windows[index]
        heads = share(tp, config.heads, "attention heads")
        kv_heads = kv_share(tp, config.heads, config.kv_heads)
        self._head_dim = config.head_dim
        queries, keys = spread(heads, config.head_dim), spread(kv_heads, config.head_dim)
        all_queries, all_keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = [
            Projection(f"{prefix}.q_proj", all_queries, queries, "q_proj" in config.biases),
            Projection(f"{prefix}.k_proj", all_keys, keys, "k_proj" in config.biases),
            Projection(f"{prefix}.v_proj", all_keys, keys, "v_proj" in config.biases),
        ]
        self._qkv = column_parallel(building, config.hidden_size, parts)
        shape = (config.hidden_size, all_queries)
        self._out = RowParallel(building, f"{prefix}.o_proj", shape, queries, biased="o_proj" in config.biases)
        self._norms: HeadNorms | None = None
        if config.head_norms:
            query_norm = checkpoint.take(f"{prefix}.q_norm.weight", (config.head_dim,))
            key_norm = checkpoint.take(f"{prefix}.k_norm.weight", (config.head_dim,))
            self._norms = HeadNorms(query_norm + norm_offset, key_norm + norm_offset, config.norm_eps)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Maps ``x``, normalised ``[tokens, hidden_size]``, to the same shape."""
        tokens = x.shape[0]
        qkv = self._qkv(x).view(tokens, -1, self._head_dim)
        attended = attention.from_projection(self._index, qkv, cos, sin, self._norms, self._window)
        return self._out(attended.reshape(tokens, -1))


def gate_and_up(prefix: str, channels: int, mine: slice, biases: frozenset[str] = frozenset()) -> list[Projection]:
    """Returns the projections of a gated MLP to its ``channels``. Those named in ``biases`` have a bias."""
    return [Projection(f"{prefix}.{name}", channels, mine, name in biases) for name in ("gate_proj", "up_proj")]


class GatedMlp:
    """Computes ``down(activation(gate(x)) * up(x))``, with this rank's part of the channels in between."""

    def __init__(
        self,
        config: FamilyConfig,
        building: Building,
        prefix: str,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Takes the tensors under ``prefix``. ``activation`` gets gate and up side by side, like ``silu_and_mul``."""
        hidden, channels = config.hidden_size, config.intermediate_size
        mine = share(building.tp, channels, "MLP channels")
        self._gate_up = column_parallel(building, hidden, gate_and_up(prefix, channels, mine, config.biases))
        biased = "down_proj" in config.biases
        self._down = RowParallel(building, f"{prefix}.down_proj", (hidden, channels), mine, biased=biased)
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, hidden_size]`` to the same shape."""
        return self._down(self._activation(self._gate_up(x)))
