"""The kernel set of a GPU: Triton for everything but products with weights, which are the vendor's."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pdserve_kernels.contract import Attention, AttentionRow, DecodeTables, Linear
from pdserve_kernels.layout import KvLayout
from pdserve_kernels.triton.decode_attention import decode_splits
from pdserve_kernels.triton.gated_activation import gelu_and_mul, silu_and_mul
from pdserve_kernels.triton.prefill_attention import lines_per_program
from pdserve_kernels.triton.rms_norm import add_rms_norm, rms_norm
from pdserve_kernels.triton.rotary import rotary
from pdserve_kernels.triton.step_attention import StepAttention
from pdserve_kernels.triton.step_plan import plan_step


class TritonKernels:
    """Satisfies ``contract.GraphKernels``."""

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rotary = staticmethod(rotary)
    silu_and_mul = staticmethod(silu_and_mul)
    gelu_and_mul = staticmethod(gelu_and_mul)

    def __init__(self, processors: int) -> None:
        """``processors`` is the number of streaming multiprocessors that a launch should fill."""
        self._processors = processors

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return functools.partial(F.linear, weight=weight, bias=bias)

    def plan_attention(
        self, layout: KvLayout, cache: torch.Tensor, rows: Sequence[AttentionRow], heads: int, scale: float
    ) -> Attention:
        group = heads // layout.kv_heads
        tile_size = lines_per_program(group, layout.dtype) // group
        plan = plan_step(rows, layout.block_size, tile_size, cache.device)
        longest = max((row.context_len for row in rows[: plan.singles]), default=1)
        splits = decode_splits(plan.singles, layout.kv_heads, longest, self._processors)
        return StepAttention(layout, cache, plan.slots, plan.decode, plan.spans, scale, splits)

    def plan_decode(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        slots: torch.Tensor,
        tables: DecodeTables,
        heads: int,
        scale: float,
        max_context: int,
    ) -> Attention:
        splits = decode_splits(len(slots), layout.kv_heads, max_context, self._processors)
        return StepAttention(layout, cache, slots, tables, None, scale, splits)
