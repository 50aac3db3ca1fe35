"""Store new keys and values in the paged cache: one indexed copy a layer."""

from __future__ import annotations

import torch

from pdserve_kernels.layout import KvLayout


class KvWrite:
    """Where one step's tokens go, computed once and used by every layer.

    ``slots`` is ``[tokens]`` of ``block * block_size + offset``.
    """

    def __init__(self, layout: KvLayout, cache: torch.Tensor, slots: torch.Tensor) -> None:
        self._layout = layout
        self._rows = layout.tokens(cache)
        blocks = slots // layout.block_size
        key_tiles = layout.tile_rows(blocks).T
        tiles = torch.stack((key_tiles, key_tiles + 1))
        offsets = (slots % layout.block_size).view(1, -1, 1)
        self._index = (tiles * layout.block_size + offsets).reshape(-1)

    def __call__(self, layer: int, key_value: torch.Tensor) -> None:
        """``key_value`` is ``[2, tokens, kv_heads, head_dim]``."""
        first = 2 * layer * self._layout.block_size
        self._rows[first:].index_copy_(0, self._index, key_value.reshape(-1, self._layout.head_dim))
