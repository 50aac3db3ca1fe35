"""Checks rows of one step that share a block table, each with its own length: replayed tokens of one answer."""

from __future__ import annotations

import torch

from pdserve_kernels import reference
from pdserve_kernels.contract import AttentionRow, Kernels
from pdserve_kernels.kv_layout import KvLayout

CPU = torch.device("cpu")


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """Returns rows of 64 numbers of all sizes, among them every number of bf16 that is between two of e4m3."""
    torch.manual_seed(0)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    sizes = torch.randn(2000, 64) * 2.0 ** torch.randint(-140, 120, (2000, 1))
    narrow = torch.randn(2000, 64) * 2.0 ** torch.randint(-20, 3, (2000, 64))
    steps = (torch.arange(2**14) / 64 - 128).view(-1, 64)
    return torch.cat((every.view(-1, 64).float(), sizes, narrow, steps, torch.zeros(1, 64))).to(dtype)


def random_cache(layout: KvLayout, count: int) -> torch.Tensor:
    """Returns ``count`` blocks of random numbers."""
    cache = layout.allocate(count, CPU)
    if not layout.fp8:
        return torch.randn_like(cache)
    plain = torch.randn(*cache.shape[:-1], layout.block_size, layout.head_dim)
    numbers, exponents = reference.quantised(plain)
    return torch.cat((numbers.flatten(-2), exponents), -1)


def spoil(layout: KvLayout, cache: torch.Tensor, blocks: list[int]) -> None:
    """Makes all numbers of these blocks NaN."""
    cache[blocks] = reference.NOT_FINITE if layout.fp8 else float("nan")


def check_shared_table(
    kernels: Kernels, layout: KvLayout, group: int, past: int, new: int, window: int | None, device: torch.device = CPU
) -> float:
    """Computes ``new`` tokens behind ``past`` ones as rows of one step, and one step after another.

    The cache has to be the same, and no row may read what a later one stores. Returns by how much the attention differs
    at most.
    """
    blocks = torch.randperm(-(-(past + new) // layout.block_size) + 1).tolist()
    before = random_cache(layout, len(blocks)).to(device)
    # The block that is not in the table must stay as it is.
    spoil(layout, before, [blocks.pop()])
    heads, scale = layout.kv_heads * group, layout.head_dim**-0.5
    query = torch.randn(new, heads, layout.head_dim).to(device, layout.dtype)
    key_value = torch.randn(layout.tiles_a_layer, new, layout.kv_heads, layout.head_dim).to(device, layout.dtype)
    rows = [AttentionRow(1, past + i + 1, blocks) for i in range(new)]

    def attend(cache: torch.Tensor, some: slice, key_value: torch.Tensor = key_value) -> torch.Tensor:
        attention = kernels.plan_attention(layout, cache, rows[some], heads, scale)
        return torch.stack(
            [attention(layer, query[some], key_value[:, some], window) for layer in range(layout.num_layers)]
        )

    together, apart, spoilt = before.clone(), before.clone(), before.clone()
    got = attend(together, slice(0, new))
    wanted = torch.cat([attend(apart, slice(i, i + 1)) for i in range(new)], 1)
    assert torch.equal(together.view(torch.uint8), apart.view(torch.uint8))
    other = key_value.clone()
    other[:, new // 2 :] *= 1000
    assert torch.equal(attend(spoilt, slice(0, new), other)[:, : new // 2], got[:, : new // 2])
    return (got.float() - wanted.float()).abs().max().item()
