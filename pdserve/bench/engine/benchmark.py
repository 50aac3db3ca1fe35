"""Runs all measurements of ``pdserve bench engine``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from llguidance import LLTokenizer

from pdserve.bench.engine.hardware import measure
from pdserve.bench.engine.lent_core_rows import lent_core_rows
from pdserve.bench.engine.parts import LinearStack, products_of
from pdserve.bench.engine.random_model import LLAMA_8B, Shape, write_random_model
from pdserve.bench.engine.steps import Bench, decode_rows, grammar_row, linear_row, prefill_rows, sampler_row
from pdserve.bench.engine.subject import Steps, Subject, open_subject
from pdserve.bench.machine import chip_name, this_machine
from pdserve.bench.report import Report, Row
from pdserve.bench_config import BenchEngineConfig
from pdserve.config import Switch
from pdserve.grammars.vocabulary import load_vocabulary
from pdserve.models.checkpoint.demo import served_model_name
from pdserve.models.checkpoint.gguf_file import is_gguf
from pdserve.models.runner import TORCH_DTYPES
from pdserve.settings import to_environ
from pdserve_kernels.contract import Kernels

_LARGE = "8B-shaped"
_LARGE_STEPS = Steps(batches=(1, 64), contexts=(1024,), chunks=(1024, 8192))
_NOTES = (
    "medians; TPOT is a step and the greedy choice of its tokens, without HTTP",
    "plain torch is torch.nn.functional.linear on the same shapes with random weights, a different one in every layer",
    "roofline: bytes are the weights in the form in which they are multiplied and the KV read (prefill: written); the "
    "limits are the faster of copy and triad, and the rate of a large product of the same numbers",
    "copy bandwidth counts bytes read and written; weights + KV are the bytes that a decode step has to read, and "
    "least is the time in which as many are copied",
)

_LENT_NOTES = (
    "medians; the other engine computes and sleeps in a process of its own; its wake-up ends with some 0.5 ms of work",
)


def run(
    config: BenchEngineConfig, folder: Path, cpu_kernels: Callable[[], Kernels], cache_dir: Path | None = None
) -> Report:
    """Measures the model of ``folder``, and if its runner computes on a GPU, an 8B-shaped model too.

    ``cpu_kernels`` makes the kernel set for a CPU, and ``cache_dir`` has it for other processes. A folder without a
    tokenizer has no row of grammars.

    Raises ModelError, BenchError, and ConfigError if the model knows fewer positions than the settings ask for.
    """
    if config.cpu.cores:
        torch.set_num_threads(len(config.cpu.cores))
    steps = Steps(config.engine.batches, config.engine.contexts, config.engine.chunks)
    name = config.model.served_model_name or served_model_name(config.model.path, folder)
    subject = open_subject(name, folder, config.model, config.engine.block_size, steps, cpu_kernels)
    if config.engine.lent_cores is Switch.ON and cache_dir is not None:
        _say(f"{subject.name}: steps with borrowed cores")
        lent = lent_core_rows(subject, steps, cache_dir, config.engine.seconds)
        return Report("engine", this_machine(chip_name()), to_environ(config), _LENT_NOTES, tuple(lent))
    device = subject.device
    vocabulary = None
    if is_gguf(folder) or (folder / "tokenizer.json").is_file():
        vocabulary = load_vocabulary(folder, sorted(subject.config.eos_token_ids))
    rows = list(subject_rows(config, subject, steps, vocabulary))
    del subject
    if device.type == "cuda":
        rows += random_model_rows(config, _LARGE, LLAMA_8B, _LARGE_STEPS, cpu_kernels)
    elif torch.cuda.is_available():
        dtype = TORCH_DTYPES[config.model.dtype]
        rows.append(measure(torch.device("cuda"), dtype, config.engine.copy_mib, config.engine.seconds).row())
    return Report("engine", this_machine(chip_name()), to_environ(config), _NOTES, tuple(rows))


def random_model_rows(
    config: BenchEngineConfig, name: str, shape: Shape, steps: Steps, cpu_kernels: Callable[[], Kernels]
) -> list[Row]:
    """Returns the same measurements of a model of ``shape`` with random weights."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as made:
        _say(f"{name}: writing random weights")
        write_random_model(shape, Path(made))
        subject = open_subject(name, Path(made), config.model, config.engine.block_size, steps, cpu_kernels)
    return list(subject_rows(config, subject, steps))


def subject_rows(
    config: BenchEngineConfig, subject: Subject, steps: Steps, vocabulary: LLTokenizer | None = None
) -> Iterator[Row]:
    budget_s = config.engine.seconds
    _say(f"{subject.name}: hardware")
    in_blocks = bool(subject.formats)
    hardware = measure(subject.device, subject.dtype, config.engine.copy_mib, budget_s, byte_products=in_blocks)
    yield hardware.row()
    products = products_of(subject.config, subject.formats)
    linears = LinearStack(products, subject.kernels, subject.dtype, subject.device, subject.block_kernels)
    bench = Bench(subject, hardware, products, linears, budget_s)
    for batch in steps.batches:
        _say(f"{subject.name}: decode steps of {batch}")
        linear = linear_row(bench, batch)
        yield linear
        for context in steps.contexts:
            yield from decode_rows(bench, batch, context, linear)
        yield sampler_row(bench, batch)
        if vocabulary is not None:
            yield grammar_row(bench, batch, steps.contexts[0], vocabulary)
    for chunk in steps.chunks:
        _say(f"{subject.name}: prefill of {chunk} tokens")
        yield from prefill_rows(bench, chunk)


def _say(text: str) -> None:
    print(f"bench engine: {text}", file=sys.stderr, flush=True)
