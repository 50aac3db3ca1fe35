"""The kernel set of a CPU without a compiler: plain torch, with packed weights where oneDNN has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve_kernels import reference
from pdserve_kernels.contract import AttentionRow
from pdserve_kernels.cpu.linear import PackedLinear
from pdserve_kernels.cpu.step_attention import StepAttention
from pdserve_kernels.layout import KvLayout


class TorchKernels:
    """Satisfies ``contract.Kernels``."""

    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    rotary = staticmethod(reference.rotary)
    silu_and_mul = staticmethod(reference.silu_and_mul)
    gelu_and_mul = staticmethod(reference.gelu_and_mul)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return PackedLinear(weight, bias)

    def plan_attention(
        self, layout: KvLayout, cache: torch.Tensor, rows: Sequence[AttentionRow], heads: int, scale: float
    ) -> StepAttention:
        return StepAttention(layout, cache, rows, heads, scale)
