"""``pdserve bench engine`` times steps beside their parts, and beside what the machine allows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from llguidance import LLTokenizer

from pdserve.bench.engine.parts import (
    ExpertLayer,
    ExpertStack,
    Hardware,
    LinearStack,
    Products,
    attention_s,
    constrained_sampling_s,
    expert_layers,
    experts_row,
    fp8_attention_s,
    measure,
    products_of,
    sampling_s,
    seconds_of,
)
from pdserve.bench.engine.subject import Steps, Subject, open_subject
from pdserve.bench.report import Better, Figure, Report, Row, Unit, chip_name, this_machine
from pdserve.config.bench import BenchEngineConfig, EngineBenchConfig
from pdserve.grammars.compiling import load_vocabulary
from pdserve.models.checkpoint.gguf.file import is_gguf
from pdserve.models.checkpoint.model_files import TOKENIZERS, served_model_name
from pdserve.models.rank_cache import TORCH_DTYPES
from pdserve.settings import to_environ
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams
from pdserve_kernels.contract import BlockFormat, Kernels

NOTES = (
    "medians; TPOT is a step and the greedy choice of its tokens, without HTTP",
    "plain torch is torch.nn.functional.linear on the same shapes with random weights, a different one in every layer; "
    "where torch multiplies the model's numbers one by one, as bf16 without AVX-512, it and the limit are in fp32",
    "roofline: bytes are the weights in the form in which they are multiplied and the KV read (prefill: written); the "
    "limits are the faster of copy and triad, and the rate of a large product of the same numbers",
    "experts: the bytes are those of the experts to which random logits send the tokens",
    "copy bandwidth counts bytes read and written; weights + KV are the bytes that a decode step has to read, and "
    "least is the time in which as many are copied",
)


def run(config: BenchEngineConfig, folder: Path, cpu_kernels: Callable[[], Kernels]) -> Report:
    """Measures the model of ``folder``, and a GPU that is there beside it.

    ``cpu_kernels`` makes the kernel set for a CPU. A folder without a tokenizer has no row of grammars.

    Raises ModelError, BenchError, and ConfigError if the model knows fewer positions than the settings ask for.
    """
    if config.cpu.cores:
        torch.set_num_threads(len(config.cpu.cores))
    steps = Steps(config.engine.batches, config.engine.contexts, config.engine.chunks)
    name = config.model.served_model_name or served_model_name(config.model.path, folder)
    subject = open_subject(name, folder, config.model, config.engine.block_size, steps, cpu_kernels)
    vocabulary = None
    if is_gguf(folder) or any((folder / name).is_file() for name in TOKENIZERS):
        vocabulary = load_vocabulary(folder, sorted(subject.config.eos_token_ids))
    bench = open_bench(subject, config.engine)
    rows = list(subject_rows(bench, steps, vocabulary))
    if subject.device.type == "cpu" and torch.cuda.is_available():
        dtype = TORCH_DTYPES[config.model.dtype]
        rows.append(measure(torch.device("cuda"), dtype, config.engine.copy_mib, config.engine.seconds).row())
    return Report("engine", this_machine(chip_name()), to_environ(config), NOTES, tuple(rows))


def open_bench(subject: Subject, engine: EngineBenchConfig) -> Bench:
    """Measures the yardsticks of ``subject``, and makes the parts of its steps that are timed alone."""
    _say(f"{subject.name}: hardware")
    copy_mib, budget_s, byte_products = engine.copy_mib, engine.seconds, multiplies_bytes(subject)
    hardware = measure(subject.device, subject.dtype, copy_mib, budget_s, byte_products=byte_products)
    products = products_of(subject.config, subject.formats)
    linears = LinearStack(products, subject.kernels, subject.dtype, subject.device, subject.block_kernels)
    return Bench(subject, hardware, products, linears, expert_layers(subject.config, subject.formats), budget_s)


def subject_rows(bench: Bench, steps: Steps, vocabulary: LLTokenizer | None = None) -> Iterator[Row]:
    subject, hardware, budget_s = bench.subject, bench.hardware, bench.budget_s
    yield hardware.row()
    experts = None
    if bench.experts:
        experts = ExpertStack(bench.experts, subject.kernels, subject.dtype, subject.device, subject.graphs)
    for batch in steps.batches:
        _say(f"{subject.name}: decode steps of {batch}")
        linear = linear_row(bench, batch)
        yield linear
        if experts is not None:
            yield experts_row(subject.name, hardware, experts, batch, budget_s)
        for context in steps.contexts:
            yield from decode_rows(bench, batch, context, linear)
        yield sampler_row(bench, batch)
        if vocabulary is not None:
            yield grammar_row(bench, batch, steps.contexts[0], vocabulary)
    for chunk in steps.chunks:
        _say(f"{subject.name}: prefill of {chunk} tokens")
        yield from prefill_rows(bench, chunk)


def multiplies_bytes(subject: Subject) -> bool:
    """Returns whether weights in blocks are multiplied as bytes. A GPU does so with FP8 if it can, and no others."""
    if subject.device.type == "cpu":
        return bool(subject.formats)
    # Only where there is a GPU: a CPU has no use for Triton.
    from pdserve_kernels.triton.fp8_products import multiplies_fp8

    return BlockFormat.FP8 in subject.formats.values() and multiplies_fp8(subject.device)


def _say(text: str) -> None:
    print(f"bench engine: {text}", file=sys.stderr, flush=True)


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
    experts: Sequence[ExpertLayer]
    budget_s: float
    """The time that each measurement may take."""

    def weight_bytes(self, tokens: int) -> float:
        """Returns the bytes of weights that a step of so many tokens reads."""
        dtype = self.subject.dtype
        return self.products.nbytes(dtype) + sum(layer.nbytes(dtype, tokens) for layer in self.experts)

    @property
    def expert_parameters(self) -> int:
        """The parameters of experts that a token is multiplied with."""
        return sum(layer.parameters for layer in self.experts)


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
    in_fp8 = fp8_attention_s(subject, rows, budget_s)
    chosen = step + sampling_s(subject, batch, GREEDY, budget_s / 4)
    plain, kernel = (linear.figure(name).value / 1e3 for name in ("plain torch", "engine's"))
    kv_bytes = batch * subject.kv_bytes(context)
    copy = bench.hardware.copy_bytes_per_s
    nbytes = bench.weight_bytes(batch) + kv_bytes
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
    others: tuple[Figure, ...] = ()
    if in_fp8 is not None:
        ratio = Figure("attention in FP8 : attention", in_fp8 / attention, Unit.RATIO, Better.LOWER)
        others = (_ms("attention, KV cache in FP8", in_fp8), ratio)
    yield Row("decode step", {"model": subject.name, "batch": batch, "context": context}, (*figures, *others))
    # Each query is multiplied with each key, and each score with each value.
    scores = 2 * subject.config.num_layers * subject.config.heads * subject.config.head_dim * context
    operations = 2 * batch * (bench.products.parameters + bench.expert_parameters + scores)
    yield _roofline_row(bench, "decode", batch, context, step, nbytes, operations)


def prefill_rows(bench: Bench, chunk: int) -> Iterator[Row]:
    """Yields the rows for a complete prompt of ``chunk`` tokens in one step."""
    subject, config = bench.subject, bench.subject.config
    rows = subject.prefill_rows(chunk)
    step = seconds_of(lambda: subject.runner.run(rows), subject.device, bench.budget_s)
    attention = attention_s(subject, rows, bench.budget_s)
    # Each token attends to itself and to the tokens before it: half of the square, in two products.
    scores = config.num_layers * config.heads * config.head_dim * chunk * (chunk + 1)
    tokenwise = (bench.products.layers_parameters + bench.expert_parameters) * chunk
    flops = 2 * (tokenwise + bench.products.head.parameters + scores)
    figures = (
        _ms("step", step),
        Figure("prompt", chunk / step, Unit.TOKENS_PER_S, Better.HIGHER),
        Figure("attention : step", attention / step, Unit.RATIO),
        Figure("rate", flops / step / 1e12, Unit.TFLOP_PER_S, Better.HIGHER),
        Figure("rate : matrix product", flops / step / bench.hardware.flops, Unit.RATIO, Better.HIGHER),
    )
    yield Row("prefill step", {"model": subject.name, "chunk": chunk}, figures)
    nbytes = bench.weight_bytes(chunk) + subject.kv_bytes(chunk)
    yield _roofline_row(bench, "prefill", 1, chunk, step, nbytes, flops)


def _roofline_row(
    bench: Bench, phase: str, requests: int, tokens: int, step_s: float, nbytes: float, operations: float
) -> Row:
    """Returns a row that compares a step with both limits of the machine.

    ``tokens`` is the context of each request. Attention is in the model's dtype where weights in blocks are multiplied
    as bytes; it counts as if it were multiplied so, too.
    """
    hardware = bench.hardware
    rate = hardware.flops if math.isnan(hardware.byte_ops) else hardware.byte_ops
    by_memory, by_products = nbytes / hardware.bytes_per_s, operations / rate
    figures = (
        _ms("step", step_s),
        Figure("bytes", nbytes / 2**20, Unit.MIB),
        Figure("operations", operations / 1e9, Unit.GOP),
        Figure("memory : its limit", by_memory / step_s, Unit.RATIO, Better.HIGHER),
        Figure("products : their limit", by_products / step_s, Unit.RATIO, Better.HIGHER),
        Figure("step : roofline", step_s / max(by_memory, by_products), Unit.RATIO, Better.LOWER),
    )
    at: dict[str, int | str] = {"model": bench.subject.name, "phase": phase, "requests": requests, "tokens": tokens}
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
