"""Plans attention to blocks of tokens that an indexer chooses.

Tokens choose whose context has more than they attend to, and the keys and values of what they choose are gathered. The
others attend as in any other model. Which they are depends on their positions alone, and not on the rows that a prompt
was cut into. With ``BlockIndexRecipe`` all heads attend to the same blocks, whose keys are means of those of tokens;
with ``HeadBlocksRecipe`` each KV head chooses by the keys of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pdserve.models.latent_plan import Numbers, Part, divided, entry_slots, moved_slots, padded, tokens_of, widened
from pdserve.models.rank_cache import KvGroup
from pdserve.models.recipe import BlockIndexRecipe, HeadBlocksRecipe
from pdserve.models.shared_plan import GATHERED_NUMBERS
from pdserve_kernels.contract import (
    SCORES_AT_ONCE,
    Attention,
    AttentionRow,
    Kernels,
    SparseForm,
)
from pdserve_kernels.cpu.torch_kernels import KvWrite
from pdserve_kernels.host_copies import block_ids, to_device
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.reference import dequantised


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """What the largest step of attention to chosen blocks has to do on one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    context: int


def chosen_bytes(blocks: BlockIndexRecipe, item_bytes: int, load: BlockLoad) -> int:
    """Returns the most bytes that choosing blocks, and what is gathered of them, take in one layer at once."""
    there, width = load.context // blocks.every, (blocks.count + 1) * blocks.every
    scores = max(SCORES_AT_ONCE, blocks.heads * there)
    # Products and what is above 0 of them, keys; and sums, as they are, without what is hidden, and sorted.
    choosing = 2 * 4 * scores + there * blocks.channels * (item_bytes + 4) + 6 * 8 * scores // blocks.heads
    # The places of what each token sees, in two parts and together.
    places = load.tokens * width * 8 * 4
    together = max(GATHERED_NUMBERS, width * max(2 * load.kv_heads * load.head_dim, load.heads))
    rows = together // load.head_dim
    # Some tokens' own, also in fp32 and for a product, their places, and four times their scores.
    scored = together * load.heads // max(2 * load.kv_heads * load.head_dim, load.heads)
    gathering = together * (item_bytes + 8) + 4 * 8 * rows + 4 * 4 * scored
    return max(choosing, gathering) + places


def head_block_bytes(
    blocks: HeadBlocksRecipe, kv_heads: int, heads: int, tokens: int, rows: int, context: int, item_bytes: int
) -> int:
    """Returns the most bytes that choosing blocks, and what is gathered of them, take in one layer at once.

    ``kv_heads`` and ``heads`` are those of one rank, and ``rows`` the most requests of a step of ``tokens``.
    """
    index = blocks.index
    if index is None:
        return 0
    width, channels = padded(index.tokens), blocks.head_dim + blocks.beside
    together = min(tokens, max(1, GATHERED_NUMBERS // (kv_heads * 2 * width * blocks.head_dim)))
    # The room, what is taken from the cache, and the tokens' numbers, tiles and places as int64, some of them twice.
    gathered = together * kv_heads * width * (2 * (blocks.head_dim + channels) * item_bytes + 10 * 8)
    # Scores, what is above what is hidden, with and without padding; and keys as they are kept, joined and in fp32.
    scores = 5 * 4 * max(SCORES_AT_ONCE, kv_heads * (context + index.size))
    keys = context * (index.channels * (2 * item_bytes + 2 * 4) + 8 * 8)
    # Chosen blocks; queries and results once more; tables, and where the step's tokens are.
    chosen = tokens * (kv_heads * index.count * 3 * 8 + 3 * heads * channels * item_bytes + 8 * 8)
    return gathered + scores + keys + chosen + rows * context


class BlockStep:
    """One step of attention to chosen blocks (``BlockIndexRecipe``).

    Tokens whose context has no more than they attend to do not choose, and are computed by the attention of the kernel
    set, before the others. Which they are depends on their positions alone.
    """

    def __init__(
        self,
        kernels: Kernels,
        group: KvGroup,
        rows: Sequence[AttentionRow],
        scale: float,
        blocks: BlockIndexRecipe,
    ) -> None:
        """Plans a step of ``rows``."""
        self._kernels, self._group, self._scale, self._blocks = kernels, group, scale, blocks
        self._device, layout = group.cache.device, group.layout
        direct, choosing = _parted(rows, blocks.whole)
        self.attention: Attention | None = None
        """That of the tokens that do not choose; None if there are none."""
        if direct:
            seeing = [part.row for part in direct]
            self.attention = kernels.plan_attention(layout, group.cache, seeing, group.heads, scale)
        self._plan_keys(rows)
        self._rows = [part.row for part in choosing]
        self.chosen: torch.Tensor | None = None
        """The numbers of the tokens that choose; None if there are none."""
        if choosing:
            moved = to_device([tokens_of(direct), tokens_of(choosing)], self._device)
            self.direct, self.chosen = (each.long() for each in moved)
            self._plan_choosing()

    @property
    def gathers(self) -> bool:
        """Whether each token's keys and values are gathered on the device, which then waits for nothing."""
        return self._device.type != "cpu"

    def _plan_keys(self, rows: Sequence[AttentionRow]) -> None:
        """Plans the keys of the blocks that become complete in the step."""
        every, size = self._blocks.every, self._group.layout.block_size
        blocks, places, ended, positions, first = list[Numbers](), list[Numbers](), list[int](), list[int](), 0
        for row in rows:
            start = row.context_len - row.new_tokens
            numbers = np.arange(start // every, row.context_len // every)
            slots = entry_slots(row, numbers, every, size)
            blocks.append(slots[0])
            places.append(slots[1])
            ended += (numbers * every + every - 1 - start + first).tolist()
            positions += (numbers * every).tolist()
            first += row.new_tokens
        self._ended_slots = moved_slots(blocks, places, self._device)
        self.ended, self.positions = (each.long() for each in to_device([ended, positions], self._device))
        """The numbers of the last tokens of these blocks, and the positions of their first ones."""

    def _plan_choosing(self) -> None:
        every, layout, rows = self._blocks.every, self._group.layout, self._rows
        at = np.concatenate([np.arange(row.context_len - row.new_tokens, row.context_len) for row in rows])
        tables = [block_ids(row.blocks, -(-row.context_len // layout.block_size)) for row in rows]
        begins = np.cumsum([0, *(len(table) for table in tables)])[:-1]
        begin = np.repeat(begins, [row.new_tokens for row in rows])
        # What stands behind the last whole block, up to the token itself.
        behind = (at + 1) % every
        self._counts = self._blocks.count * every + behind
        """``[tokens]``: how many tokens each one attends to."""
        lists = [at.astype(np.int32), begin.astype(np.int32), np.concatenate(tables), self._counts.astype(np.int32)]
        self._at, self._begin, self._table, self._ends = (each.long() for each in to_device(lists, self._device))
        (slots,) = to_device([_slots_of(rows, layout)], self._device)
        self._write = KvWrite(layout, self._group.cache, slots.long())
        self._complete = [
            moved_slots([blocks], [places], self._device)
            for blocks, places in (
                entry_slots(row, np.arange(row.context_len // every), every, layout.block_size) for row in rows
            )
        ]

    def store(self, layer: int, key_value: torch.Tensor) -> None:
        """Stores keys and values of the tokens that choose, ``[2, tokens, kv_heads, head_dim]``."""
        self._write(layer, key_value)

    def store_keys(self, number: int, keys: torch.Tensor) -> None:
        """Stores the keys of the blocks that became complete, ``[blocks, channels]``, for each KV head."""
        view = self._keys(number)
        view[self._ended_slots.blocks, :, self._ended_slots.places] = keys.unsqueeze(1).expand(-1, view.shape[1], -1)

    def __call__(self, layer: int, number: int, query: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Attends to what is stored, for the tokens that choose.

        ``query`` is ``[tokens, heads, head_dim]``, as the result is. ``index`` has the queries by which blocks are
        chosen, ``[tokens, index heads, channels]``, and ``number`` is that of the layer's keys of blocks.
        """
        found, first, keys = list[torch.Tensor](), 0, self._keys(number)[:, 0]
        for row, slots in zip(self._rows, self._complete, strict=True):
            own = slice(first, first + row.new_tokens)
            found.append(self._some(index[own], slots.of(keys), self._at[own]))
            first = own.stop
        every = self._blocks.every
        within = torch.arange(every, device=self._device)
        chosen = (torch.cat(found).unsqueeze(-1) * every + within).flatten(1)
        behind = ((self._at + 1) // every * every).unsqueeze(1) + within[:-1]
        # In place of what a token does not see stands the token itself: NaN of others would spread.
        seen = torch.cat((chosen, torch.minimum(behind, self._at.unsqueeze(1))), 1)
        return self._by_gathering(layer, query, seen) if self.gathers else self._planned(layer, query, seen)

    def _some(self, query: torch.Tensor, keys: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of the blocks that tokens at these positions choose, int64 ``[tokens, count]``, in order.

        ``keys`` is ``[blocks, channels]``. Of blocks with equal scores, earlier ones are chosen.
        """
        found, numbers = list[torch.Tensor](), torch.arange(len(keys), device=self._device)
        keys, together = keys.float().T, max(1, SCORES_AT_ONCE // (query.shape[1] * len(keys)))
        for begin in range(0, len(query), together):
            some = slice(begin, begin + together)
            scores = F.relu(query[some].float() @ keys).sum(1)
            # What is not a number is chosen, so that it shows.
            known = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
            known = known.masked_fill(numbers >= ((at[some] + 1) // self._blocks.every).unsqueeze(1), -torch.inf)
            highest = known.sort(dim=-1, descending=True, stable=True).indices[:, : self._blocks.count]
            found.append(highest.sort(-1).values)
        return torch.cat(found)

    def _rows_of(self, layer: int, positions: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        """Returns the rows of ``KvLayout.tokens`` with the keys at ``positions``, ``[n, width]``, of each KV head.

        Tables begin at ``begin``, ``[n, 1]``. The result is ``[n, kv_heads, width]``.
        """
        layout, size = self._group.layout, self._group.layout.block_size
        of_head = layout.num_layers * layout.tiles_a_layer * size
        blocks = self._table[begin + positions // size] * (layout.kv_heads * of_head)
        heads = torch.arange(layout.kv_heads, device=self._device) * of_head + layer * layout.tiles_a_layer * size
        return (blocks + positions % size).unsqueeze(1) + heads.view(1, -1, 1)

    def _by_gathering(self, layer: int, query: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Attends with plain products, some tokens at a time. Nothing waits for the device."""
        layout, (tokens, heads, channels) = self._group.layout, query.shape
        kept, out = layout.tokens(self._group.cache), torch.empty_like(query)
        column, width = torch.arange(seen.shape[1], device=self._device), seen.shape[1]
        together = max(1, GATHERED_NUMBERS // (width * max(2 * layout.kv_heads * channels, heads)))
        for begin in range(0, tokens, together):
            some = slice(begin, begin + together)
            rows = self._rows_of(layer, seen[some], self._begin[some].unsqueeze(1))
            by_head = query[some].float().view(len(rows), layout.kv_heads, -1, channels)
            scores = by_head @ kept[rows].float().transpose(-1, -2) * self._scale
            hidden = column >= self._ends[some].view(-1, 1, 1, 1)
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
            values = weights @ kept[rows + layout.block_size].float()
            out[some] = values.view(-1, heads, channels).to(out.dtype)
        return out

    def _planned(self, layer: int, query: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Attends on a CPU, by the attention of the kernel set, to keys and values that are copied."""
        layout, width, first, base = self._group.layout, seen.shape[1], 0, 0
        copied, tables = list[torch.Tensor](), list[torch.Tensor]()
        for row in self._rows:
            own = slice(first, first + row.new_tokens)
            places, first = seen[own], own.stop
            if row.new_tokens * width < row.context_len:
                # Few tokens of the context are copied.
                positions, places = places.reshape(1, -1), torch.arange(places.numel()).view(places.shape)
            else:
                positions = torch.arange(row.context_len).unsqueeze(0)
            copied.append(self._rows_of(layer, positions, self._begin[own.start]).squeeze(0))
            tables.append((places + base).int())
            base += positions.shape[1]
        rows, kept = torch.cat(copied, 1).T, layout.tokens(self._group.cache)
        room = torch.stack((kept[rows], kept[rows + layout.block_size]), 2)
        one = KvLayout(layout.kv_heads, 1, 1, layout.head_dim, layout.dtype)
        contexts = [
            AttentionRow(1, count, table[:count])
            for count, table in zip(self._counts.tolist(), torch.cat(tables).numpy(), strict=True)
        ]
        planned = self._kernels.plan_attention(
            one, room.view(len(rows), layout.kv_heads, 1, 2, 1, -1), contexts, self._group.heads, self._scale
        )
        return planned(0, query, None)

    def _keys(self, number: int) -> torch.Tensor:
        """Returns one layer's keys of blocks, ``[num_blocks, kv_heads, places, channels]``."""
        layout, beside = self._group.layout, self._group.beside
        size, cache = layout.block_size, self._group.cache
        sizes = [each.in_block(size) * each.channels for each in beside]
        layers = int(layout.num_layers - -(-sum(sizes) // (layout.tiles_a_layer * size * layout.head_dim)))
        first = layers * layout.tiles_a_layer * size * layout.head_dim + sum(sizes[:number])
        room = cache.flatten(2)[..., first : first + sizes[number]]
        return room.view(len(cache), layout.kv_heads, beside[number].in_block(size), beside[number].channels)


class HeadBlockStep:
    """One step's attention to chosen blocks (``HeadBlocksRecipe``), and that of layers which see whole contexts.

    A token whose context has no more blocks than it may choose attends to all of it, in whatever row it is. Of the
    others, what they attend to is gathered, and becomes a context of each KV head of each token.
    """

    def __init__(
        self, kernels: Kernels, group: KvGroup, rows: Sequence[AttentionRow], scale: float, blocks: HeadBlocksRecipe
    ) -> None:
        """Plans a step of ``rows``, of which those with one token come first."""
        assert blocks.index is not None, "a model with such layers has indexers"
        self._index, self._dim, self._layout = blocks.index, blocks.head_dim, group.layout
        self._kernels, self._scale, self._heads = kernels, scale, group.heads
        layout, device = group.layout, group.cache.device
        self._whole = kernels.plan_attention(layout, group.cache, rows, group.heads, scale)
        seeing, choosing = _parted(rows, self._index.tokens)
        self._choosing = choosing
        if not choosing:
            return
        self._seeing: Attention | None = None
        if seeing:
            left = [part.row for part in seeing]
            self._seeing = kernels.plan_attention(layout, group.cache, left, group.heads, scale)
        if layout.fp8:
            self._numbers, self._exponents = layout.split(layout.tiles(group.cache))
        else:
            self._tokens = layout.tokens(group.cache)
        self._plan_places(rows, seeing, group, device)
        self._plan_room(device)

    def _plan_places(
        self, rows: Sequence[AttentionRow], seeing: Sequence[Part], group: KvGroup, device: torch.device
    ) -> None:
        """Plans where the step's tokens are stored, and where the contexts of those that choose are."""
        size, tables, starts, positions, start = self._layout.block_size, [], [], [], 0
        for part in self._choosing:
            row = part.row
            tables.append(block_ids(row.blocks, -(-row.context_len // size)))
            positions.append(np.arange(row.context_len - row.new_tokens, row.context_len))
            starts.append(np.full(row.new_tokens, start))
            start += len(tables[-1])
        parts = [np.concatenate(each) for each in (tables, starts, positions)]
        moved = to_device([_slots_of(rows, self._layout), *parts, tokens_of(seeing), tokens_of(self._choosing)], device)
        stored, self._table, self._starts, self._positions, self._seen, self._chosen = (each.long() for each in moved)
        self._write = KvWrite(self._layout, group.cache, stored)

    def _plan_room(self, device: torch.device) -> None:
        """Plans attention to what is gathered, for some tokens at a time, in the same room."""
        index, kv, positions = self._index, self._layout.kv_heads, list[int]()
        for part in self._choosing:
            positions += range(part.row.context_len - part.row.new_tokens, part.row.context_len)
        width = padded(index.tokens)
        layout = KvLayout(1, 1, width, self._dim, self._layout.dtype)
        together = min(len(positions), max(1, GATHERED_NUMBERS // (kv * 2 * width * self._dim)))
        self._room = layout.allocate(together * kv, device)
        self._pieces = list[tuple[slice, Attention]]()
        for first in range(0, len(positions), together):
            some = slice(first, min(first + together, len(positions)))
            # Of the last chosen block, which has the token itself, nothing behind the token is seen.
            counts = [index.tokens - index.size + at % index.size + 1 for at in positions[some] for _ in range(kv)]
            own = [AttentionRow(1, count, [block]) for block, count in enumerate(counts)]
            room = self._room[: len(own)]
            planned = self._kernels.plan_attention(layout, room, own, self._heads // kv, self._scale)
            self._pieces.append((some, planned))

    def __call__(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor, index: torch.Tensor | None
    ) -> torch.Tensor:
        """Stores the new keys and values, then attends to what ``index`` chooses, or to whole contexts without it.

        ``query`` is ``[tokens, heads, head_dim]``, as the result is. ``key_value`` is ``[2, tokens, kv_heads,
        head_dim + beside]``, and ``index`` is ``[tokens, kv_heads, channels]``.
        """
        width = self._layout.head_dim
        if index is None or not self._choosing:
            return self._whole(layer, widened(query, width), key_value)[..., : self._dim]
        self._write(layer, key_value)
        out = torch.empty_like(query)
        if self._seeing is not None:
            seeing = widened(query[self._seen], width)
            out[self._seen] = self._seeing(layer, seeing, None)[..., : self._dim]
        chosen, queries = self._blocks(layer, index[self._chosen]), query[self._chosen]
        for some, attention in self._pieces:
            out[self._chosen[some]] = self._attended(layer, queries[some], chosen[some], some, attention)
        return out

    def _blocks(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of chosen blocks, ``[tokens, kv_heads, count]``, those of a head in their order."""
        found, first, size = list[torch.Tensor](), 0, self._index.size
        for part in self._choosing:
            count, context = part.row.new_tokens, part.row.context_len
            own = slice(first, first + count)
            keys, at = self._index_keys(layer, int(first), context), self._positions[own]
            numbers = torch.arange(-(-context // size) * size, device=keys.device)
            together = max(1, SCORES_AT_ONCE // (self._layout.kv_heads * len(numbers)))
            for begin in range(0, count, together):
                some = slice(begin, begin + together)
                found.append(self._highest(index[own][some], keys, at[some], numbers))
            first += count
        return torch.cat(found)

    def _highest(
        self, index: torch.Tensor, keys: torch.Tensor, at: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        """Returns what ``_blocks`` does, for tokens at positions ``at`` of one context.

        ``keys`` are its index keys, ``[context, channels]``, and ``numbers`` those of all tokens of its blocks.
        """
        size, local = self._index.size, self._index.local
        scores = F.pad(index.float() @ keys.T, (0, len(numbers) - len(keys)))
        # What is not a number is chosen, so that it shows.
        scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
        scores = scores.masked_fill(numbers > at.view(-1, 1, 1), -torch.inf)
        best = scores.view(*scores.shape[:2], -1, size).amax(-1)
        own, blocks = (at // size).view(-1, 1, 1), numbers[: best.shape[-1]]
        best = best.masked_fill((blocks <= own) & (blocks > own - local), torch.inf)
        return best.topk(self._index.count, -1).indices.sort(-1).values

    def _index_keys(self, layer: int, token: int, context: int) -> torch.Tensor:
        """Returns the index keys of the context of a token that chooses, fp32 ``[context, channels]``."""
        at = torch.arange(context, device=self._table.device)
        tiles, places = self._tiles(layer, self._starts[token], at)
        halves = [self._taken(tiles + value, places)[:, self._dim :] for value in (0, 1)]
        return torch.cat(halves, 1).float()

    def _tiles(self, layer: int, start: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tiles of the first KV head's keys of tokens, and their places in these.

        ``start`` is where the tables of their contexts begin.
        """
        size = self._layout.block_size
        blocks = self._table[start + tokens // size]
        return self._layout.tile_rows(blocks)[0] + self._layout.tiles_a_layer * layer, tokens % size

    def _taken(self, tiles: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns what is stored at these places of tiles, ``[..., head_dim + beside]``."""
        if self._layout.fp8:
            return dequantised(self._numbers[tiles, places], self._exponents[tiles, places], self._layout.dtype)
        return self._tokens[tiles * self._layout.block_size + places]

    def _attended(
        self, layer: int, query: torch.Tensor, chosen: torch.Tensor, some: slice, attention: Attention
    ) -> torch.Tensor:
        """Attends to ``chosen`` blocks, ``[tokens, kv_heads, count]``. ``query`` is ``[tokens, heads, head_dim]``."""
        index, layout, count, dim = self._index, self._layout, len(query), self._dim
        numbers = torch.arange(index.size, device=query.device)
        tokens = (chosen.unsqueeze(-1) * index.size + numbers).flatten(2)
        tokens = F.pad(tokens, (0, self._room.shape[4] - index.tokens))
        # In place of what a token does not see stands the token itself: NaN of others would spread.
        at = self._positions[some].view(-1, 1, 1)
        tokens = torch.minimum(tokens, at)
        tiles, places = self._tiles(layer, self._starts[some].view(-1, 1, 1), tokens)
        heads = torch.arange(layout.kv_heads, device=query.device).view(1, -1, 1)
        tiles = tiles + heads * layout.tiles_a_layer * layout.num_layers
        room = self._room[: count * layout.kv_heads, 0, 0]
        for value in (0, 1):
            room[:, value] = self._taken(tiles + value, places)[..., :dim].flatten(0, 1)
        grouped = query.reshape(count * layout.kv_heads, -1, dim)
        return attention(0, grouped, None).view(query.shape)


def _parted(rows: Sequence[AttentionRow], longest: int) -> tuple[list[Part], list[Part]]:
    """Returns the parts of rows that see at most ``longest`` tokens, single ones first, and those that choose."""
    form, seeing, choosing, first = SparseForm(longest, 0), list[Part](), list[Part](), 0
    for row in rows:
        for part, kind in zip(divided(Part(row, first), form), (seeing, choosing), strict=True):
            if part is not None:
                kind.append(part)
        first += row.new_tokens
    # What is left of a row may be a single token.
    seeing.sort(key=lambda part: part.row.new_tokens > 1)
    return seeing, choosing


def _slots_of(rows: Sequence[AttentionRow], layout: KvLayout) -> Numbers:
    """Returns where the new tokens of rows are, each as ``block * block_size + offset``."""
    found, size = list[Numbers](), layout.block_size
    for row in rows:
        at = np.arange(row.context_len - row.new_tokens, row.context_len)
        table = block_ids(row.blocks, -(-row.context_len // size))
        found.append((table[at // size] * size + at % size).astype(np.int32))
    return np.concatenate(found)
