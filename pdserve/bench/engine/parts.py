"""Times the parts of a step: linear layers alone, which every engine needs, attention over all layers, and sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from llguidance import LLTokenizer

from pdserve.bench.engine.hardware import seconds_of
from pdserve.bench.engine.subject import Subject
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.grammars.compiling import compile_grammar
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.runner import StepRow
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.contract import AttentionRow, BlockFormat, BlockKernels, BlockWeight, Kernels, Linear

_DISTINCT_BYTES = 2 * 2**30
"""No cache holds this many bytes of different weights. Layers beyond them use the same weights again."""
_ANY_BYTE = 0x2A
"""The byte that weights in blocks consist of here: as a scale, two of them are a usual number."""


@dataclass(frozen=True, slots=True)
class Product:
    """One product with a weight, of which ``format`` says whether it stays in blocks."""

    outputs: int
    inputs: int
    format: BlockFormat | None = None

    @property
    def parameters(self) -> int:
        return self.outputs * self.inputs

    def nbytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of the weight, which is in ``dtype`` if it is not in blocks."""
        if self.format is None:
            return self.parameters * dtype.itemsize
        return self.outputs * (self.inputs // self.format.elements) * self.format.block_bytes


@dataclass(frozen=True, slots=True)
class Products:
    """All products of a step, in their order."""

    layers: tuple[tuple[Product, ...], ...]
    head: Product

    @property
    def layers_parameters(self) -> int:
        return sum(product.parameters for layer in self.layers for product in layer)

    @property
    def parameters(self) -> int:
        """The number of parameters that a decode step reads."""
        return self.layers_parameters + self.head.parameters

    def nbytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of weights that a decode step reads."""
        return sum(product.nbytes(dtype) for layer in self.layers for product in layer) + self.head.nbytes(dtype)


def products_of(config: FamilyConfig, formats: Mapping[str, BlockFormat]) -> Products:
    """Returns the products of a decoder with a gated MLP: projections that share their input and format are one.

    ``formats`` are those of the weights that stay in blocks, by transformers' names.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    parts = (
        (hidden, (("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys))),
        (queries, (("self_attn.o_proj", hidden),)),
        (hidden, (("mlp.gate_proj", inner), ("mlp.up_proj", inner))),
        (inner, (("mlp.down_proj", hidden),)),
    )

    def layer(index: int) -> Iterator[Product]:
        for inputs, projections in parts:
            found = [(formats.get(f"model.layers.{index}.{name}.weight"), outputs) for name, outputs in projections]
            for form, group in groupby(found, key=lambda each: each[0]):
                yield Product(sum(outputs for _, outputs in group), inputs, form)

    form = formats.get("model.embed_tokens.weight" if config.recipe.tied else "lm_head.weight")
    layers = tuple(tuple(layer(index)) for index in range(config.num_layers))
    return Products(layers, Product(config.vocab_size, hidden, form))


class LinearStack:
    """A step's products in their order, with made-up weights, in plain torch and in the form of a kernel set."""

    def __init__(
        self,
        products: Products,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        block_kernels: BlockKernels | None = None,
    ) -> None:
        """``block_kernels`` are needed if a product is in blocks."""
        layer_bytes = sum(product.parameters for product in products.layers[0]) * dtype.itemsize
        distinct = min(len(products.layers), -(-_DISTINCT_BYTES // layer_bytes))
        self._device = device
        self._plain: list[Linear] = []
        self._kernel: list[Linear] = []
        self._inputs: list[int] = []
        made: dict[tuple[int, int, Product], tuple[Linear, Linear]] = {}
        for at, layer in enumerate((*products.layers, (products.head,))):
            # The head comes after all layers, and has a weight of its own.
            number = at % distinct if at < len(products.layers) else at
            for place, product in enumerate(layer):
                key = (number, place, product)
                if key not in made:
                    made[key] = _linears(product, kernels, dtype, device, block_kernels)
                plain, kernel = made[key]
                self._plain.append(plain)
                self._kernel.append(kernel)
                self._inputs.append(product.inputs)
        self._dtype = dtype

    def plain_s(self, rows: int, budget_s: float) -> float:
        """Returns the time of ``torch.nn.functional.linear`` for all products."""
        return self._time(self._plain, rows, budget_s)

    def kernel_s(self, rows: int, budget_s: float) -> float:
        """Returns the time of the kernel set's own products, which have packed weights on a CPU."""
        return self._time(self._kernel, rows, budget_s)

    @torch.inference_mode()
    def _time(self, linears: Sequence[Linear], rows: int, budget_s: float) -> float:
        inputs = {size: _random((rows, size), self._dtype, self._device) for size in set(self._inputs)}

        def call() -> None:
            for linear, size in zip(linears, self._inputs, strict=True):
                linear(inputs[size])

        return seconds_of(call, self._device, budget_s)


def _linears(
    product: Product, kernels: Kernels, dtype: torch.dtype, device: torch.device, block_kernels: BlockKernels | None
) -> tuple[Linear, Linear]:
    """Returns a product in plain torch, and with a kernel set."""
    weight = _random((product.outputs, product.inputs), dtype, device)
    if product.format is None:
        return _Plain(weight), kernels.linear(weight)
    assert block_kernels is not None
    row_bytes = product.inputs // product.format.elements * product.format.block_bytes
    blocks = torch.full((product.outputs, row_bytes), _ANY_BYTE, dtype=torch.uint8)
    return _Plain(weight), block_kernels.block_linear(BlockWeight(product.format, blocks))


@dataclass(frozen=True, slots=True)
class _Plain:
    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def _random(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=device).mul_(0.02).to(dtype)


@torch.inference_mode()
def attention_s(subject: Subject, rows: list[StepRow], budget_s: float) -> float:
    """Returns the time of planning the attention of a step with ``rows`` and computing it in every layer.

    Where the runner records decode steps, these layers are recorded too, and the time is that of a replay: the host
    would take longer to launch them one by one than the GPU takes to compute them.
    """
    runner, config = subject.runner, subject.config
    spans = [AttentionRow(len(row.token_ids), row.context_len, row.block_table) for row in rows]
    tokens = sum(span.new_tokens for span in spans)
    shape = (tokens, config.heads, config.head_dim)
    query = torch.randn(shape, device=subject.device).to(subject.dtype)
    key_value = torch.full((2, tokens, config.kv_heads, config.head_dim), 0.01, device=subject.device)
    key_value = key_value.to(subject.dtype)

    def call() -> None:
        attend = subject.kernels.plan_attention(
            runner.layout, runner.kv_cache, spans, config.heads, config.attention_scale
        )
        for layer in range(config.num_layers):
            attend(layer, query, key_value)

    if subject.graphs is None or any(span.new_tokens > 1 for span in spans):
        return seconds_of(call, subject.device, budget_s)
    attend = subject.kernels.plan_attention(runner.layout, runner.kv_cache, spans, config.heads, config.attention_scale)

    def layers() -> None:
        for layer in range(config.num_layers):
            attend(layer, query, key_value)

    graph = subject.graphs()
    graph.capture(layers)
    return seconds_of(graph.replay, subject.device, budget_s)


@torch.inference_mode()
def sampling_s(subject: Subject, batch: int, sampling: SamplingParams, budget_s: float) -> float:
    """Returns the time of choosing a token for each of ``batch`` requests."""
    logits = torch.randn(batch, subject.config.vocab_size, device=subject.device)
    rows = [SamplingRow(sampling, range(position), 0) for position in range(batch)]
    return seconds_of(lambda: sample(logits, rows), subject.device, budget_s)


@torch.inference_mode()
def constrained_sampling_s(
    subject: Subject, batch: int, sampling: SamplingParams, vocabulary: LLTokenizer, budget_s: float
) -> float:
    """Returns what ``sampling_s`` does, for answers that go on by the grammar of ``sampling``. It must not be None.

    Each call chooses the next token of each answer. An answer that has come to its end, or to ``max_tokens``, begins
    again, so that all parts of a text have their share.
    """
    assert sampling.grammar is not None
    logits = torch.randn(batch, subject.config.vocab_size, device=subject.device)
    compiled = compile_grammar(sampling.grammar, vocabulary)
    answers = [_Answer(GrammarMatcher(compiled), []) for _ in range(batch)]

    def step() -> None:
        rows = [SamplingRow(sampling, answer.tokens, 0, matcher=answer.matcher) for answer in answers]
        for i, sampled in enumerate(sample(logits, rows, subject.config.eos_token_ids)):
            assert sampled is not None
            answers[i].tokens.append(sampled.token_id)
            ends = sampled.token_id in subject.config.eos_token_ids
            if ends or len(answers[i].tokens) == sampling.max_tokens:
                answers[i] = _Answer(GrammarMatcher(compiled), [])

    return seconds_of(step, subject.device, budget_s)


@dataclass(frozen=True, slots=True)
class _Answer:
    matcher: GrammarMatcher
    tokens: list[int]
