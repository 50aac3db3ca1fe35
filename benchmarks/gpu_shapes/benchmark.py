"""Runs all measurements of ``benchmarks gpu-shapes``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_shapes.drafting import Drafting, draft_rows
from benchmarks.random_llama import LLAMA_8B, Shape, Stored, write_random_model
from benchmarks.settings import BenchGpuShapesConfig
from pdserve.bench.engine.benchmark import NOTES, open_bench, subject_rows
from pdserve.bench.engine.parts import ExpertLayer, ExpertStack, Product, experts_row, measure
from pdserve.bench.engine.subject import Steps, open_subject
from pdserve.bench.report import Report, Row, chip_name, this_machine
from pdserve.errors import BenchError
from pdserve.models.backend import Backend, choose_device, open_backend
from pdserve.models.rank_cache import TORCH_DTYPES
from pdserve.models.recipe import ExpertsRecipe, MlpRecipe
from pdserve.models.runner import CudaGraphs
from pdserve.settings import to_environ
from pdserve_kernels.contract import BlockFormat, Kernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from pdserve_kernels.feed_forward import Scoring

_LARGE = "8B-shaped"
_LARGE_STEPS = Steps(
    batches=(1, 64),
    contexts=(1024,),
    chunks=(1024, 8192),
)
_DRAFTING = Drafting(requests=(1, 16, 64), rows=(2, 4, 8), context=1024, acceptances=(0.0, 0.5, 0.9))
_PART, _SHORT_8B = "16 layers 8B-shaped", replace(LLAMA_8B, num_hidden_layers=16, vocab_size=16_384)
"""What is quantised: a CPU repacks some hundred million numbers a second, and all layers of a model are alike."""
_SHORT_STEPS = Steps(batches=(1, 16, 64), contexts=(1024,), chunks=(8192,))
_EXPERTS = "DeepSeek-V3's experts in FP8"
V3_EXPERTS = ExpertLayer(
    ExpertsRecipe(256, 8, MlpRecipe(2048), scoring=Scoring.SIGMOID, normalised=True, groups=8, chosen_groups=4),
    (Product(2048, 7168, BlockFormat.FP8),) * 2,
    Product(7168, 2048, BlockFormat.FP8),
)
_NOTES = (
    *NOTES,
    "with drafts: a fake drafter says how many are right; steps have the greedy choice of all rows' tokens",
)


def run(config: BenchGpuShapesConfig) -> Report:
    """Raises BenchError without a GPU."""
    backend = open_backend(choose_device(config.model.device), TorchKernels)
    if backend.device.type != "cuda":
        raise BenchError("this study needs a GPU: its models are too large for a CPU")
    rows = random_model_rows(config, _LARGE, LLAMA_8B, _LARGE_STEPS, TorchKernels, drafting=_DRAFTING)
    for stored in (Stored.INT4, Stored.FP8):
        name = f"{_PART} in {stored.value}"
        rows += random_model_rows(config, name, _SHORT_8B, _SHORT_STEPS, TorchKernels, stored)
    rows += experts_rows(config, _EXPERTS, V3_EXPERTS, 4, (1, 16, 64, 4096), backend)
    return Report("gpu-shapes", this_machine(chip_name()), to_environ(config), _NOTES, tuple(rows))


def random_model_rows(
    config: BenchGpuShapesConfig,
    name: str,
    shape: Shape,
    steps: Steps,
    cpu_kernels: Callable[[], Kernels],
    stored: Stored = Stored.BF16,
    drafting: Drafting | None = None,
) -> list[Row]:
    """Returns what ``pdserve bench engine`` measures of a model of ``shape`` with random weights."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as made:
        _say(f"{name}: writing random weights")
        write_random_model(shape, Path(made), stored)
        room = steps if drafting is None else drafting.beside(steps)
        subject = open_subject(name, Path(made), config.model, config.engine.block_size, room, cpu_kernels)
    bench = open_bench(subject, config.engine)
    rows = list(subject_rows(bench, steps))
    if drafting is not None:
        _say(f"{name}: steps with drafts")
        rows += draft_rows(bench, drafting)
    return rows


def experts_rows(
    config: BenchGpuShapesConfig, name: str, layer: ExpertLayer, layers: int, batches: Sequence[int], backend: Backend
) -> Iterator[Row]:
    """Yields a row for each number of tokens that so many layers of experts, all alike, compute."""
    _say(f"{name}: experts")
    dtype, budget_s = TORCH_DTYPES[config.model.dtype], config.engine.seconds
    hardware = measure(backend.device, dtype, config.engine.copy_mib, budget_s)
    graphs = None if backend.graph_kernels is None else CudaGraphs()
    stack = ExpertStack([layer] * layers, backend.kernels, dtype, backend.device, graphs)
    for batch in batches:
        yield experts_row(name, hardware, stack, batch, budget_s)


def _say(text: str) -> None:
    print(f"gpu-shapes: {text}", file=sys.stderr, flush=True)
