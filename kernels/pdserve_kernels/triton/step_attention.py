"""The attention of one step on a GPU: one launch that stores, one for the single tokens, one for the longer rows."""

from __future__ import annotations

import torch

from pdserve_kernels.contract import DecodeTables, HeadNorms
from pdserve_kernels.layout import KvLayout
from pdserve_kernels.triton.decode_attention import decode_attention
from pdserve_kernels.triton.kv_write import kv_write
from pdserve_kernels.triton.prefill_attention import prefill_attention
from pdserve_kernels.triton.projection import store_projected
from pdserve_kernels.triton.step_plan import SpanTables


class StepAttention:
    """Single-token rows, then longer ones; either may be missing.

    Nothing is kept between calls, and tensors are read anew in each, so a captured call follows their contents.
    """

    def __init__(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        slots: torch.Tensor,
        singles: DecodeTables,
        spans: SpanTables | None,
        scale: float,
        splits: int,
    ) -> None:
        """``slots`` has every new token; ``splits`` is into how many parts a single token's context is cut."""
        self._layout, self._cache, self._slots = layout, cache, slots
        self._singles, self._spans = singles, spans
        self._scale, self._splits = scale, splits

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        """See ``contract.Attention``."""
        kv_write(self._cache, self._layout, layer, self._slots, key_value[0], key_value[1])
        return self._attend(layer, query, window)

    def from_projection(
        self,
        layer: int,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """See ``contract.Attention``."""
        query = store_projected(qkv, cos, sin, norms, self._cache, self._layout, layer, self._slots)
        return self._attend(layer, query, window)

    def _attend(self, layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        count = len(self._singles.context_lens)
        decode_attention(
            query[:count],
            self._cache,
            self._layout,
            layer,
            self._singles,
            self._scale,
            window,
            self._splits,
            out[:count],
        )
        if self._spans is not None:
            prefill_attention(
                query[count:], self._cache, self._layout, layer, self._spans, self._scale, window, out[count:]
            )
        return out
