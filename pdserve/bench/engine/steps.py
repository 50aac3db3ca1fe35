"""Times whole steps, beside their parts and beside what the machine allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llguidance import LLTokenizer

from pdserve.bench.engine.hardware import Hardware, seconds_of
from pdserve.bench.engine.parts import LinearStack, Products, attention_s, constrained_sampling_s, sampling_s
from pdserve.bench.engine.subject import Subject
from pdserve.bench.report import Better, Figure, Row, Unit
from pdserve.wire.grammar import Grammar, GrammarKind
from pdserve.wire.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
NUCLEUS = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.9)
DRAWN = SamplingParams(max_tokens=1, seed=0)
IN_JSON = SamplingParams(
    max_tokens=100,
    seed=0,
    grammar=Grammar(
        GrammarKind.JSON_SCHEMA,
        '{"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}, '
        '"age": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}}}, '
        '"required": ["name", "age"], "additionalProperties": false}}',
    ),
)


@dataclass(frozen=True, slots=True)
class Bench:
    """A subject and its yardsticks."""

    subject: Subject
    hardware: Hardware
    products: Products
    linears: LinearStack
    budget_s: float
    """The time that each measurement may take."""


def linear_row(bench: Bench, batch: int) -> Row:
    """Returns a row for the linear layers of a decode step: in plain torch, and with the engine's kernels."""
    plain, kernel = bench.linears.plain_s(batch, bench.budget_s), bench.linears.kernel_s(batch, bench.budget_s)
    figures = (
        _ms("plain torch", plain),
        _ms("engine's", kernel),
        Figure("plain : engine's", plain / kernel, Unit.RATIO, Better.HIGHER),
    )
    return Row("linear layers alone", {"model": bench.subject.name, "batch": batch}, figures)


def decode_rows(bench: Bench, batch: int, context: int, linear: Row) -> Iterator[Row]:
    """Yields the rows for one decode step of ``batch`` requests. ``linear`` is the ``linear_row`` of that batch."""
    subject, budget_s = bench.subject, bench.budget_s
    rows = subject.decode_rows(batch, context)
    step = seconds_of(lambda: subject.runner.run(rows), subject.device, budget_s)
    attention = attention_s(subject, rows, budget_s)
    chosen = step + sampling_s(subject, batch, GREEDY, budget_s / 4)
    plain, kernel = (linear.figure(name).value / 1e3 for name in ("plain torch", "engine's"))
    kv_bytes = batch * context * subject.kv_bytes_per_token
    copy = bench.hardware.copy_bytes_per_s
    nbytes = bench.products.nbytes(subject.dtype) + kv_bytes
    least = nbytes / copy
    figures = (
        _ms("step", step),
        _ms("and choice", chosen),
        _ms("attention", attention),
        Figure("attention : step", attention / step, Unit.RATIO),
        Figure("TPOT : plain linears", chosen / plain, Unit.RATIO, Better.LOWER),
        Figure("TPOT : engine's linears", chosen / kernel, Unit.RATIO, Better.LOWER),
        Figure("weights + KV", least * copy / step / 1e9, Unit.GB_PER_S, Better.HIGHER),
        Figure("step : least", step / least, Unit.RATIO, Better.LOWER),
        Figure("KV read", kv_bytes / attention / 1e9, Unit.GB_PER_S, Better.HIGHER),
        Figure("KV read : copy", kv_bytes / attention / copy, Unit.RATIO, Better.HIGHER),
    )
    yield Row("decode step", {"model": subject.name, "batch": batch, "context": context}, figures)
    # Each query is multiplied with each key, and each score with each value.
    scores = 2 * subject.config.num_layers * subject.config.heads * subject.config.head_dim * context
    operations = 2 * batch * (bench.products.parameters + scores)
    yield _roofline_row(bench, "decode", batch, context, step, nbytes, operations)


def prefill_rows(bench: Bench, chunk: int) -> Iterator[Row]:
    """Yields the rows for a whole prompt of ``chunk`` tokens in one step."""
    subject, config = bench.subject, bench.subject.config
    rows = subject.prefill_rows(chunk)
    step = seconds_of(lambda: subject.runner.run(rows), subject.device, bench.budget_s)
    attention = attention_s(subject, rows, bench.budget_s)
    # Each token attends to itself and to the tokens before it: half of the square, in two products.
    scores = config.num_layers * config.heads * config.head_dim * chunk * (chunk + 1)
    flops = 2 * (bench.products.layers_parameters * chunk + bench.products.head.parameters + scores)
    figures = (
        _ms("step", step),
        Figure("prompt", chunk / step, Unit.TOKENS_PER_S, Better.HIGHER),
        Figure("attention : step", attention / step, Unit.RATIO),
        Figure("rate", flops / step / 1e12, Unit.TFLOP_PER_S, Better.HIGHER),
        Figure("rate : matrix product", flops / step / bench.hardware.flops, Unit.RATIO, Better.HIGHER),
    )
    yield Row("prefill step", {"model": subject.name, "chunk": chunk}, figures)
    nbytes = bench.products.nbytes(subject.dtype) + chunk * subject.kv_bytes_per_token
    yield _roofline_row(bench, "prefill", 1, chunk, step, nbytes, flops)


def _roofline_row(
    bench: Bench, phase: str, requests: int, tokens: int, step_s: float, nbytes: float, operations: float
) -> Row:
    """Returns a row that compares a step with both limits of the machine.

    ``tokens`` is the context of each request. Attention is in the model's dtype where weights in blocks are multiplied
    as bytes; it counts as if it were multiplied so, too.
    """
    hardware = bench.hardware
    rate = hardware.byte_ops if bench.subject.formats else hardware.flops
    by_memory, by_products = nbytes / hardware.bytes_per_s, operations / rate
    figures = (
        _ms("step", step_s),
        Figure("bytes", nbytes / 2**20, Unit.MIB),
        Figure("operations", operations / 1e9, Unit.GOP),
        Figure("memory : its limit", by_memory / step_s, Unit.RATIO, Better.HIGHER),
        Figure("products : their limit", by_products / step_s, Unit.RATIO, Better.HIGHER),
        Figure("step : roofline", step_s / max(by_memory, by_products), Unit.RATIO, Better.LOWER),
    )
    at: dict[str, int | str] = {
        "model": bench.subject.name,
        "phase": phase,
        "requests": requests,
        "tokens": tokens,
    }
    return Row("roofline", at, figures)


def sampler_row(bench: Bench, batch: int) -> Row:
    """Returns a row for choosing one token for each of ``batch`` requests."""
    greedy, nucleus = (sampling_s(bench.subject, batch, how, bench.budget_s) for how in (GREEDY, NUCLEUS))
    return Row(
        "sampler", {"model": bench.subject.name, "batch": batch}, (_ms("greedy", greedy), _ms("top-p 0.9", nucleus))
    )


def grammar_row(bench: Bench, batch: int, context: int, vocabulary: LLTokenizer) -> Row:
    """Returns a row for decode steps of ``batch`` requests whose answers follow a JSON Schema."""
    subject, budget_s = bench.subject, bench.budget_s
    rows = subject.decode_rows(batch, context)
    step = seconds_of(lambda: subject.runner.run(rows), subject.device, budget_s)
    free = sampling_s(subject, batch, DRAWN, budget_s)
    constrained = constrained_sampling_s(subject, batch, IN_JSON, vocabulary, budget_s)
    figures = (
        _ms("step", step),
        _ms("any choice", free),
        _ms("by a schema", constrained),
        Figure("TPOT : any choice's", (step + constrained) / (step + free), Unit.RATIO, Better.LOWER),
    )
    return Row("answers by a schema", {"model": subject.name, "batch": batch, "context": context}, figures)


def _ms(name: str, seconds: float) -> Figure:
    return Figure(name, seconds * 1e3, Unit.MS, Better.LOWER)
