"""Times the experts of a step alone, beside the bytes of those that its tokens are sent to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from pdserve.bench.engine.parts import DISTINCT_BYTES, Hardware, Product, random_weight, seconds_of
from pdserve.bench.engine.subject import Subject
from pdserve.bench.report import Better, Figure, Row, Unit
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.recipe import ExpertsRecipe
from pdserve_kernels import reference
from pdserve_kernels.contract import BlockFormat, BlockWeight, Experts, ExpertsForm, ExpertWeights, UnreadWeight

_ANY_BYTE = 0x2A


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer, by the products of one of them."""

    recipe: ExpertsRecipe
    inner: tuple[Product, ...]
    down: Product

    @property
    def parameters(self) -> int:
        """Those that one token is multiplied with."""
        return self.recipe.chosen * (sum(each.parameters for each in self.inner) + self.down.parameters)

    def nbytes(self, dtype: torch.dtype, tokens: int) -> float:
        """Returns the bytes of the experts that so many tokens are sent to, if all experts are equally likely."""
        missed = (1 - self.recipe.chosen / self.recipe.count) ** tokens
        return self.recipe.count * (1 - missed) * self.one_bytes(dtype)

    def one_bytes(self, dtype: torch.dtype) -> int:
        return sum(each.nbytes(dtype) for each in (*self.inner, self.down))


def expert_layers(config: FamilyConfig, formats: Mapping[str, BlockFormat]) -> list[ExpertLayer]:
    """Returns the experts of all layers that have some. ``formats`` are those of ``products_of``."""
    found = []
    for index, layer in enumerate(config.recipe.layers):
        recipe = layer.feed_forward
        if not isinstance(recipe, ExpertsRecipe):
            continue
        one, prefix = recipe.expert, f"{config.recipe.layer_prefix}{index}."

        def form(name: str, prefix: str = prefix) -> BlockFormat | None:
            return formats.get(f"{prefix}{name.replace('{}', '0')}.weight")

        hidden, channels = config.hidden_size, one.channels
        if one.fused:
            inner: tuple[Product, ...] = (Product(2 * channels, hidden, form(one.fused)),)
        else:
            inner = tuple(Product(channels, hidden, form(name)) for name in (one.gate, one.up) if name)
        found.append(ExpertLayer(recipe, inner, Product(hidden, channels, form(one.down))))
    return found


class ExpertStack:
    """The experts of a step in their order, with made-up weights, in the form of a kernel set."""

    def __init__(self, subject: Subject, layers: Sequence[ExpertLayer]) -> None:
        self._dtype, self._device, self._hidden = subject.dtype, subject.device, subject.config.hidden_size
        self.layers = layers
        whole = layers[0].recipe.count * layers[0].one_bytes(subject.dtype)
        distinct = min(len(layers), -(-DISTINCT_BYTES // whole))
        made = [self._made(subject, layer) for layer in layers[:distinct]]
        self._experts = [made[at % distinct] for at in range(len(layers))]

    @torch.inference_mode()
    def seconds(self, rows: int, budget_s: float) -> tuple[float, float]:
        """Returns the time of all layers, and the bytes of the experts that their rows are sent to."""
        random = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, self._hidden, generator=random).to(self._dtype).to(self._device)
        logits = [torch.randn(rows, layer.recipe.count, generator=random) for layer in self.layers]
        touched = 0
        for given, layer in zip(logits, self.layers, strict=True):
            chosen: list[int] = reference.route(given, layer.recipe.routing)[1].flatten().tolist()
            touched += len(set(chosen)) * layer.one_bytes(self._dtype)
        on_device = [given.to(self._device) for given in logits]

        def call() -> None:
            for experts, given in zip(self._experts, on_device, strict=True):
                experts(x, given)

        return seconds_of(call, self._device, budget_s), touched

    def _made(self, subject: Subject, layer: ExpertLayer) -> Experts:
        recipe = layer.recipe
        form = ExpertsForm(
            recipe.count,
            self._hidden,
            recipe.expert.channels,
            self._dtype,
            recipe.routing,
            recipe.expert.activation,
            recipe.expert.gated,
            recipe.weighs_inputs,
        )

        def weights() -> Iterator[ExpertWeights]:
            for _ in range(recipe.count):
                yield ExpertWeights(tuple(map(self._weight, layer.inner)), self._weight(layer.down))

        return subject.kernels.experts(form, weights())

    def _weight(self, product: Product) -> UnreadWeight | BlockWeight:
        shape = (product.outputs, product.inputs)
        if product.format is None:
            return UnreadWeight("", shape, self._dtype, lambda: random_weight(shape, self._dtype, self._device))
        row_bytes = product.inputs // product.format.elements * product.format.block_bytes
        blocks = torch.full((product.outputs, row_bytes), _ANY_BYTE, dtype=torch.uint8)
        return BlockWeight(product.format, blocks)


def experts_row(subject: Subject, hardware: Hardware, stack: ExpertStack, batch: int, budget_s: float) -> Row:
    """Returns a row for the experts of a decode step, beside the time in which as many bytes are copied."""
    seconds, touched = stack.seconds(batch, budget_s)
    figures = (
        Figure("experts", seconds * 1e3, Unit.MS, Better.LOWER),
        Figure("bytes of those touched", touched / 2**20, Unit.MIB),
        Figure("weights read", touched / seconds / 1e9, Unit.GB_PER_S, Better.HIGHER),
        Figure("experts : least", seconds / (touched / hardware.copy_bytes_per_s), Unit.RATIO, Better.LOWER),
    )
    return Row("experts alone", {"model": subject.name, "batch": batch}, figures)
