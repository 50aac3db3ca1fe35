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
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
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

Numbers: TypeAlias = npt.NDArray[Any]

EXPANDED_BYTES = 2**26
"""The keys and values of so many heads are there at a time as fit into this, or those of one."""


LEAST_EXPANDED = 32
"""Rows with fewer tokens attend to latents: an expanded row takes launches of its own in each layer."""


def expanded_bytes(latent: LatentRecipe, context: int, item_bytes: int) -> int:
    """Returns the most bytes that a row's expanded keys and values have at once, and what they are made of."""
    room = max(2 * padded(context) * _width(latent) * item_bytes, EXPANDED_BYTES)
    # What is kept in FP8 is there once more, as it is stored.
    return 2 * room + context * ((latent.kept + latent.rank) * item_bytes + latent.kept)


def choosing_bytes(latent: LatentRecipe, tokens: int, context: int) -> int:
    """Returns the most bytes that scores, and what is chosen by them, take for ``tokens`` of contexts of so many."""
    form = sparse_form(latent)
    if form is None:
        return 0
    width = max(context, form.count)
    together = min(tokens, max(1, SCORES_AT_ONCE // width))
    # Of pools, what their tokens have, their gates in fp32, weights, and products.
    pools = 0 if latent.index is None or form.pool == 1 else (tokens + form.pool) * latent.index.channels * 20
    # Scores, and once more what finds the highest; these, their places, and which are above the lowest.
    return pools + together * (2 * width * 4 + form.count * (4 + 8 + 1)) + tokens * form.most * 4


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
    pools: PoolMaking | None = None
    """What makes the keys of pools, of all rows; None if tokens are chosen one by one, or not at all."""


class PoolMaking:
    """Makes the keys by which pools of tokens are chosen (``IndexRecipe.pool``), once their last tokens are computed.

    A token's row of the cache has its key and its gates. In place of those of a pool's last token comes the pool's key:
    so a block has all that is needed of its tokens, and nothing depends on where a prompt is cut.
    """

    def __init__(self, group: KvGroup, rows: Sequence[AttentionRow], latent: LatentRecipe, pool: int) -> None:
        self._layout, self._first = group.layout, latent.channels
        self._rows = group.layout.tokens(group.cache)
        new, members, last, first = list[Numbers](), list[Numbers](), list[Numbers](), 0
        for row in rows:
            start, size = row.context_len - row.new_tokens, group.layout.block_size
            begin = start - start % pool
            at = np.arange(begin, row.context_len)
            table = block_ids(row.blocks, -(-row.context_len // size))
            slots = table[at // size] * (group.layout.num_layers * size) + at % size
            whole = row.context_len // pool * pool - begin
            new.append(slots[start - begin :])
            members.append(slots[:whole])
            last.append(first - (start - begin) + np.arange(pool - 1, whole, pool))
            first += row.new_tokens
        joined = [np.concatenate(each).astype(np.int32) for each in (new, members, last)]
        self._new, places, self._last = (moved.long() for moved in to_device(joined, group.cache.device))
        self._members = places.view(-1, pool)

    def __call__(self, layer: int, key: torch.Tensor, bias: torch.Tensor) -> None:
        """Stores the step's keys, ``[1, tokens, 1, channels]``, and writes the keys of pools into these.

        ``bias`` is fp32 ``[pool, channels of an index key]``.
        """
        # Tokens of one pool may be in several rows of the step.
        rows = self._rows[layer * self._layout.block_size :]
        rows.index_copy_(0, self._new, key.view(-1, key.shape[-1]))
        channels = bias.shape[1]
        held = rows[:, self._first : self._first + 2 * channels][self._members]
        keys, gates = torch.split(held, channels, -1)
        weights = torch.softmax(gates.float() + bias, 1).to(keys.dtype)
        key[0, self._last, 0, self._first : self._first + channels] = (weights * keys).sum(1)


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
        self._layout, self._context, self._heads = layout, row.context_len, heads
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
        self,
        layer: int,
        latent: LatentRecipe,
        query: torch.Tensor,
        key: torch.Tensor,
        to_key: HeadLinear,
        to_value: HeadLinear,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the row's new keys, ``[1, new_tokens, 1, channels]``, and attends to the whole context.

        ``latent`` is that of the layer, whose heads have as many channels as any other's. ``query`` is ``[new_tokens,
        heads, plain + turned]``; ``to_key`` leads from a latent to a head's part of the key that is not turned, and
        ``to_value`` to its value. ``sinks`` are those of ``Attention``. Returns ``[new_tokens, heads, value]``.
        """
        context = self._context
        self._write(layer, key)
        tiles = numbers(self._layout, self._tiles.index_select(0, self._index + layer))
        kept = tiles.view(-1, self._layout.head_dim)[:context]
        latents, turned = kept[:, : latent.rank].contiguous(), kept[:, latent.rank : latent.rank + latent.turned]
        keys, values = self._room[0, :, 0, 0, :context], self._room[0, :, 0, 1, :context]
        keys[..., latent.plain : latent.plain + latent.turned] = turned
        # Another row may have left numbers there.
        keys[..., latent.plain + latent.turned :] = 0
        query = widened(query, self._room.shape[-1])
        out = []
        for some in self._some_heads():
            keys[..., : latent.plain] = to_key.of_one(latents, some).transpose(0, 1)
            values[..., : latent.value] = to_value.of_one(latents, some).transpose(0, 1)
            beside = None if sinks is None else sinks[some]
            attended = self._attention(0, query[:, some].contiguous(), None, sinks=beside)
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
    direct, expanded, sparse = list[Part](), list[Part](), list[Part]()
    first = 0
    for row in rows:
        seeing_all, choosing = divided(Part(row, first), form)
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
    pools = None
    if latent.index is not None and latent.index.pool > 1:
        pools = PoolMaking(group, rows, latent, latent.index.pool)
    if sparse and form is not None:
        chosen = kernels.plan_sparse(group.layout, group.cache, [part.row for part in sparse], heads, scale, form)
    if not expanded and not (direct and sparse):
        return LatentStep(attention, sparse=chosen, pools=pools)
    layouts = (_layout(latent, part.row.context_len, heads, group.layout.dtype) for part in expanded)
    most = max((layout.block_bytes for layout in layouts), default=0)
    room = torch.empty(most, dtype=torch.uint8, device=device)
    spread = tuple(ExpandedRow(kernels, group, part.row, part.first, heads, scale, latent, room) for part in expanded)
    places, others = (moved.long() for moved in to_device([tokens_of(direct), tokens_of(sparse)], device))
    return LatentStep(attention, places, spread, chosen, others, pools)


def widened(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Returns ``x`` with so many channels, of which those behind its own are 0. It is ``x`` itself if it has them."""
    missing = channels - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def sparse_form(latent: LatentRecipe) -> SparseForm | None:
    """Returns which tokens a token attends to; None if these are all before it."""
    return None if latent.index is None else SparseForm(latent.index.count, latent.channels, latent.index.pool)


@dataclass(frozen=True, slots=True)
class Part:
    """Some tokens of a step that follow each other in one request."""

    row: AttentionRow
    first: int
    """The number of the first one in the step."""


def divided(part: Part, form: SparseForm | None) -> tuple[Part | None, Part | None]:
    """Returns the tokens of a row that attend to all before them, and those that choose."""
    row = part.row
    if form is None or row.context_len <= form.most:
        return part, None
    choosing = min(row.new_tokens, row.context_len - form.most)
    others = row.new_tokens - choosing
    if not others:
        return None, part
    return (
        Part(replace(row, new_tokens=others, context_len=form.most), part.first),
        Part(replace(row, new_tokens=choosing), part.first + others),
    )


def tokens_of(parts: Sequence[Part]) -> list[int]:
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
    size, width = padded(context), _width(latent)
    one = 2 * size * width * dtype.itemsize
    counts = (count for count in range(heads, 1, -1) if heads % count == 0 and count * one <= EXPANDED_BYTES)
    return KvLayout(next(counts, 1), 1, size, width, dtype)


def _width(latent: LatentRecipe) -> int:
    """Returns the channels of a head's expanded key and value: as many as the longer one has."""
    return max(latent.plain + latent.turned, latent.value)


def padded(context: int) -> int:
    """Returns the tokens of the one block that has an expanded context. Kernels are compiled for a few sizes of it."""
    return 1 << max(4, (context - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Slots:
    """Where vectors are in the blocks of a group: int64 ``[count]`` each, on the device."""

    blocks: torch.Tensor
    places: torch.Tensor

    def of(self, view: torch.Tensor) -> torch.Tensor:
        """Returns these vectors of ``view``, ``[num_blocks, places, channels]``, as ``[count, channels]``."""
        return view[self.blocks, self.places]

    def some(self, numbers: torch.Tensor) -> Slots:
        return Slots(self.blocks[numbers], self.places[numbers])

    def store(self, view: torch.Tensor, vectors: torch.Tensor) -> None:
        view[self.blocks, self.places] = vectors


def entry_slots(row: AttentionRow, numbers: Numbers, every: int, size: int) -> tuple[Numbers, Numbers]:
    """Returns the blocks of these entries of a row, and their places in them.

    An entry is in the block of its last token, behind those whose last tokens come before.
    """
    last = numbers * every + every - 1
    table = block_ids(row.blocks, -(-row.context_len // size))
    return table[last // size], numbers - last // size * size // every


def moved_slots(blocks: Sequence[Numbers], places: Sequence[Numbers], device: torch.device) -> Slots:
    joined = [np.concatenate(each).astype(np.int32) for each in (blocks, places)]
    return Slots(*(moved.long() for moved in to_device(joined, device)))
