"""Computes what layers do with the residual beside adding to it.

At its end, a layer may add an input of its own, and scale the sum. There may be several residuals, which parts mix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.parts.feed_forward import activation_of
from pdserve.models.parts.norms import load_norm
from pdserve.models.parts.projections import Building
from pdserve.models.parts.vocabulary import VocabParallelEmbedding
from pdserve.models.recipe import LayerRecipe, MlpRecipe, PerLayerEmbedding, PerLayerInput, StreamsRecipe
from pdserve_kernels.feed_forward import Activation

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


class StreamSum:
    """Sums the streams of a token with weights that follow from them. Every rank computes the whole."""

    def __init__(
        self, hidden_size: int, building: Building, recipe: StreamsRecipe, name: str, further: int = 0
    ) -> None:
        """Takes the tensors whose names begin with ``name``, which give ``further`` numbers beside the weights."""
        self._kernels, self._recipe = building.kernels, recipe
        self._width = recipe.count * hidden_size
        outputs = recipe.count + further

        def taken(end: str, *shape: int) -> torch.Tensor:
            return building.checkpoint.take(f"{name}_{end}", shape, dtype=torch.float32)

        self._product = building.kernels.linear(taken("fn", outputs, self._width))
        kinds = 1 + bool(further) + (further > recipe.count)
        self._base, self._scale = taken("base", outputs), taken("scale", kinds)

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, count, hidden_size]`` to ``[tokens, hidden_size]``."""
        return self._summed(streams, self._numbers(streams))

    def _numbers(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns what follows from all streams of a token, fp32 ``[tokens, count + further]``."""
        flat = F.rms_norm(streams.flatten(1).float(), (self._width,), None, self._recipe.norm.eps)
        return self._product(flat)

    def _summed(self, streams: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        count = self._recipe.count
        weights = self._sigmoid(numbers[:, :count] * self._scale[0] + self._base[:count]) + self._recipe.eps
        return _weighted(weights.unsqueeze(-1), streams.unsqueeze(2)).squeeze(1).to(streams.dtype)

    def _sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.activated(x, Activation.SIGMOID, gated=False)


class Connection(StreamSum):
    """Hyper-connections of one part of a layer (Xie et al., 2026): what it is given, and where its output goes."""

    def __init__(self, hidden_size: int, building: Building, recipe: StreamsRecipe, name: str) -> None:
        """Takes the tensors whose names begin with ``name``."""
        further = recipe.count * (1 + recipe.count) if recipe.iterations else recipe.count
        super().__init__(hidden_size, building, recipe, name, further)

    def opened(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Maps ``[tokens, count, hidden_size]`` to the part's input, ``[tokens, hidden_size]``, and to two weights.

        With these, fp32 ``[tokens, count]`` and ``[tokens, count, count]``, ``closed`` adds the output. The second is
        None if streams are not mixed.
        """
        recipe, count = self._recipe, self._recipe.count
        numbers = self._numbers(streams)
        spread = numbers[:, count : 2 * count] * self._scale[1] + self._base[count : 2 * count]
        spread = recipe.magnitude * self._sigmoid(spread) + recipe.output_eps
        mixed = self._mixed(numbers[:, 2 * count :]) if recipe.iterations else None
        return self._summed(streams, numbers), spread, mixed

    def _mixed(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the matrix by which streams are mixed, ``[tokens, count, count]``."""
        count, eps = self._recipe.count, self._recipe.eps
        mixed = numbers * self._scale[2] + self._base[2 * count :]
        mixed = torch.softmax(mixed.view(-1, count, count), -1) + eps
        mixed = mixed / (mixed.sum(-2, keepdim=True) + eps)
        for _ in range(self._recipe.iterations - 1):
            mixed = mixed / (mixed.sum(-1, keepdim=True) + eps)
            mixed = mixed / (mixed.sum(-2, keepdim=True) + eps)
        return mixed

    @staticmethod
    def closed(
        streams: torch.Tensor, output: torch.Tensor, spread: torch.Tensor, mixed: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns the streams, mixed, with the part's output, ``[tokens, hidden_size]``, in each of them."""
        own = spread.unsqueeze(-1) * output.unsqueeze(1)
        others = streams if mixed is None else _weighted(mixed, streams.unsqueeze(2))
        return (own + others).to(streams.dtype)


def _weighted(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """Returns sums of streams, fp32 ``[tokens, sums, hidden_size]``.

    ``weights`` is ``[tokens, count, sums]``, and ``streams`` ``[tokens, count, 1, hidden_size]``.
    """
    total = weights[:, 0].unsqueeze(-1) * streams[:, 0]
    for number in range(1, streams.shape[1]):
        total = total + weights[:, number].unsqueeze(-1) * streams[:, number]
    return total
