"""The attention of one layer: projections, normalised heads where a model has them, rotary embedding, output."""

from __future__ import annotations

import torch

from pdserve.models.decoder_config import DecoderConfig
from pdserve.models.layers import Building, RowParallel, column_parallel
from pdserve.models.tensor_parallel import kv_share, share, spread
from pdserve_kernels.contract import Attention, HeadNorms


class SelfAttention:
    """This rank's heads of layer ``index``, whose tensors are named ``prefix``."""

    def __init__(
        self, config: DecoderConfig, building: Building, prefix: str, index: int, norm_offset: float = 0.0
    ) -> None:
        """``norm_offset`` is added to the weights of the query and key norms, where there are any."""
        checkpoint, tp = building.checkpoint, building.tp
        self._index = index
        self._window = config.windows[index]
        heads = share(tp, config.heads, "attention heads")
        kv_heads = kv_share(tp, config.heads, config.kv_heads)
        self._head_dim = config.head_dim
        queries, keys = spread(heads, config.head_dim), spread(kv_heads, config.head_dim)
        self._qkv = column_parallel(
            building, [(f"{prefix}.q_proj", queries), (f"{prefix}.k_proj", keys), (f"{prefix}.v_proj", keys)]
        )
        self._out = RowParallel(building, f"{prefix}.o_proj", queries)
        # Older exports carry the table that rotary_table computes.
        checkpoint.drop(f"{prefix}.rotary_emb.inv_freq")
        query_norm = checkpoint.take_optional(f"{prefix}.q_norm.weight")
        key_norm = checkpoint.take_optional(f"{prefix}.k_norm.weight")
        self._norms: HeadNorms | None = None
        if query_norm is not None and key_norm is not None:
            self._norms = HeadNorms(query_norm + norm_offset, key_norm + norm_offset, config.norm_eps)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention) -> torch.Tensor:
        """``x`` ``[tokens, hidden_size]``, normalised, to the same shape."""
        tokens = x.shape[0]
        qkv = self._qkv(x).view(tokens, -1, self._head_dim)
        attended = attention.from_projection(self._index, qkv, cos, sin, self._norms, self._window)
        return self._out(attended.reshape(tokens, -1))
