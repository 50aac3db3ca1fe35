"""Times the parts of a step: linear layers alone, which every engine needs, attention over all layers, and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from llguidance import LLTokenizer

from pdserve.bench.engine.hardware import seconds_of
from pdserve.bench.engine.subject import Subject
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.grammars.compiling import compile_grammar
from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.runner import StepRow
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.contract import AttentionRow, Kernels, Linear

_DISTINCT_BYTES = 2 * 2**30
"""No cache holds this many bytes of different weights. Layers beyond them use the same weights again."""


@dataclass(frozen=True, slots=True)
class LinearShapes:
    """The shape of each product as ``(out, in)``."""

    layer: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    num_layers: int

    @property
    def layers_parameters(self) -> int:
        return self.num_layers * sum(out * into for out, into in self.layer)

    @property
    def parameters(self) -> int:
        """The number of parameters that a decode step reads."""
        return self.layers_parameters + self.head[0] * self.head[1]


def linear_shapes(config: DecoderConfig) -> LinearShapes:
    """Returns the shapes of a decoder with a gated MLP: projections that share their input are one product."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = ((queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
    return LinearShapes(layer, (config.vocab_size, hidden), config.num_layers)


class LinearStack:
    """A step's products in their order, with random weights, in plain torch and in the form of a kernel set."""

    def __init__(self, shapes: LinearShapes, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        layer_bytes = sum(out * into for out, into in shapes.layer) * dtype.itemsize
        distinct = min(shapes.num_layers, -(-_DISTINCT_BYTES // layer_bytes))
        self._device = device
        made = [[_random(shape, dtype, device) for shape in shapes.layer] for _ in range(distinct)]
        order = [weight for i in range(shapes.num_layers) for weight in made[i % distinct]]
        order.append(_random(shapes.head, dtype, device))
        kept = {id(weight): kernels.linear(weight) for weight in order}
        self._plain: list[Linear] = [_Plain(weight) for weight in order]
        self._kernel = [kept[id(weight)] for weight in order]
        self._inputs = [weight.shape[1] for weight in order]
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
