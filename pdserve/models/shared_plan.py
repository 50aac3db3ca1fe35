"""Plans attention where all heads have one vector of a token as key and value (``SharedKvRecipe``).

The vectors of a window, and entries of further tokens, are gathered from two cache groups, and each token attends to
its own of these. An entry is made of some tokens by a state of the request, once the last of them is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from pdserve.models.latent_plan import Numbers, Slots, entry_slots, moved_slots
from pdserve.models.rank_cache import KvGroup, RunNumbers
from pdserve.models.recipe import SharedKvRecipe
from pdserve_kernels.contract import (
    SCORES_AT_ONCE,
    Attention,
    AttentionRow,
    IndexQueries,
    Kernels,
)
from pdserve_kernels.feed_forward import Activation
from pdserve_kernels.host_copies import block_ids, to_device
from pdserve_kernels.kv_layout import KvLayout

GATHERED_NUMBERS = 2**25
"""So many numbers of gathered vectors, and of scores, are on a GPU at a time, or those of one token."""
EMPTY = -1e30
"""The logarithm of the sum of no weights. Beside that of any weight it is nothing."""


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """What the largest step of attention to one vector of a token has to do on one rank."""

    heads: int
    channels: int
    window: int
    rows: int
    """The most requests."""
    tokens: int
    """The most tokens of them all."""
    context: int


def shared_bytes(shared: SharedKvRecipe, item_bytes: int, load: SharedLoad) -> int:
    """Returns the most bytes that gathered vectors, and what is computed of them, take in one layer at once."""
    entries = seen = chosen = 0
    if shared.entries is not None:
        entries = seen = load.context // shared.entries.every
    if shared.index is not None:
        seen = min(seen, shared.index.count)
        entries = min(entries, load.tokens * seen)
        scores = max(SCORES_AT_ONCE, shared.index.heads * load.context // shared.index.entries.every)
        # The products and what is above 0 of them, fp32, and all keys.
        chosen = 3 * 4 * scores + load.context // shared.index.entries.every * shared.kept * (item_bytes + 4)
    width = load.window + seen
    vectors = load.rows * (load.window + seen) + load.tokens + entries
    # Those of windows and of entries, and then all together; and the places of each token, in two parts and together.
    gathered = 2 * vectors * load.channels * item_bytes + 3 * load.tokens * width * 4
    together = max(GATHERED_NUMBERS, width * max(load.channels, load.heads))
    # Some tokens' own, also in fp32, their places, and four times their scores.
    computed = together * (item_bytes + 4) + 8 * together // load.channels
    computed += 4 * 4 * together * load.heads // max(load.channels, load.heads)
    return gathered + chosen + computed


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the tokens of a step see in layers of one kind: vectors of a window, and entries."""

    window: Slots
    """The vectors that any token of a row sees, row after row."""
    entries: tuple[Slots, ...]
    """All entries of each row; none if the layers have no entries."""
    ids: torch.Tensor
    """int32 ``[tokens, window]``: the places of a token's window among the vectors of ``window``. Those that there are
    stand last."""
    lengths: Numbers
    """``[tokens]``: how many there are."""
    complete: Numbers
    """``[tokens]``: the entries that a token sees, which are the first ones of its row."""


class SharedStep:
    """One step of attention to one vector of a token, and to entries (``SharedKvRecipe``)."""

    def __init__(
        self,
        kernels: Kernels,
        groups: Sequence[KvGroup],
        rows: Sequence[Sequence[AttentionRow]],
        runs: Sequence[RunNumbers],
        scale: float,
    ) -> None:
        """Plans a step, with the blocks that its rows have in each of ``groups``, and the runs of each state's."""
        self._kernels, self._groups, self._rows, self._runs, self._scale = kernels, groups, rows, runs, scale
        self._device = groups[0].cache.device
        self._starts = [row.context_len - row.new_tokens for row in rows[0]]
        self._new: dict[int, Slots] = {}
        self._seen: dict[tuple[int, int, int], _Seen] = {}
        self._plans: dict[tuple[int, int, int], tuple[torch.Tensor, Attention]] = {}
        self._makings: dict[tuple[int, int], EntryMaking] = {}

    @property
    def gathers(self) -> bool:
        """Whether each token's vectors are gathered on the device, which then waits for nothing from the host."""
        return self._device.type != "cpu"

    def store(self, group: int, layer: int, vectors: torch.Tensor) -> None:
        """Stores the vectors of the step's tokens, ``[tokens, channels]``."""
        if group not in self._new:
            self._new[group] = self._slots(group, self._starts)
        self._new[group].store(self._vectors(group, layer), vectors)

    def making(self, every: int, state: int) -> EntryMaking:
        """Returns what makes entries for ``every`` tokens each, with the states of group ``state`` of these."""
        key = (every, state)
        if key not in self._makings:
            size = self._groups[0].layout.block_size
            made = EntryMaking(self._kernels, every, self._rows[0], size, self._runs[state], self._device)
            self._makings[key] = made
        return self._makings[key]

    def store_entries(self, number: int, making: EntryMaking, entries: torch.Tensor) -> None:
        """Stores the entries that became complete, of the layer that is ``number`` of those with entries."""
        making.slots.store(self._entries(number), entries)

    def __call__(
        self,
        group: int,
        layer: int,
        window: int,
        query: torch.Tensor,
        sinks: torch.Tensor,
        entries: int | None = None,
        index: IndexQueries | None = None,
        most: int = 0,
    ) -> torch.Tensor:
        """Attends to what is stored. ``query`` is ``[tokens, heads, channels]``, as the result is.

        ``layer`` is the number of the layer in ``group``, and ``entries`` that of its entries. With ``index``, tokens
        see at most ``most`` of these: those that it chooses.
        """
        every = 0 if entries is None else self._groups[0].entries[entries].every
        key = (group, window, every)
        if key not in self._seen:
            self._seen[key] = self._seeing(group, window, every)
        seen = self._seen[key]
        vectors, channels = seen.window.of(self._vectors(group, layer)), query.shape[2]
        if entries is None:
            return self._attended(key, seen, [vectors], query, sinks)
        view = self._entries(entries)
        if index is not None and any(len(slots.blocks) > most for slots in seen.entries):
            return self._choosing(seen, vectors, view, query, sinks, index, most, every)
        return self._attended(
            key, seen, [vectors, *(slots.of(view)[:, :channels] for slots in seen.entries)], query, sinks
        )

    def _attended(
        self,
        key: tuple[int, int, int],
        seen: _Seen,
        parts: list[torch.Tensor],
        query: torch.Tensor,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Attends to all that is seen, which in all layers of a kind is in the same places."""
        if key not in self._plans or self.gathers:
            begins, begin = list[int](), len(parts[0])
            for row, part in zip(self._rows[0], parts[1:] or [parts[0][:0]] * len(self._rows[0]), strict=True):
                begins += [begin] * row.new_tokens
                begin += len(part)
            (first,) = to_device([begins], self._device)
            behind = first.unsqueeze(1) + torch.arange(int(seen.complete.max()), dtype=torch.int32, device=self._device)
            ids, counts = torch.cat((seen.ids, behind), 1), seen.lengths + seen.complete
            if self.gathers:
                return self._by_gathering(torch.cat(parts), ids, seen, counts, query, sinks)
            room = query.new_empty(begin, query.shape[2])
            self._plans[key] = room, self._plan(room, ids, seen, counts, query.shape[1])
        room, attention = self._plans[key]
        torch.cat(parts, out=room)
        return attention(0, query, None, sinks=sinks)

    def _choosing(
        self,
        seen: _Seen,
        vectors: torch.Tensor,
        view: torch.Tensor,
        query: torch.Tensor,
        sinks: torch.Tensor,
        index: IndexQueries,
        most: int,
        every: int,
    ) -> torch.Tensor:
        """Attends to ``vectors`` of windows, and to the chosen ones of the entries of ``view``."""
        channels = query.shape[2]
        parts, places, first = [vectors], list[torch.Tensor](), 0
        for row, slots in zip(self._rows[0], seen.entries, strict=True):
            own, there = slice(first, first + row.new_tokens), len(slots.blocks)
            first, begin = own.stop, sum(map(len, parts))
            chosen = torch.arange(most, dtype=torch.int32, device=self._device).expand(row.new_tokens, -1)
            if there > most:
                some = IndexQueries(index.query[own], index.weights[own])
                chosen = self._chosen(some, slots.of(view)[:, channels:], row, every, most)
            if there > row.new_tokens * most:
                # Few of the entries are copied.
                slots = slots.some(chosen.flatten().long())
                chosen = torch.arange(row.new_tokens * most, dtype=torch.int32, device=self._device).view(-1, most)
            parts.append(slots.of(view)[:, :channels])
            places.append(chosen + begin)
        room, ids = torch.cat(parts), torch.cat((seen.ids, torch.cat(places)), 1)
        counts = seen.lengths + np.minimum(seen.complete, most)
        if self.gathers:
            return self._by_gathering(room, ids, seen, counts, query, sinks)
        return self._plan(room, ids, seen, counts, query.shape[1])(0, query, None, sinks=sinks)

    def _chosen(
        self, index: IndexQueries, keys: torch.Tensor, row: AttentionRow, every: int, most: int
    ) -> torch.Tensor:
        """Returns the numbers of the ``most`` entries of a row that score highest, for each of its new tokens.

        ``keys`` is ``[entries, channels]``. The result is int32 ``[new_tokens, most]``, in order. Of a token that sees
        fewer entries, these come first.
        """
        found, count = list[torch.Tensor](), len(keys)
        together = max(1, SCORES_AT_ONCE // (index.query.shape[1] * count))
        keys, numbers = keys.float().T, torch.arange(count, device=self._device)
        at = torch.arange(row.context_len - row.new_tokens, row.context_len, device=self._device)
        for begin in range(0, row.new_tokens, together):
            some = slice(begin, begin + together)
            scores = index.weights[some].unsqueeze(1) @ F.relu(index.query[some].float() @ keys)
            # What is not a number is chosen, so that it shows.
            known = scores.squeeze(1).nan_to_num(torch.inf, torch.inf, -torch.inf)
            hidden = numbers >= ((at[some] + 1) // every).unsqueeze(1)
            chosen = known.masked_fill(hidden, -torch.inf).topk(most, -1).indices
            found.append(chosen.masked_fill(hidden.gather(1, chosen), count).sort(-1).values)
        return torch.cat(found).clamp(max=count - 1).int()

    def _plan(self, room: torch.Tensor, ids: torch.Tensor, seen: _Seen, counts: Numbers, heads: int) -> Attention:
        """Plans attention on a CPU, of each token to its own of the vectors in ``room``."""
        channels, places, window = room.shape[1], ids.numpy(), seen.ids.shape[1]
        layout = KvLayout(1, 1, 1, channels, room.dtype, channels)
        firsts = (window - seen.lengths).tolist()
        rows = [
            AttentionRow(1, count, own[first : first + count])
            for own, first, count in zip(places, firsts, counts.tolist(), strict=True)
        ]
        return self._kernels.plan_attention(layout, room.view(-1, 1, 1, 1, 1, channels), rows, heads, self._scale)

    def _by_gathering(
        self,
        room: torch.Tensor,
        ids: torch.Tensor,
        seen: _Seen,
        counts: Numbers,
        query: torch.Tensor,
        sinks: torch.Tensor,
    ) -> torch.Tensor:
        """Attends as ``_plan`` does, with plain products, some tokens at a time. Nothing waits for the device."""
        out, width = torch.empty_like(query), ids.shape[1]
        firsts = seen.ids.shape[1] - seen.lengths
        begins, ends = (moved.unsqueeze(1) for moved in to_device([firsts, firsts + counts], self._device))
        column = torch.arange(width, device=self._device)
        together = max(1, GATHERED_NUMBERS // (width * max(query.shape[1:])))
        for begin in range(0, len(query), together):
            some = slice(begin, begin + together)
            hidden = (column < begins[some]) | (column >= ends[some])
            # In place of what a token does not see stands a vector of its own: NaN of others would spread.
            first = ids[some].gather(1, begins[some].long())
            vectors = room[torch.where(hidden, first, ids[some]).long()].float()
            scores = torch.einsum("thc,tkc->thk", query[some].float(), vectors) * self._scale
            scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
            beside = sinks.view(1, -1, 1).expand(len(scores), -1, 1)
            weights = torch.softmax(torch.cat((scores, beside), -1), -1)[..., :-1]
            out[some] = torch.einsum("thk,tkc->thc", weights, vectors).to(out.dtype)
        return out

    def _seeing(self, group: int, window: int, every: int) -> _Seen:
        rows, lows = self._rows[group], [max(0, start - window + 1) for start in self._starts]
        at = np.concatenate(
            [np.arange(start, row.context_len) for start, row in zip(self._starts, rows, strict=True)]
        ).astype(np.int32)
        bases, base = list[int](), 0
        for row, low in zip(rows, lows, strict=True):
            # Where the vector of token 0 would be, if all were there.
            bases += [base - low] * row.new_tokens
            base += row.context_len - low
        (first,) = to_device([np.asarray(bases, np.int32) + at - (window - 1)], self._device)
        ids = first.unsqueeze(1) + torch.arange(window, dtype=torch.int32, device=self._device)
        complete = (at + 1) // every if every else np.zeros_like(at)
        entries = tuple(self._of_entries(row, every) for row in self._rows[0]) if every else ()
        return _Seen(self._slots(group, lows), entries, ids, np.minimum(at + 1, window), complete)

    def _slots(self, group: int, firsts: Sequence[int]) -> Slots:
        """Returns where the vectors of each row's tokens are, from the one of ``firsts`` on."""
        size, blocks, places = self._groups[group].layout.block_size, list[Numbers](), list[Numbers]()
        for row, first in zip(self._rows[group], firsts, strict=True):
            at = np.arange(first, row.context_len)
            table = block_ids(row.blocks, -(-row.context_len // size) - row.first_block)
            blocks.append(table[at // size - row.first_block])
            places.append(at % size)
        return moved_slots(blocks, places, self._device)

    def _of_entries(self, row: AttentionRow, every: int) -> Slots:
        blocks, places = entry_slots(row, np.arange(row.context_len // every), every, self._groups[0].layout.block_size)
        return moved_slots([blocks], [places], self._device)

    def _vectors(self, group: int, layer: int) -> torch.Tensor:
        """Returns the vectors of one layer, ``[num_blocks, block_size, channels]``."""
        return self._groups[group].cache[:, 0, layer, 0]

    def _entries(self, number: int) -> torch.Tensor:
        """Returns the entries of one layer, ``[num_blocks, places, channels]``."""
        group = self._groups[0]
        size = group.layout.block_size
        sizes = [each.in_block(size) * each.channels for each in group.entries]
        first, own = sum(sizes[:number]), group.entries[number]
        own_block = group.cache.flatten(1)[:, first : first + sizes[number]]
        return own_block.view(len(own_block), own.in_block(size), own.channels)


class EntryMaking:
    """Makes the entries of a step, of ``every`` tokens each (``EntriesRecipe``), and the states of those begun.

    A state has, for each part of a token and each channel, the logarithm of the sum of the weights so far and the
    weighted mean. Tokens are added to them one after another, so that no number depends on where a prompt was cut.
    """

    def __init__(
        self,
        kernels: Kernels,
        every: int,
        rows: Sequence[AttentionRow],
        block_size: int,
        runs: RunNumbers,
        device: torch.device,
    ) -> None:
        """``rows`` have the blocks that entries are stored in."""
        self._kernels, self._device = kernels, device
        at = [position for row in rows for position in range(row.context_len - row.new_tokens, row.context_len)]
        # The tokens of one entry in one run, those with the most first.
        spans = sorted(_spans_of(every, at, runs), key=lambda span: span.first - span.end)
        self._plan_spans(every, at, spans, runs)
        self._plan_kept(every, at, spans, runs)
        ended = [np.arange((row.context_len - row.new_tokens) // every, row.context_len // every) for row in rows]
        slots = [entry_slots(row, numbers, every, block_size) for row, numbers in zip(rows, ended, strict=True)]
        self.slots = moved_slots([blocks for blocks, _ in slots], [places for _, places in slots], device)
        """Where the entries that become complete are stored, in the order of their last tokens."""
        self.positions = self._long((np.concatenate(ended) * every).tolist())
        """The positions of their first tokens."""

    def _plan_spans(self, every: int, at: Sequence[int], spans: Sequence[_Span], runs: RunNumbers) -> None:
        """Plans what the sums of spans begin with, and their tokens. Tokens have the positions ``at``."""
        counts = [span.end - span.first for span in spans]
        self._active = [sum(count > step for count in counts) for step in range(counts[0])]
        """How many spans have a token in each step."""
        self._first = self._long([span.first for span in spans])
        self._place = self._long([at[span.first] % every for span in spans])
        begun = [number for number, span in enumerate(spans) if span.begins]
        self._begun = self._long(begun)
        self._sources = self._long([runs.sources[spans[number].run] for number in begun])
        others = [number for number, span in enumerate(spans) if not span.begins]
        before = {span.end: number for number, span in enumerate(spans)}
        self._others = self._long(others)
        self._before = self._long([before[spans[number].first] for number in others])
        done = [number for number, span in enumerate(spans) if (at[span.end - 1] + 1) % every == 0]
        self._done = self._long(sorted(done, key=lambda number: spans[number].end))

    def _plan_kept(self, every: int, at: Sequence[int], spans: Sequence[_Span], runs: RunNumbers) -> None:
        """Plans which states stay: those behind the last tokens of runs, and some before."""
        kept = [(token, block) for token, block in enumerate(runs.kept) if block >= 0]
        kept += [(end - 1, block) for end, block in zip(runs.starts[1:], runs.destinations, strict=True)]
        self._blocks = self._long([block for _, block in kept])
        self._complete = self._long([place for place, (token, _) in enumerate(kept) if (at[token] + 1) % every == 0])
        """The places of those behind the last token of an entry."""
        of_token = {token: number for number, span in enumerate(spans) for token in range(span.first, span.end)}
        by_step: dict[int, list[tuple[int, int]]] = {}
        for place, (token, _) in enumerate(kept):
            number = of_token[token]
            by_step.setdefault(token - spans[number].first, []).append((number, place))
        self._kept = {
            step: (self._long([number for number, _ in pairs]), self._long([place for _, place in pairs]))
            for step, pairs in by_step.items()
        }
        """By the step: the spans whose sums stay behind it, and the places of their states."""

    def __call__(
        self, value: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Returns the entries that become complete, fp32 ``[entries, channels]``, and writes the states.

        ``value`` and ``gate`` are fp32 ``[tokens, parts, channels]``, and ``bias`` is ``[every, parts, channels]``.
        ``states`` is fp32 ``[num_blocks, 1, numbers]``.
        """
        parts, channels = value.shape[1:]
        whole = states[:, 0].view(-1, parts, 2, channels)
        unknown = (self._sources < 0).view(-1, 1, 1, 1)
        source = whole[self._sources.clamp(min=0)].masked_fill(unknown, 0.0)
        source[:, :, 0].masked_fill_(unknown.squeeze(1), EMPTY)
        kept = value.new_empty(len(self._blocks), parts, 2, channels)
        sums = before = value.new_empty(0)
        for part in range(parts):
            sums = value.new_zeros(len(self._first), 2, channels)
            sums[:, 0] = EMPTY
            sums[self._begun] = source[:, part]
            if part:
                sums[self._others] = before[self._before]
            self._add(sums, value[:, part], gate[:, part], bias[:, part], kept[:, part])
            before = sums
        # Behind the last token of an entry, the next one has become the one that is made.
        if parts > 1:
            kept[self._complete, 1] = kept[self._complete, 0]
        empty = torch.zeros_like(kept[:1, 0])
        empty[:, 0] = EMPTY
        kept[self._complete, 0] = empty
        whole[self._blocks] = kept
        return sums[self._done, 1]

    def _add(
        self, sums: torch.Tensor, value: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, kept: torch.Tensor
    ) -> None:
        """Adds tokens to the ``sums`` of their spans, ``[spans, 2, channels]``, and notes those that are ``kept``."""
        for step, active in enumerate(self._active):
            at = self._first[:active] + step
            total, mean = sums[:active, 0], sums[:active, 1]
            weight = gate[at] + bias[self._place[:active] + step]
            apart = weight - total
            share = self._kernels.activated(apart, Activation.SIGMOID, gated=False)
            more = self._kernels.activated(-apart.abs(), Activation.SOFTPLUS, gated=False)
            sums[:active, 1] = mean + share * (value[at] - mean)
            sums[:active, 0] = torch.maximum(total, weight) + more
            if step in self._kept:
                spans, places = self._kept[step]
                kept[places] = sums[spans]

    def _long(self, numbers: Sequence[int]) -> torch.Tensor:
        (moved,) = to_device([numbers], self._device)
        return moved.long()


@dataclass(frozen=True, slots=True)
class _Span:
    """The tokens ``first`` to ``end - 1`` of a step: those of one entry in one run of rows."""

    first: int
    end: int
    run: int
    begins: bool
    """Whether the run begins with it."""


def _spans_of(every: int, at: Sequence[int], runs: RunNumbers) -> Iterator[_Span]:
    """Yields the spans of a step whose tokens have the positions ``at``."""
    for run, (first, end) in enumerate(pairwise(runs.starts)):
        token = first
        while token < end:
            behind = min(end, token + every - at[token] % every)
            yield _Span(token, behind, run, token == first)
            token = behind
