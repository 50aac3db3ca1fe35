"""Rotary position embedding: one program a token, all heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotary_kernel(
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)
    inside = (head < HEADS) & (column < HALF)[None, :]
    cosine = tl.load(cos + token * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    source = x + token * token_stride + head * head_stride + column[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + (token * HEADS + head) * (2 * HALF) + column[None, :]
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``reference.rotary``; the last dimension of ``x`` must be dense."""
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        half = head_dim // 2
        block_heads = min(32, triton.next_power_of_2(heads))
        grid = (tokens, triton.cdiv(heads, block_heads))
        _rotary_kernel[grid](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            x.stride(0),
            x.stride(1),
            heads,
            half,
            block_heads,
            triton.next_power_of_2(half),
        )
    return out
