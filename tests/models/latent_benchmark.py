"""Measures attention of a prompt's tokens to latents beside attention to expanded contexts, in turns.

    taskset -c 0 python -m tests.models.latent_benchmark

One layer of 16 heads of DeepSeek V2 Lite, in bf16. Each line shows the new tokens, the context, the fastest CPU time of
both, how many times longer latents take, and whether ``latent_plan.is_expanded`` expands such a context.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from pdserve.models.latent_plan import EXPANDED_BYTES, ExpandedRow, is_expanded
from pdserve.models.rank_cache import KvGroup
from pdserve.models.recipe import LatentRecipe, Norm
from pdserve.settings import cache_folder
from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep
from pdserve_kernels.contract import AttentionRow
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.kv_layout import KvLayout

LATENT = LatentRecipe(rank=512, plain=128, turned=64, value=128, norm=Norm(1e-6))
HEADS, BLOCK_SIZE, SCALE = 16, 16, 0.07
SHAPES = ((256, 256), (512, 512), (2048, 2048), (512, 4096), (128, 4096))
TURNS = 3


def random(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 0.1).bfloat16()


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kernels = CompiledKernels(cache_folder(os.environ))
    layout = KvLayout(1, 1, BLOCK_SIZE, LATENT.channels, torch.bfloat16, LATENT.rank)
    cache = random(300, 1, 1, 1, BLOCK_SIZE, LATENT.channels)
    spec = GroupSpec("whole contexts", Keep.ALL, 1, 1, layout.block_bytes, "bf16")
    group = KvGroup(0, GroupBlocks(spec, 0, len(cache), 0, layout.block_bytes), layout, cache, HEADS)
    weight = random(HEADS, LATENT.plain + LATENT.value, LATENT.rank)
    queries = kernels.head_linear(weight[:, : LATENT.plain].transpose(1, 2).contiguous())
    keys = kernels.head_linear(weight[:, : LATENT.plain].contiguous())
    values = kernels.head_linear(weight[:, LATENT.plain :].contiguous())
    room = torch.empty(2 * EXPANDED_BYTES, dtype=torch.uint8)
    for new, context in SHAPES:
        row = AttentionRow(new, context, list(range(-(-context // BLOCK_SIZE))))
        query, key = random(new, HEADS, LATENT.plain + LATENT.turned), random(1, new, 1, LATENT.channels)

        def direct(row: AttentionRow = row, query: torch.Tensor = query, key: torch.Tensor = key) -> torch.Tensor:
            plain, turned = torch.split(query, [LATENT.plain, LATENT.turned], -1)
            attention = kernels.plan_attention(layout, cache, [row], HEADS, SCALE)
            return values(attention(0, torch.cat((queries(plain), turned), -1), key))

        def expanded(row: AttentionRow = row, query: torch.Tensor = query, key: torch.Tensor = key) -> torch.Tensor:
            return ExpandedRow(kernels, group, row, 0, HEADS, SCALE, LATENT, room)(0, LATENT, query, key, keys, values)

        turns = [(seconds(direct), seconds(expanded)) for _ in range(TURNS)]
        first, second = min(turn[0] for turn in turns), min(turn[1] for turn in turns)
        print(
            f"{new} of {context} | {first * 1e3:.0f} ms | {second * 1e3:.0f} ms | {first / second:.2f} | "
            f"{is_expanded(LATENT, new, context)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
