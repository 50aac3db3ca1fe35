"""Measures a step of the demo model in bf16, and its linear layers alone, with each CPU kernel set in turn.

    taskset -c 0 python -m tests.kernels.cpu_benchmark

It uses as many threads as it has cores. Each line shows the median (and fastest) milliseconds, and ratios of the
medians.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pdserve.config import Dtype
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.runner import ModelRunner, StepRow
from pdserve.settings import cache_folder
from pdserve_kernels.contract import Kernels, Linear
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.demo_folder import demo_folder

BLOCK_SIZE = 16
DECODE = [(batch, context, 1) for context in (300, 1500) for batch in (1, 4, 8, 16, 32)]
PREFILL = [(1, 256, 256), (1, 1024, 1024)]
SECONDS_EACH = 2.0
MAX_ROUNDS = 40


def linear_layers(config: FamilyConfig, kernels: Kernels) -> Callable[[int, int], None]:
    """Returns a function that computes the model's products, for numbers of tokens and of rows with logits."""

    def random(outer: int, inner: int) -> Linear:
        return kernels.linear((torch.randn(outer, inner) * 0.02).bfloat16())

    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    layers = [
        (
            random(heads + 2 * config.kv_heads * config.head_dim, hidden),
            random(hidden, heads),
            random(2 * inner, hidden),
            random(hidden, inner),
        )
        for _ in range(config.num_layers)
    ]
    head = random(config.vocab_size, hidden)

    @torch.inference_mode()
    def run(tokens: int, rows: int) -> None:
        x, attended, wide = (torch.randn(tokens, width).bfloat16() for width in (hidden, heads, inner))
        for qkv, out, gate_up, down in layers:
            qkv(x), out(attended), gate_up(x), down(wide)
        head(x[:rows])

    return run


def step_rows(batch: int, context: int, new: int) -> list[StepRow]:
    blocks = -(-context // BLOCK_SIZE)
    return [StepRow([5] * new, context - new, range(i * blocks, (i + 1) * blocks), True) for i in range(batch)]


def measure(runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Returns the milliseconds of each run. The runs take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    begun = time.perf_counter()
    while time.perf_counter() - begun < SECONDS_EACH * len(runs) and len(times[next(iter(runs))]) < MAX_ROUNDS:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    cache = cache_folder(os.environ)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder: Path = demo_folder(cache)
    config = read_family_config(folder)
    sets: dict[str, Kernels] = {"torch": TorchKernels(), "compiled": CompiledKernels(cache)}
    blocks = max(batch * -(-context // BLOCK_SIZE) for batch, context, _ in DECODE + PREFILL)
    runners = {
        name: ModelRunner(folder, config, Dtype.BF16, BLOCK_SIZE, blocks, 2048, kernels)
        for name, kernels in sets.items()
    }
    linears = {name: linear_layers(config, kernels) for name, kernels in sets.items()}
    print(f"{torch.get_num_threads()} threads; a: torch set, b: compiled set, c: oneDNN linears, d: compiled linears")
    for batch, context, new in DECODE + PREFILL:
        rows = step_rows(batch, context, new)
        runs: dict[str, Callable[[], object]] = {name: partial(runner.run, rows) for name, runner in runners.items()}
        for name, linear in linears.items():
            runs[f"{name} linears"] = partial(linear, batch * new, batch)
        times = measure(runs)
        a, b, c, d = (statistics.median(times[name]) for name in runs)
        shown = " | ".join(f"{statistics.median(t):.1f} ({min(t):.1f})" for t in times.values())
        print(f"| {batch} | {context} | {new} | {shown} | {a / b:.2f} | {b / c:.2f} | {b / d:.2f} |", flush=True)


if __name__ == "__main__":
    main()
