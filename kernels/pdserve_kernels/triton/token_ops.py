"""Computes on single tokens: root mean square normalisation, rotary position embedding, and the gated activation.

``add_rms_norm`` adds the residual and normalises the sum in one pass. Rotary embedding has one program for each token,
which rotates all heads. ``activation(gate) * up`` of a gated MLP makes no copy of either half.
"""

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
    # The stored, rounded sum is what is normalised, because the next layer sees that one.
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (values * scale * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes ``reference.rms_norm`` for two or three dimensions. The last one must be dense."""
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
    """Computes ``reference.add_rms_norm`` for ``[tokens, width]``."""
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
    """Returns so many warps that each thread has eight elements, and loads 16 bytes of bf16 at once."""
    return max(1, min(16, block // 256))


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
    """Computes ``reference.rotary``. The last dimension of ``x`` must be dense."""
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


ACTIVATION_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, (gate * sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_and_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 is sigmoid(2 z).
    curved = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + token * WIDTH + column, (gate * sigmoid(curved) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def sigmoid(x):
    # The exponential is that of -|x|, which cannot overflow.
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes ``reference.activated`` for SILU, with gates."""
    gate_up, out = gate_up.contiguous(), _half(gate_up)
    if out.numel():
        _silu_and_mul_kernel[_activation_grid(out)](gate_up, out, out.shape[1], ACTIVATION_BLOCK)
    return out


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes ``reference.activated`` for GELU_TANH, with gates."""
    gate_up, out = gate_up.contiguous(), _half(gate_up)
    if out.numel():
        _gelu_and_mul_kernel[_activation_grid(out)](gate_up, out, out.shape[1], ACTIVATION_BLOCK)
    return out


def _half(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)


def _activation_grid(out: torch.Tensor) -> tuple[int, int]:
    return out.shape[0], triton.cdiv(out.shape[1], ACTIVATION_BLOCK)
