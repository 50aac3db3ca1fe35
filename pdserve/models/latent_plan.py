"""Plans latent attention: which rows of a step attend to latents as they are kept, and which to expanded ones.

A pair of tokens takes more products with latents than with the keys and values of heads, because a latent is longer
than both. To expand a context takes some for each of its tokens. So single tokens attend to latents, and rows with many
tokens to what their context is expanded to, some heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
import torch
import torch.nn.functional as F

from pdserve.models.rank_cache import KvGroup
from pdserve.models.recipe import LatentRecipe
from pdserve_kernels.contract import Attention, AttentionRow, HeadLinear, Kernels
from pdserve_kernels.cpu.torch_kernels import KvWrite
from pdserve_kernels.host_copies import block_ids, to_device
from pdserve_kernels.kv_layout import KvLayout

EXPANDED_BYTES = 2**26
"""The keys and values of so many heads are there at a time as fit into this, or those of one."""


LEAST_EXPANDED = 32
"""Rows with fewer tokens attend to latents: an expanded row takes launches of its own in each layer."""


def expanded_bytes(latent: LatentRecipe, context: int, item_bytes: int) -> int:
    """Returns the most bytes that a row's expanded keys and values have at once, and what they are made of."""
    room = max(2 * _padded(context) * _width(latent) * item_bytes, EXPANDED_BYTES)
    return 2 * room + context * (latent.channels + latent.rank) * item_bytes


@dataclass(frozen=True, slots=True)
class LatentStep:
    """One step's latent attention."""

    attention: Attention | None
    """That of the rows which attend to latents; None if there are none."""
    direct: torch.Tensor | None
    """The tokens of these; None for all."""
    expanded: tuple[ExpandedRow, ...] = ()


class ExpandedRow:
    """A row of several tokens, which attends to the keys and values that its context is expanded to."""

    def __init__(
        self,
        kernels: Kernels,
        group: KvGroup,
        row: AttentionRow,
        first: int,
        heads: int,
        scale: float,
        latent: LatentRecipe,
        room: torch.Tensor,
    ) -> None:
        """Plans the row whose first new token is number ``first`` of the step.

        Rows are computed one after another, so they take turns with ``room``, uint8 of the bytes of the largest one.
        """
        self.tokens = slice(first, first + row.new_tokens)
        layout, device = group.layout, group.cache.device
        self._latent, self._layout, self._context, self._heads = latent, layout, row.context_len, heads
        table = block_ids(row.blocks, -(-row.context_len // layout.block_size))
        at = np.arange(row.context_len - row.new_tokens, row.context_len)
        slots = table[at // layout.block_size] * layout.block_size + at % layout.block_size
        blocks, own = to_device([table, slots], device)
        self._write = KvWrite(layout, group.cache, own.long())
        self._tiles, self._index = layout.tiles(group.cache), layout.tile_rows(blocks.long())[0]
        expanded = _layout(latent, row.context_len, heads, layout.dtype)
        self._together = expanded.kv_heads
        self._room = expanded.view(room[: expanded.block_bytes], 1)
        new = AttentionRow(row.new_tokens, row.context_len, [0])
        self._attention = kernels.plan_attention(expanded, self._room, [new], self._together, scale)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, to_key: HeadLinear, to_value: HeadLinear
    ) -> torch.Tensor:
        """Stores the row's new keys, ``[1, new_tokens, 1, channels]``, and attends to the whole context.

        ``query`` is ``[new_tokens, heads, plain + turned]``; ``to_key`` leads from a latent to a head's part of the key
        that is not turned, and ``to_value`` to its value. Returns ``[new_tokens, heads, value]``.
        """
        latent, context = self._latent, self._context
        self._write(layer, key)
        kept = self._tiles.index_select(0, self._index + layer).view(-1, latent.channels)[:context]
        latents, turned = kept[:, : latent.rank].contiguous(), kept[:, latent.rank :]
        keys, values = self._room[0, :, 0, 0, :context], self._room[0, :, 0, 1, :context]
        keys[..., latent.plain : latent.plain + latent.turned] = turned
        # Another row may have left numbers there.
        keys[..., latent.plain + latent.turned :] = 0
        query = F.pad(query, (0, self._room.shape[-1] - query.shape[-1]))
        out = []
        for some in self._some_heads():
            keys[..., : latent.plain] = to_key.of_one(latents, some).transpose(0, 1)
            values[..., : latent.value] = to_value.of_one(latents, some).transpose(0, 1)
            attended = self._attention(0, query[:, some].contiguous(), None)
            out.append(attended[..., : latent.value])
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    def _some_heads(self) -> Iterator[slice]:
        for first in range(0, self._heads, self._together):
            yield slice(first, first + self._together)


def plan_latents(
    kernels: Kernels, group: KvGroup, rows: Sequence[AttentionRow], heads: int, scale: float, latent: LatentRecipe
) -> LatentStep:
    """Plans a step of ``rows``, of which those with one token come first.

    No two rows with several tokens are of one request: in each layer, rows that attend to latents are computed first.
    """
    direct, places = list[AttentionRow](), list[int]()
    expanded, first = list[ExpandedRow](), 0
    dtype, device = group.layout.dtype, group.cache.device
    long = [is_expanded(latent, row.new_tokens, row.context_len) for row in rows]
    layouts = (_layout(latent, row.context_len, heads, dtype) for row in compress(rows, long))
    most = max((layout.block_bytes for layout in layouts), default=0)
    room = torch.empty(most, dtype=torch.uint8, device=device)
    for row, expands in zip(rows, long, strict=True):
        if expands:
            expanded.append(ExpandedRow(kernels, group, row, first, heads, scale, latent, room))
        else:
            direct.append(row)
            places += range(first, first + row.new_tokens)
        first += row.new_tokens
    if not expanded:
        return LatentStep(kernels.plan_attention(group.layout, group.cache, rows, heads, scale), None)
    attention = kernels.plan_attention(group.layout, group.cache, direct, heads, scale) if direct else None
    (moved,) = to_device([places], device)
    return LatentStep(attention, moved.long(), tuple(expanded))


def is_expanded(latent: LatentRecipe, new_tokens: int, context: int) -> bool:
    """Returns whether it takes fewer products to expand a row's context. It depends on nothing else in a step."""
    if new_tokens < LEAST_EXPANDED:
        return False
    pairs = new_tokens * (context - new_tokens // 2)
    expansion = (context - new_tokens) * latent.rank * (latent.plain + latent.value)
    return pairs * 2 * _width(latent) + expansion < pairs * (latent.rank + latent.channels)


def _layout(latent: LatentRecipe, context: int, heads: int, dtype: torch.dtype) -> KvLayout:
    """Returns the layout of a context that is expanded to the keys and values of some heads, in one block."""
    size, width = _padded(context), _width(latent)
    one = 2 * size * width * dtype.itemsize
    counts = (count for count in range(heads, 1, -1) if heads % count == 0 and count * one <= EXPANDED_BYTES)
    return KvLayout(next(counts, 1), 1, size, width, dtype)


def _width(latent: LatentRecipe) -> int:
    """Returns the channels of a head's expanded key and value: as many as the longer one has."""
    return max(latent.plain + latent.turned, latent.value)


def _padded(context: int) -> int:
    """Returns the tokens of the one block that has an expanded context. Kernels are compiled for a few sizes of it."""
    return 1 << max(4, (context - 1).bit_length())
