"""The kernel set of a CPU with a C++ compiler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pdserve.compiled_library import built_library
from pdserve_kernels import reference
from pdserve_kernels.contract import AttentionRow, Linear
from pdserve_kernels.cpu.compiled_attention import CompiledAttention
from pdserve_kernels.cpu.compiled_linear import CompiledLinear, fits
from pdserve_kernels.cpu.library import Library
from pdserve_kernels.cpu.linear import PackedLinear
from pdserve_kernels.cpu.recipe import CPU_KERNELS
from pdserve_kernels.layout import KvLayout


class CompiledKernels:
    """Satisfies ``contract.Kernels`` for bf16 and fp32."""

    rotary = staticmethod(reference.rotary)

    def __init__(self, cache_dir: Path) -> None:
        """Compiles on the first use below ``cache_dir``, in a few seconds. Raises BuildError."""
        self._library = Library(built_library(CPU_KERNELS, cache_dir))

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        if fits(self._library, weight):
            return CompiledLinear(self._library, weight, bias)
        return PackedLinear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, width = x.contiguous(), _width(x, weight)
        out = torch.empty_like(x)
        self._library.rms_norm(
            _bf16(x), x.data_ptr(), None, weight.data_ptr(), eps, x.numel() // width, width, out.data_ptr(), None
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, width = x.contiguous(), residual.contiguous(), _width(x, weight)
        if residual.shape != x.shape or residual.dtype is not x.dtype:
            raise ValueError(f"{tuple(x.shape)} {x.dtype} cannot be added to {tuple(residual.shape)} {residual.dtype}")
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._library.rms_norm(
            _bf16(x),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            x.numel() // width,
            width,
            out.data_ptr(),
            total.data_ptr(),
        )
        return out, total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._act_and_mul(gate_up, gelu=False)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._act_and_mul(gate_up, gelu=True)

    def plan_attention(
        self, layout: KvLayout, cache: torch.Tensor, rows: Sequence[AttentionRow], heads: int, scale: float
    ) -> CompiledAttention:
        return CompiledAttention(self._library, layout, cache, rows, heads, scale)

    def _act_and_mul(self, gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], width))
        rows = gate_up.numel() // (2 * width)
        self._library.act_and_mul(_bf16(gate_up), gelu, gate_up.data_ptr(), rows, width, out.data_ptr())
        return out


def _bf16(x: torch.Tensor) -> int:
    if x.dtype is torch.bfloat16:
        return 1
    if x.dtype is torch.float32:
        return 0
    raise TypeError(f"the compiled kernels compute in bf16 and fp32, not in {x.dtype}")


def _width(x: torch.Tensor, weight: torch.Tensor) -> int:
    width = x.shape[-1]
    if weight.shape != (width,) or weight.dtype is not x.dtype or not weight.is_contiguous():
        raise ValueError(f"a norm of {tuple(weight.shape)} {weight.dtype} was given {tuple(x.shape)} {x.dtype}")
    return width
