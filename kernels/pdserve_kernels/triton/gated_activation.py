"""``activation(gate) * up`` of a gated MLP, without a copy of either half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, (gate * _sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_and_mul_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 is sigmoid(2 z).
    curved = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + token * WIDTH + column, (gate * _sigmoid(curved) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid(x):
    # Of -|x|, so that no exponential overflows.
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``reference.silu_and_mul``."""
    gate_up, out = gate_up.contiguous(), _half(gate_up)
    if out.numel():
        _silu_and_mul_kernel[_grid(out)](gate_up, out, out.shape[1], BLOCK)
    return out


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``reference.gelu_and_mul``."""
    gate_up, out = gate_up.contiguous(), _half(gate_up)
    if out.numel():
        _gelu_and_mul_kernel[_grid(out)](gate_up, out, out.shape[1], BLOCK)
    return out


def _half(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)


def _grid(out: torch.Tensor) -> tuple[int, int]:
    return out.shape[0], triton.cdiv(out.shape[1], BLOCK)
