"""The paged attention of a step as an attention function of transformers.

Models that follow transformers' attention interface look their attention function up by name and hand it everything
that they were called with; this one finds the step's attention there.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from pdserve.errors import ModelError
from pdserve_kernels.contract import Attention

NAME = "pdserve_paged"
STEP = "paged_step"
"""Keyword that carries a ``PagedStep`` through a model's forward."""

WITHOUT_MEANING_HERE = frozenset({"softcap", "s_aux", "position_bias", "head_mask", "alibi", "indices"})
"""What a model may add to its attention and paged attention does not compute."""


class PagedStep:
    """One step's attention, and which layers have used it with which windows."""

    def __init__(self, attention: Attention, heads: int, kv_heads: int, head_dim: int, scale: float) -> None:
        """``scale`` is what ``attention`` multiplies scores by."""
        self._attention = attention
        self._query = (heads, head_dim)
        self._key_value = (kv_heads, head_dim)
        self._scale = scale
        self.layers: set[int] = set()
        self.windows: set[int] = set()

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """``[1, heads, tokens, head_dim]``, all three, to ``[1, tokens, heads, head_dim]``. Raises ModelError."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.layers:
            raise ModelError(f"its attention modules have no layer_idx of their own: {layer}")
        self.layers.add(layer)
        if window is not None:
            self.windows.add(window)
        for name, tensor, wanted in (
            ("query", query, self._query),
            ("key", key, self._key_value),
            ("value", value, self._key_value),
        ):
            if (tensor.shape[1], tensor.shape[3]) != wanted:
                found = f"{tensor.shape[1]} {name} heads of {tensor.shape[3]}"
                raise ModelError(f"layer {layer} has {found}, and its configuration says {wanted[0]} of {wanted[1]}")
        if scaling is not None and scaling != self._scale:
            query = query * (scaling / self._scale)
        key_value = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)))
        return self._attention(layer, query[0].transpose(0, 1).contiguous(), key_value, window).unsqueeze(0)


def register_paged_attention() -> None:
    """Makes ``NAME`` an attention implementation that models can be loaded with or switched to."""
    AttentionInterface.register(NAME, _attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    step = others.get(STEP)
    if not isinstance(step, PagedStep):
        raise ModelError("it does not pass its arguments on to its attention")
    if attention_mask is not None:
        raise ModelError("it makes attention masks of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError("it has attention that looks ahead")
    if used := sorted(name for name in WITHOUT_MEANING_HERE if others.get(name) is not None):
        raise ModelError(f"its attention takes {', '.join(used)}")
    return step.attend(module, query, key, value, scaling, sliding_window), None
