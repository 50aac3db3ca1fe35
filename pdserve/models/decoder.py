"""Builds a model from its recipe, and computes it layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FallbackConfig, FamilyConfig
from pdserve.models.parts.attention import SelfAttention
from pdserve.models.parts.experts import Experts
from pdserve.models.parts.feed_forward import FeedForward, Mlp
from pdserve.models.parts.norms import LoadedNorm, load_norm
from pdserve.models.parts.projections import Building
from pdserve.models.parts.rotary import PositionTables, query_scales, rotary_table
from pdserve.models.parts.vocabulary import PositionTable, VocabParallelEmbedding, vocab_parallel_head
from pdserve.models.recipe import ExpertsRecipe, LayerRecipe, ModelRecipe, NormOrder
from pdserve.models.table import FAMILIES
from pdserve_kernels.contract import Attention


class Decoder(Protocol):
    """Maps token ids and positions to hidden states, and hidden states to logits for the rows that need them."""

    @property
    def capturable(self) -> bool:
        """Whether a step does the same operations for all inputs, so that a recorded one may be replayed."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Maps ids and positions, both ``[tokens]``, to ``[tokens, hidden_size]``, before the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps ``[rows, hidden_size]`` to fp32 ``[rows, vocab_size]``."""


def build_decoder(config: DecoderConfig, building: Building, max_positions: int, dtype: torch.dtype) -> Decoder:
    """Returns this rank's part of the model, for contexts of up to ``max_positions``.

    Raises ModelError if the checkpoint lacks a tensor, has one too many, or cannot be split over the ranks, or if it is
    a fallback model and paged attention would change its tokens.
    """
    match config:
        case FamilyConfig():
            building.checkpoint.check_formats()
            # Built without weights first: what is missing or unknown, or has another shape, shows before any is read.
            RecipeDecoder(config, building.unread(), max_positions, dtype)
            return RecipeDecoder(config, building, max_positions, dtype)
        case FallbackConfig():
            return _fallback_decoder(config, building, dtype)
        case _:
            raise TypeError(f"{type(config).__name__} has no decoder")


def _fallback_decoder(config: FallbackConfig, building: Building, dtype: torch.dtype) -> Decoder:
    if building.tp.size > 1:
        raise ModelError(
            f"--tensor-parallel-size {building.tp.size} is for {sorted(FAMILIES)}; a {config.family} model has one rank"
        )
    # This import loads the parts of transformers that compute: about 2 s, and other families do not need them.
    from pdserve.models.fallback.hf_check import checked_hf_decoder

    return checked_hf_decoder(building.checkpoint.path, config, building.kernels, dtype, building.checkpoint.device)


class RecipeDecoder:
    """Satisfies ``Decoder``."""

    def __init__(self, config: FamilyConfig, building: Building, max_positions: int, dtype: torch.dtype) -> None:
        """Takes every tensor of the checkpoint. Raises ModelError on a missing or unknown one."""
        checkpoint, recipe = building.checkpoint, config.recipe
        checkpoint.unwrap(recipe.renamed, recipe.unused, recipe.unused_ends)
        self.capturable = recipe.capturable
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = VocabParallelEmbedding(building, recipe.embedding, shape)
        # The factor is rounded like the weights, because models are trained with the rounded one.
        self._embedding_scale = torch.tensor(recipe.embedding_scale, dtype=dtype).item()
        self._embedding_norm: LoadedNorm | None = None
        if recipe.embedding_norm is not None:
            self._embedding_norm = load_norm(building, recipe.embedding_norm, "", config.hidden_size)
        self._positions: PositionTable | None = None
        if recipe.positions is not None:
            self._positions = PositionTable(building, recipe.positions, config.hidden_size, max_positions)
        self._layers = [_layer(config, building, recipe, i) for i in range(config.num_layers)]
        self._norm = load_norm(building, recipe.norm, recipe.last_norm, config.hidden_size)
        self._head = vocab_parallel_head(building, self._embedding, shape, recipe)
        kinds = [(layer.attention.rotary, layer.attention.query_scale) for layer in recipe.layers]
        distinct = list(dict.fromkeys(kinds))
        positions = max_positions if checkpoint.device.type != "meta" else 1
        where = (positions, dtype, checkpoint.device)
        self._tables = [
            PositionTables(*rotary_table(rotary, config.head_dim, *where), query_scales(scale, *where))
            for rotary, scale in distinct
        ]
        self._table_of = [distinct.index(kind) for kind in kinds]
        checkpoint.check_all_taken()

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        tables = [table.at(positions) for table in self._tables]
        residual = self._embedding(token_ids)
        if self._embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        if self._embedding_norm is not None:
            residual = self._embedding_norm(residual)
        if self._positions is not None:
            residual = residual + self._positions(positions)
        delta: torch.Tensor | None = None
        for layer, table in zip(self._layers, self._table_of, strict=True):
            delta, residual = layer(residual, delta, tables[table], attention)
        return residual if delta is None else residual + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._norm(hidden))


class Layer(Protocol):
    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        tables: PositionTables,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(delta, residual)``.

        ``delta`` is the output of the layer's last part, which the next norm adds to the residual in one pass.
        """


def _layer(config: FamilyConfig, building: Building, model: ModelRecipe, index: int) -> Layer:
    """Builds layer ``index``."""
    recipe, prefix = model.layers[index], f"{model.layer_prefix}{index}."
    attend = SelfAttention(config, building, recipe.attention, prefix, index)
    feed = _feed_forward(config, building, recipe, prefix)
    norms = [load_norm(building, recipe.norm, prefix + name, config.hidden_size) for name in recipe.norms]
    scale = recipe.residual_scale
    match recipe.order:
        case NormOrder.PRE:
            before_attention, before_feed = norms
            return _InTurn(attend, feed, scale, before_attention, None, before_feed, None)
        case NormOrder.POST:
            after_attention, after_feed = norms
            return _InTurn(attend, feed, scale, None, after_attention, None, after_feed)
        case NormOrder.SANDWICH:
            return _InTurn(attend, feed, scale, *norms)
        case NormOrder.PARALLEL:
            return _Parallel(attend, feed, scale, *norms)


def _feed_forward(config: FamilyConfig, building: Building, recipe: LayerRecipe, prefix: str) -> FeedForward:
    part = recipe.feed_forward
    kind = Experts if isinstance(part, ExpertsRecipe) else Mlp
    return kind(config.hidden_size, building, part, prefix)  # type: ignore[arg-type]  # each kind gets its own recipe


@dataclass(frozen=True, slots=True)
class _InTurn:
    """Attention, and then the feed-forward part, each with a norm before it, behind it, or both."""

    attend: SelfAttention
    feed: FeedForward
    scale: float
    before_attention: LoadedNorm | None
    after_attention: LoadedNorm | None
    before_feed: LoadedNorm | None
    after_feed: LoadedNorm | None

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        tables: PositionTables,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = _normed(self.before_attention, delta, residual)
        attended = _added(self.attend(normed, tables, attention), self.after_attention, self.scale)
        normed, residual = _normed(self.before_feed, attended, residual)
        return _added(self.feed(normed), self.after_feed, self.scale), residual


@dataclass(frozen=True, slots=True)
class _Parallel:
    """Attention and feed-forward part beside each other, after one norm or one each."""

    attend: SelfAttention
    feed: FeedForward
    scale: float
    norm: LoadedNorm
    feed_norm: LoadedNorm | None = None

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        tables: PositionTables,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = _normed(self.norm, delta, residual)
        fed = normed if self.feed_norm is None else self.feed_norm(residual)
        return _added(self.attend(normed, tables, attention) + self.feed(fed), None, self.scale), residual


def _normed(
    norm: LoadedNorm | None, delta: torch.Tensor | None, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normalised sum of residual and delta, and the sum. Without a norm both are the sum."""
    if norm is None:
        total = residual if delta is None else residual + delta
        return total, total
    return (norm(residual), residual) if delta is None else norm.of_sum(delta, residual)


def _added(output: torch.Tensor, norm: LoadedNorm | None, scale: float) -> torch.Tensor:
    """Returns what a part's output adds to the residual."""
    output = output if norm is None else norm(output)
    return output if scale == 1.0 else output * scale
