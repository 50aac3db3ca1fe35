"""The attention of one step on a GPU: one launch that writes, one for the single tokens, one for the longer rows."""

from __future__ import annotations

import torch

from pdserve_kernels.contract import DecodeTables
from pdserve_kernels.layout import KvLayout
from pdserve_kernels.triton.decode_attention import decode_attention
from pdserve_kernels.triton.kv_write import kv_write
from pdserve_kernels.triton.prefill_attention import prefill_attention
from pdserve_kernels.triton.step_plan import StepPlan


class DecodeStepAttention:
    """Single tokens alone. Reads its tensors anew on every call, so a captured call follows their contents."""

    def __init__(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        slots: torch.Tensor,
        tables: DecodeTables,
        scale: float,
        splits: int,
    ) -> None:
        self._layout, self._cache, self._slots, self._tables = layout, cache, slots, tables
        self._scale, self._splits = scale, splits

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """See ``contract.Attention``."""
        kv_write(self._cache, self._layout, layer, self._slots, key_value[0], key_value[1])
        return decode_attention(
            query, self._cache, self._layout, layer, self._tables, self._scale, window, self._splits
        )


class MixedStepAttention:
    """Single tokens and longer rows."""

    def __init__(self, layout: KvLayout, cache: torch.Tensor, plan: StepPlan, scale: float, splits: int) -> None:
        self._layout, self._cache, self._plan = layout, cache, plan
        self._scale, self._splits = scale, splits

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """See ``contract.Attention``."""
        layout, cache, plan = self._layout, self._cache, self._plan
        kv_write(cache, layout, layer, plan.slots, key_value[0], key_value[1])
        spans = prefill_attention(query[plan.singles :], cache, layout, layer, plan.spans, self._scale, window)
        if not plan.singles:
            return spans
        singles = decode_attention(
            query[: plan.singles], cache, layout, layer, plan.decode, self._scale, window, self._splits
        )
        return torch.cat((singles, spans))
