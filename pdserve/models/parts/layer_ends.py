"""Computes what a layer does with the residual at its end: an input of its own is added, and the sum is scaled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.parts.feed_forward import activation_of
from pdserve.models.parts.norms import load_norm
from pdserve.models.parts.projections import Building
from pdserve.models.parts.vocabulary import VocabParallelEmbedding
from pdserve.models.recipe import LayerRecipe, MlpRecipe, PerLayerEmbedding, PerLayerInput

HALF = 2.0**-0.5
"""What the sum of two numbers is multiplied by so that it varies as each of them does."""


class PerLayerInputs:
    """The inputs that each layer has of each token, by its id and by its embedding. Every rank has those of all."""

    def __init__(self, config: FamilyConfig, building: Building, recipe: PerLayerEmbedding, dtype: torch.dtype) -> None:
        """Takes the tensors of the model."""
        if recipe.rows < config.vocab_size:
            raise ModelError(f"the embedding {recipe.embedding} has {recipe.rows} of {config.vocab_size} tokens")
        self._shape = (config.num_layers, recipe.channels)
        width = config.num_layers * recipe.channels
        self._embedding = VocabParallelEmbedding(building, recipe.embedding, (recipe.rows, width))
        # The factor is rounded like the weights, because models are trained with the rounded one.
        self._factor = torch.tensor(recipe.channels**0.5, dtype=dtype).item()
        weight = building.weight(f"{recipe.projection}.weight", (width, config.hidden_size))
        self._project, self._scale = building.linear(weight), config.hidden_size**-0.5
        self._norm = load_norm(building, config.recipe.norm, recipe.norm, recipe.channels)

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Maps ids ``[tokens]`` and embeddings ``[tokens, hidden_size]`` to ``[tokens, layers, channels]``."""
        projected = (self._project(embedded) * self._scale).view(-1, *self._shape)
        own = (self._embedding(token_ids) * self._factor).view(projected.shape)
        normed = self._norm(projected.reshape(-1, self._shape[1])).view(projected.shape)
        # Two parts of the same size are added.
        return (normed + own) * HALF


class _Added:
    """What a layer adds to the residual, by its input. Every rank computes the whole."""

    def __init__(
        self, config: FamilyConfig, building: Building, recipe: PerLayerInput, channels: int, prefix: str, index: int
    ) -> None:
        hidden = config.hidden_size
        self._index = index
        self._down = building.linear(building.weight(f"{prefix}{recipe.down}.weight", (channels, hidden)))
        self._up = building.linear(building.weight(f"{prefix}{recipe.up}.weight", (hidden, channels)))
        self._activate = activation_of(building.kernels, MlpRecipe(channels, recipe.activation, gate=""))
        self._norm = load_norm(building, config.recipe.norm, prefix + recipe.norm, hidden)

    def __call__(self, residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self._activate(self._down(residual)) * inputs[:, self._index]
        return self._norm(self._up(inner))


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """The end of one layer."""

    added: _Added | None
    factor: torch.Tensor | None
    """``[1]``"""

    def __call__(self, residual: torch.Tensor, inputs: torch.Tensor | None) -> torch.Tensor:
        """Maps the residual, ``[tokens, hidden_size]``. ``inputs`` are those of ``PerLayerInputs``."""
        if self.added is not None and inputs is not None:
            residual = residual + self.added(residual, inputs)
        return residual if self.factor is None else residual * self.factor


def load_layer_end(
    config: FamilyConfig, building: Building, recipe: LayerRecipe, prefix: str, index: int
) -> LayerEnd | None:
    """Takes the tensors of the end of layer ``index``, whose names begin with ``prefix``; None if it has none."""
    added, factor, model = None, None, config.recipe.per_layer
    if recipe.per_layer is not None and model is not None:
        added = _Added(config, building, recipe.per_layer, model.channels, prefix, index)
    if recipe.factor:
        factor = building.checkpoint.take(f"{prefix}{recipe.factor}", (1,))
    return None if added is None and factor is None else LayerEnd(added, factor)
