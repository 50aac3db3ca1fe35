"""Measures experts as one compiled operation beside a loop over the same products, in turns.

    taskset -c 0 python -m tests.kernels.experts_benchmark

It uses as many threads as it has cores. Each line shows the form, the rows, the median (and fastest) milliseconds of
the operation, how many times longer the loop takes by medians and by the fastest, and for one row the rate at which the
weights of its experts are read.
"""

from __future__ import annotations

import os
import statistics
from functools import partial

import torch

from pdserve.settings import cache_folder
from pdserve_kernels.contract import BlockFormat, BlockWeight, ExpertsForm, ExpertWeights, Linear, UnreadWeight
from pdserve_kernels.cpu.compiled_experts import CompiledExperts
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.torch_kernels import LoopedExperts
from pdserve_kernels.feed_forward import Activation, Routing
from tests.kernels.cpu_benchmark import measure
from tests.kernels.random_blocks import random_blocks

FORM = ExpertsForm(64, 1024, 384, torch.bfloat16, Routing(8, normalised=True), Activation.SILU, gated=True)
KINDS = {"bf16": None, "Q8_0": (BlockFormat.Q8_0,) * 2, "Q4_K, Q8_0": (BlockFormat.Q4_K, BlockFormat.Q8_0)}
ROWS = (1, 8, 16, 512)


def weight(kind: BlockFormat | None, outer: int, inner: int, seed: int) -> UnreadWeight | BlockWeight:
    if kind is not None:
        return random_blocks(kind, outer, inner, seed)
    made = (torch.randn(outer, inner) * 0.02).bfloat16()
    return UnreadWeight("", (outer, inner), made.dtype, lambda: made)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kernels = CompiledKernels(cache_folder(os.environ))

    def linear(weight: UnreadWeight | BlockWeight, bias: torch.Tensor | None) -> Linear:
        if isinstance(weight, BlockWeight):
            return kernels.block_linear(weight, bias)
        return kernels.unread_linear(weight, bias)

    for name, kinds in KINDS.items():
        inner, down = kinds or (None, None)
        weights = [
            ExpertWeights(
                (weight(inner, 2 * FORM.channels, FORM.hidden, i),), weight(down, FORM.hidden, FORM.channels, i)
            )
            for i in range(FORM.count)
        ]
        whole, loop = kernels.experts(FORM, weights), LoopedExperts(FORM, weights, linear)
        assert isinstance(whole, CompiledExperts)
        touched = whole.nbytes * FORM.routing.chosen / FORM.count
        for rows in ROWS:
            x, logits = torch.randn(rows, FORM.hidden).bfloat16(), torch.randn(rows, FORM.count)
            times = measure({"loop": partial(loop, x, logits), "whole": partial(whole, x, logits)})
            a, b = times["loop"], times["whole"]
            rate = f" {touched / statistics.median(b) / 1e6:.1f} GB/s" if rows == 1 else ""
            print(
                f"{name} | {rows} | {statistics.median(b):.2f} ({min(b):.2f}) ms | "
                f"{statistics.median(a) / statistics.median(b):.2f} | {min(a) / min(b):.2f}{rate}",
                flush=True,
            )


if __name__ == "__main__":
    main()
