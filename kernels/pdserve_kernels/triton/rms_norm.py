"""Root mean square normalisation, alone and with the residual sum before it in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(x, weight, out, inner, outer_stride, inner_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    first = (row // inner) * outer_stride + (row % inner) * inner_stride
    values = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, out, total, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    # Of what was stored, not of what was rounded away: the next layer sees the stored sum.
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``reference.rms_norm`` for two or three dimensions; the last one must be dense."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        block = triton.next_power_of_2(width)
        _rms_norm_kernel[(x.numel() // width,)](
            x, weight, out, inner, x.stride(0), inner_stride, eps, width, block, num_warps=_warps(block)
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.add_rms_norm`` for ``[tokens, width]``."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    if out.numel():
        width = x.shape[-1]
        block = triton.next_power_of_2(width)
        _add_rms_norm_kernel[(x.numel() // width,)](
            x, residual, weight, out, total, eps, width, block, num_warps=_warps(block)
        )
    return out, total


def _warps(block: int) -> int:
    """Eight elements a thread, so that a bf16 row is loaded 16 bytes at a time."""
    return max(1, min(16, block // 256))
