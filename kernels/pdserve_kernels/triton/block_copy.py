"""Blocks out of the cache into one contiguous buffer and back, for transfers that are staged through the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096
"""Elements that one program copies."""


@triton.jit
def _gather_kernel(cache, blocks, staged, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + index).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < ELEMENTS
    tl.store(staged + index * ELEMENTS + column, tl.load(cache + block * ELEMENTS + column, mask=inside), mask=inside)


@triton.jit
def _scatter_kernel(cache, blocks, staged, ELEMENTS: tl.constexpr, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + index).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = column < ELEMENTS
    tl.store(cache + block * ELEMENTS + column, tl.load(staged + index * ELEMENTS + column, mask=inside), mask=inside)


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
    """``reference.gather_blocks`` into ``staged``, which is contiguous and begins with ``len(blocks)`` blocks."""
    if len(blocks):
        _gather_kernel[_grid(cache, blocks)](cache, blocks, staged, cache[0].numel(), CHUNK)


def scatter_blocks(cache: torch.Tensor, blocks: torch.Tensor, staged: torch.Tensor) -> None:
    """``reference.scatter_blocks`` out of ``staged``, which is contiguous and begins with ``len(blocks)`` blocks."""
    if len(blocks):
        _scatter_kernel[_grid(cache, blocks)](cache, blocks, staged, cache[0].numel(), CHUNK)


def _grid(cache: torch.Tensor, blocks: torch.Tensor) -> tuple[int, int]:
    return len(blocks), triton.cdiv(cache[0].numel(), CHUNK)
