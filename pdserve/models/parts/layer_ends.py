"""Computes what layers do with the residual beside adding to it.

At its end, a layer may add an input of its own, and scale the sum. There may be several residuals, which parts mix, or
of which they are given a mean, or of which layers compute one, and to which something may be added before a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F

from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.checkpoint.weights import ALL
from pdserve.models.parts.feed_forward import activation_of, gated
from pdserve.models.parts.norms import StreamNorm, load_norm
from pdserve.models.parts.projections import Building, Projection, column_parallel
from pdserve.models.parts.vocabulary import VocabParallelEmbedding
from pdserve.models.recipe import (
    AltUpRecipe,
    GatedStreamsRecipe,
    LayerRecipe,
    LowRankRecipe,
    MlpRecipe,
    NgramRecipe,
    Norm,
    PerLayerEmbedding,
    PerLayerInput,
    StreamsRecipe,
)
from pdserve_kernels.contract import Linear, StateRuns
from pdserve_kernels.feed_forward import Activation

HALF = 2.0**-0.5
"""What the sum of two numbers is multiplied by so that it varies as each of them does."""


class PerLayerInputs:
    """The inputs that each layer has of each token, by its id and by its embedding. Every rank has those of all."""

    def __init__(self, config: FamilyConfig, building: Building, recipe: PerLayerEmbedding, dtype: torch.dtype) -> None:
        """Takes the tensors of the model."""
        self._rows = None if recipe.rows >= config.vocab_size else recipe.rows
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
        if self._rows is not None:
            token_ids = token_ids.masked_fill(token_ids >= self._rows, 0)
        own = (self._embedding(token_ids) * self._factor).view(projected.shape)
        normed = self._norm(projected.reshape(-1, self._shape[1])).view(projected.shape)
        # Two parts of the same size are added.
        return (normed + own) * HALF


class AddedInput:
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
        """Maps the residual, ``[tokens, hidden_size]``. ``inputs`` are those of ``PerLayerInputs``."""
        inner: torch.Tensor = self._activate(self._down(residual)) * inputs[:, self._index]
        return self._norm(self._up(inner))


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """The end of one layer."""

    added: AddedInput | None
    factor: torch.Tensor | None
    """``[1]``"""

    def __call__(self, residual: torch.Tensor, inputs: torch.Tensor | None) -> torch.Tensor:
        """Maps the residual, ``[tokens, hidden_size]``. ``inputs`` are those of ``PerLayerInputs``."""
        if self.added is not None and inputs is not None:
            residual = residual + self.added(residual, inputs)
        return residual if self.factor is None else residual * self.factor


def load_added_input(
    config: FamilyConfig, building: Building, recipe: LayerRecipe, prefix: str, index: int
) -> AddedInput | None:
    """Takes the tensors of what layer ``index`` adds by its input; None if it adds nothing."""
    model = config.recipe.per_layer
    if recipe.per_layer is None or model is None:
        return None
    return AddedInput(config, building, recipe.per_layer, model.channels, prefix, index)


def load_layer_end(
    config: FamilyConfig, building: Building, recipe: LayerRecipe, prefix: str, index: int
) -> LayerEnd | None:
    """Takes the tensors of the end of layer ``index``, whose names begin with ``prefix``; None if it has none."""
    added, factor = load_added_input(config, building, recipe, prefix, index), None
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


class GatedMean:
    """Gives a part of a layer the mean of the streams of a token, with gates. Every rank computes the whole."""

    def __init__(
        self, hidden_size: int, building: Building, recipe: GatedStreamsRecipe, name: str, *, spreads: bool = False
    ) -> None:
        """Takes the tensors whose names begin with ``name``. ``spreads`` says that a part's output is added."""
        count, width = recipe.count, recipe.count * hidden_size
        self._kernels, self._count, self._rank = building.kernels, count, recipe.rank
        self._norm = StreamNorm(building, recipe.norm, f"{name}.hc_norm", count, hidden_size)
        parts = [Projection(f"{name}.input_mix_weight_down", recipe.rank, ALL)]
        if spreads:
            parts.append(Projection(f"{name}.block_inject_weight", count, ALL))
        self._down = column_parallel(building, width, parts)
        self._up = building.linear(building.weight(f"{name}.input_mix_weight_up.weight", (width, recipe.rank)))

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, count, hidden_size]`` to ``[tokens, hidden_size]``."""
        return self._opened(streams)[0]

    def _opened(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean, and what stands behind the numbers that gates are made of: nothing, or one per stream."""
        flat = self._norm(streams).flatten(1)
        inner = self._down(flat) / self._count
        made = self._kernels.activated(inner[:, : self._rank].contiguous(), Activation.SILU, gated=False)
        parts = gated(self._kernels, self._up(made), flat, Activation.SIGMOID).view(streams.shape)
        total = parts[:, 0].float()
        for number in range(1, self._count):
            total = total + parts[:, number]
        return (total / self._count).to(streams.dtype), inner[:, self._rank :]


class GatedConnection(GatedMean):
    """The mean of streams with gates that a part of a layer is given, and what adds its output to each of them."""

    def __init__(self, hidden_size: int, building: Building, recipe: GatedStreamsRecipe, name: str) -> None:
        """Takes the tensors whose names begin with ``name``."""
        super().__init__(hidden_size, building, recipe, name, spreads=True)

    def opened(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps ``[tokens, count, hidden_size]`` to the part's input, ``[tokens, hidden_size]``, and to the weights,
        ``[tokens, count]``, with which ``closed`` adds the output."""
        given, spread = self._opened(streams)
        return given, 2 * self._kernels.activated(spread.contiguous(), Activation.SIGMOID, gated=False)

    @staticmethod
    def closed(streams: torch.Tensor, output: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        """Returns the streams with the part's output, ``[tokens, hidden_size]``, added to each of them."""
        return streams + output.unsqueeze(1) * spread.unsqueeze(-1)


class AltUp:
    """Adds to several residuals what follows from all of them, and what a layer changes in the active one."""

    def __init__(self, hidden_size: int, building: Building, recipe: AltUpRecipe, prefix: str) -> None:
        """Takes the tensors of the layer whose names begin with ``prefix``. Every rank computes the whole."""
        name, count, checkpoint = f"{prefix}{recipe.layer}", recipe.count, building.checkpoint
        self.active = recipe.active
        self._count, self._scale = count, 1 / hidden_size
        self._norm = load_norm(building, recipe.norm, f"{name}.router_norm", hidden_size)
        self._kernels = building.kernels

        def product(end: str, *shape: int) -> Linear:
            return building.kernels.linear(checkpoint.take(f"{name}.{end}.weight", shape, dtype=torch.float32))

        self._route = product("modality_router", count, hidden_size)
        self._predict = product("prediction_coefs", count * count, count)
        self._correct = product("correction_coefs", count, count)
        factors = checkpoint.take(f"{name}.correct_output_scale", (hidden_size,))
        self._factors = factors if recipe.scaled else None

    def predicted(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, count, hidden_size]`` before a layer to the same shape."""
        weights = self._predict(self._routed(streams[:, self.active])).view(-1, self._count, self._count)
        return (_weighted(weights.transpose(1, 2), streams.unsqueeze(2)) + streams).to(streams.dtype)

    def corrected(self, predicted: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Returns ``predicted`` with what the layer changed, whose output is ``[tokens, hidden_size]``."""
        weights = self._correct(self._routed(output)) + 1
        changed = output - predicted[:, self.active]
        return (weights.unsqueeze(-1) * changed.unsqueeze(1) + predicted).to(predicted.dtype)

    def scaled(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns the active residual as the layer's own input of a token is given it."""
        active = streams[:, self.active]
        return active.contiguous() if self._factors is None else active * self._factors

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what weights follow from, fp32 ``[tokens, count]``."""
        routed = self._route((self._norm(x.contiguous()) * self._scale).float())
        return torch.tanh(routed)


class StreamProducts:
    """Makes several residuals of one by products, or the reverse. All are as large as the first one of their token."""

    def __init__(self, hidden_size: int, building: Building, recipe: AltUpRecipe, name: str) -> None:
        """Takes the tensors whose names begin with ``name``. Every rank computes the whole."""
        shape = (hidden_size, hidden_size)
        self._products = [
            building.linear(building.weight(f"{name}.{number}.weight", shape)) for number in range(recipe.count - 1)
        ]

    def opened(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, hidden_size]`` to ``[tokens, count, hidden_size]``."""
        return self._as_large(hidden, [product(hidden) for product in self._products])

    def closed(self, streams: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, count, hidden_size]`` to ``[tokens, hidden_size]``."""
        others = [product(streams[:, 1 + number].contiguous()) for number, product in enumerate(self._products)]
        return self._as_large(streams[:, 0], others).mean(1)

    @staticmethod
    def _as_large(first: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        size = _mean_square(first).sqrt()
        scaled = [each * size / _mean_square(each).clamp_min(LEAST_SQUARE).sqrt() for each in others]
        return torch.stack([first, *(each.to(first.dtype) for each in scaled)], 1)


LEAST_SQUARE = 1e-5
"""The least mean square by whose root a residual is divided."""


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.float().square().mean(-1, keepdim=True)


class LowRank:
    """What is computed beside attention by two products. Every rank computes the whole."""

    def __init__(self, hidden_size: int, building: Building, recipe: LowRankRecipe, norm: Norm, prefix: str) -> None:
        """Takes the tensors of the layer whose names begin with ``prefix``."""
        down, up = (recipe.rank, hidden_size), (hidden_size, recipe.rank)
        self._down = building.linear(building.weight(f"{prefix}{recipe.down}.weight", down))
        self._up = building.linear(building.weight(f"{prefix}{recipe.up}.weight", up))
        self._norm = load_norm(building, norm, prefix + recipe.norm, hidden_size)

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """Maps ``[tokens, hidden_size]`` to the same shape."""
        return normed + self._norm(self._up(self._down(normed)))


StreamMap = Callable[[torch.Tensor], torch.Tensor]


def stream_ends(
    hidden_size: int, building: Building, streams: StreamsRecipe | GatedStreamsRecipe | AltUpRecipe
) -> tuple[StreamMap, StreamMap]:
    """Returns what makes several residuals of one before the first layer, and one of them behind the last layer."""
    if isinstance(streams, AltUpRecipe):
        before, behind = (
            StreamProducts(hidden_size, building, streams, name) for name in (streams.before, streams.behind)
        )
        return before.opened, behind.closed
    opened = partial(_repeated, count=streams.count)
    if not streams.head:
        return opened, partial(torch.mean, dim=1)
    if isinstance(streams, GatedStreamsRecipe):
        return opened, GatedMean(hidden_size, building, streams, streams.head)
    return opened, StreamSum(hidden_size, building, streams, streams.head)


def _repeated(residual: torch.Tensor, count: int) -> torch.Tensor:
    return residual.unsqueeze(1).repeat(1, count, 1)


LEAST_GATE = 1e-6
"""The least product of a key and a stream, whatever its sign, of which the root is taken."""


class Ngrams:
    """What the last tokens add to several residuals (``NgramRecipe``). Ranks share the table, and compute the whole."""

    def __init__(self, hidden_size: int, building: Building, recipe: NgramRecipe, prefix: str) -> None:
        """Takes the tensors of the layer whose names begin with ``prefix``.

        Raises ModelError if the file has other numbers for hashing than the recipe.
        """
        checkpoint, name = building.checkpoint, f"{prefix}{recipe.name}"
        self._recipe, self._kernels, self._hidden = recipe, building.kernels, hidden_size
        self._count = count = recipe.stream_channels // hidden_size
        self._hashed = _Hashed(building, recipe, f"{name}.ple_embedding")
        inputs = len(recipe.sizes) * recipe.channels
        table = f"{name}.ple_embedding.ngram_embedding"
        self._table = VocabParallelEmbedding(building, table, (recipe.rows, recipe.channels), f"{table}.shard_{{}}")
        parts = [
            Projection(f"{name}.key_proj", recipe.stream_channels, ALL),
            Projection(f"{name}.value_proj", hidden_size, ALL),
        ]
        self._inner = column_parallel(building, inputs, parts)
        self._key_norm, self._query_norm, self._conv_norm = (
            StreamNorm(building, recipe.norm, f"{name}.norm_{each}", count, hidden_size)
            for each in ("key", "query", "conv")
        )
        weight = checkpoint.take(f"{name}.conv1d.weight", (recipe.stream_channels, 1, recipe.width))
        every = recipe.before + 1
        # Between the tokens that it sees are others, whose weights are 0.
        self._conv = weight.new_zeros(recipe.seen + 1, count, hidden_size)
        self._conv[::every] = weight.view(count, hidden_size, recipe.width).permute(2, 0, 1)

    def __call__(
        self, streams: torch.Tensor, token_ids: torch.Tensor, state: torch.Tensor, runs: StateRuns
    ) -> torch.Tensor:
        """Returns what is added to ``streams``, ``[tokens, count, hidden_size]``, and writes each run's next state.

        ``token_ids`` is ``[tokens]``, and ``state`` fp32 ``[num_blocks, 1, numbers]``.
        """
        recipe, tokens, kernels = self._recipe, len(token_ids), self._kernels
        ids, values = torch.split(state, [recipe.before**2, state.shape[-1] - recipe.before**2], -1)
        rows = self._hashed(token_ids, ids, runs)
        vectors = self._table(rows.flatten()).view(tokens, -1)
        keys, value = torch.split(self._inner(vectors), [recipe.stream_channels, self._hidden], 1)
        keys = self._key_norm(keys.reshape(streams.shape))
        gates = (keys.float() * self._query_norm(streams)).sum(-1) / self._hidden**0.5
        gates = gates.abs().clamp_min(LEAST_GATE).sqrt() * gates.sign()
        gates = kernels.activated(gates, Activation.SIGMOID, gated=False).to(streams.dtype)
        own = gates.unsqueeze(-1) * value.unsqueeze(1)
        before = values.view(-1, self._count, recipe.seen, self._hidden)
        return own + kernels.causal_conv(self._conv_norm(own), self._conv, None, before, runs, silu=True)


class _Hashed:
    """Finds the rows of n-grams in the table."""

    def __init__(self, building: Building, recipe: NgramRecipe, name: str) -> None:
        self._recipe, self._kernels = recipe, building.kernels
        device, starts = building.checkpoint.device, [0, *accumulate(recipe.sizes)][:-1]
        numbers = {"layer_multipliers": recipe.multipliers, "ngram_heads_vocab_sizes": recipe.sizes}
        for end, known in (numbers | {"ngram_heads_offsets": tuple(starts)}).items():
            _check_known(building, f"{name}.{end}", known)
        shape = (recipe.before, recipe.heads)
        self._sizes, self._starts = (
            torch.tensor(each, dtype=torch.int64, device=device).view(shape) for each in (recipe.sizes, starts)
        )
        # Each token is given the ids of those before it by a convolution, of which each channel sees one of them.
        self._taps = torch.zeros(recipe.before + 1, 1, recipe.before, device=device)
        for distance in range(1, recipe.before + 1):
            self._taps[recipe.before - distance, 0, distance - 1] = 1.0

    def __call__(self, token_ids: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        """Maps ids, ``[tokens]``, to rows, int64 ``[tokens, lengths, heads]``, and writes each run's next state.

        ``state`` is fp32 ``[num_blocks, 1, before * before]``. It has ids and 1, so that 0 is none.
        """
        recipe, tokens = self._recipe, len(token_ids)
        known = (token_ids + 1).float().view(-1, 1, 1).expand(tokens, 1, recipe.before).contiguous()
        states = state.view(-1, 1, recipe.before, recipe.before)
        seen = self._kernels.causal_conv(known, self._taps, None, states, runs, silu=False)
        earlier = seen.view(tokens, recipe.before).long() - 1
        mixed, found = token_ids.long() * recipe.multipliers[0], list[torch.Tensor]()
        ended = torch.zeros_like(token_ids, dtype=torch.bool)
        for place, multiplier in enumerate(recipe.multipliers[1:]):
            one = earlier[:, place]
            ended = ended | (one < 0) | (one == recipe.end)
            mixed = mixed ^ (one.masked_fill(ended, recipe.end) * multiplier)
            found.append(mixed.unsqueeze(1) % self._sizes[place] + self._starts[place])
        return torch.stack(found, 1)


def _check_known(building: Building, name: str, known: tuple[int, ...]) -> None:
    """Raises ModelError if the file has other numbers under this name. It need not have any."""
    checkpoint = building.checkpoint
    if not checkpoint.has(name):
        return
    stored = checkpoint.take(name, (len(known),), dtype=torch.int64)
    if not stored.is_meta and stored.tolist() != list(known):
        raise ModelError(f"{checkpoint.path}: {name!r} is not what follows from the settings: {list(known)}")
