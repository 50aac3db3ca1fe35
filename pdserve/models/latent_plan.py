"""Plans latent attention: which rows of a step attend to latents as they are kept, and which to expanded ones.

A pair of tokens takes more products with latents than with the keys and values of heads, because a latent is longer
than both. To expand a context takes some for each of its tokens. So single tokens attend to latents, and rows with many
tokens to what their context is expanded to, some heads at a time.

Where tokens are chosen (``IndexRecipe``), those whose context has more than they attend to are computed by themselves.
What a token attends to depends on its position alone, and not on the rows that a prompt was cut into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from pdserve.models.rank_cache import KvGroup
from pdserve.models.recipe import LatentRecipe
from pdserve_kernels.contract import (
    SCORES_AT_ONCE,
    Attention,
    AttentionRow,
    HeadLinear,
    Kernels,
    SparseAttention,
    SparseForm,
)
from pdserve_kernels.cpu.torch_kernels import KvWrite, numbers
from pdserve_kernels.host_copies import block_ids, to_device
from pdserve_kernels.kv_layout import KvLayout

EXPANDED_BYTES = 2**26
"""The keys and values of so many heads are there at a time as fit into this, or those of one."""


LEAST_EXPANDED = 32
"""Rows with fewer tokens attend to latents: an expanded row takes launches of its own in each layer."""


def expanded_bytes(latent: LatentRecipe, context: int, item_bytes: int) -> int:
    """Returns the most bytes that a row's expanded keys and values have at once, and what they are made of."""
    room = max(2 * _padded(context) * _width(latent) * item_bytes, EXPANDED_BYTES)
    # What is kept in FP8 is there once more, as it is stored.
    return 2 * room + context * ((latent.kept + latent.rank) * item_bytes + latent.kept)


def choosing_bytes(latent: LatentRecipe, tokens: int, context: int) -> int:
    """Returns the most bytes that scores, and what is chosen by them, take for ``tokens`` of contexts of so many."""
    form = sparse_form(latent)
    if form is None:
        return 0
    width = max(context, form.count)
    together = min(tokens, max(1, SCORES_AT_ONCE // width))
    # Scores, and once more what finds the highest; these, their places, and which are above the lowest.
    return together * (2 * width * 4 + form.count * (4 + 8 + 1)) + tokens * form.count * 4


@dataclass(frozen=True, slots=True)
class LatentStep:
    """One step's latent attention.

    The kinds of rows are computed in the order in which they stand here: later ones may read what earlier ones store.
    """

    attention: Attention | None
    """That of the rows which attend to latents; None if there are none."""
    direct: torch.Tensor | None = None
    """The tokens of these; None for all tokens of the step, if it has no other rows."""
    expanded: tuple[ExpandedRow, ...] = ()
    sparse: SparseAttention | None = None
    """That of the rows which attend to chosen latents; None if there are none."""
    chosen: torch.Tensor | None = None
    """The tokens of these; None for all."""


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
        tiles = numbers(self._layout, self._tiles.index_select(0, self._index + layer))
        kept = tiles.view(-1, self._layout.head_dim)[:context]
        latents, turned = kept[:, : latent.rank].contiguous(), kept[:, latent.rank : latent.channels]
        keys, values = self._room[0, :, 0, 0, :context], self._room[0, :, 0, 1, :context]
        keys[..., latent.plain : latent.plain + latent.turned] = turned
        # Another row may have left numbers there.
        keys[..., latent.plain + latent.turned :] = 0
        query = widened(query, self._room.shape[-1])
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
    device, form = group.cache.device, sparse_form(latent)
    direct, expanded, sparse = list[_Part](), list[_Part](), list[_Part]()
    first = 0
    for row in rows:
        seeing_all, choosing = _divided(_Part(row, first), form)
        if seeing_all is not None:
            expands = is_expanded(latent, seeing_all.row.new_tokens, seeing_all.row.context_len)
            (expanded if expands else direct).append(seeing_all)
        if choosing is not None:
            sparse.append(choosing)
        first += row.new_tokens
    # What is left of a row may be a single token.
    direct.sort(key=lambda part: part.row.new_tokens > 1)
    attention = chosen = None
    if direct:
        attention = kernels.plan_attention(group.layout, group.cache, [part.row for part in direct], heads, scale)
    if sparse and form is not None:
        chosen = kernels.plan_sparse(group.layout, group.cache, [part.row for part in sparse], heads, scale, form)
    if not expanded and not (direct and sparse):
        return LatentStep(attention, sparse=chosen)
    layouts = (_layout(latent, part.row.context_len, heads, group.layout.dtype) for part in expanded)
    most = max((layout.block_bytes for layout in layouts), default=0)
    room = torch.empty(most, dtype=torch.uint8, device=device)
    spread = tuple(ExpandedRow(kernels, group, part.row, part.first, heads, scale, latent, room) for part in expanded)
    places, others = (moved.long() for moved in to_device([_tokens(direct), _tokens(sparse)], device))
    return LatentStep(attention, places, spread, chosen, others)


def widened(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Returns ``x`` with so many channels, of which those behind its own are 0. It is ``x`` itself if it has them."""
    missing = channels - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def sparse_form(latent: LatentRecipe) -> SparseForm | None:
    """Returns which tokens a token attends to; None if these are all before it."""
    return None if latent.index is None else SparseForm(latent.index.count, latent.channels)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tokens of a step that follow each other in one request."""

    row: AttentionRow
    first: int
    """The number of the first one in the step."""


def _divided(part: _Part, form: SparseForm | None) -> tuple[_Part | None, _Part | None]:
    """Returns the tokens of a row that attend to all before them, and those that choose."""
    row = part.row
    if form is None or row.context_len <= form.count:
        return part, None
    choosing = min(row.new_tokens, row.context_len - form.count)
    others = row.new_tokens - choosing
    if not others:
        return None, part
    return (
        _Part(replace(row, new_tokens=others, context_len=form.count), part.first),
        _Part(replace(row, new_tokens=choosing), part.first + others),
    )


def _tokens(parts: Sequence[_Part]) -> list[int]:
    return [token for part in parts for token in range(part.first, part.first + part.row.new_tokens)]


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
