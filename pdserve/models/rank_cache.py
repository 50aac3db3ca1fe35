"""Keeps one rank's cache: the blocks of all groups of layers, one group after another in one run of memory.

``StepCache`` is what the layers of one step read and write of it.

Block ids are those of the engine, in which no two groups have one in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from pdserve.config import Dtype, KvCacheDtype
from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.checkpoint.weight_form import cache_item_bytes
from pdserve.models.layer_groups import STATE_BYTES, Entries, GroupSize, LayerGroup, layer_groups, row_bytes
from pdserve.models.tp.shares import ALONE, TpGroup, kv_share, share
from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep, laid_out
from pdserve_kernels.contract import Attention, StateRuns
from pdserve_kernels.host_copies import to_device
from pdserve_kernels.kv_layout import KvLayout, StateLayout

if TYPE_CHECKING:
    from pdserve.models.block_plan import BlockStep, HeadBlockStep
    from pdserve.models.latent_plan import LatentStep
    from pdserve.models.shared_plan import SharedStep

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32}


AUTO = KvCacheDtype.AUTO


def _kv_layout(group: LayerGroup, dtype: Dtype, block_size: int, tp: TpGroup, kv_dtype: KvCacheDtype) -> KvLayout:
    if not group.layers:
        # A model of states only has no heads that ranks would split.
        return KvLayout(1, 0, block_size, 1, TORCH_DTYPES[dtype])
    mine = kv_share(tp, group.queries, group.heads)
    held = mine.stop - mine.start
    shared, fp8 = group.shared_channels, kv_dtype is KvCacheDtype.FP8
    channels = group.channels(block_size)
    shared = channels if group.entries else shared
    layers = group.stored_layers(block_size)
    return KvLayout(held, layers, block_size, channels, TORCH_DTYPES[dtype], shared, fp8)


def _queries(group: LayerGroup, tp: TpGroup) -> int:
    """Returns the query heads of the group's layers on this rank."""
    mine = share(tp, group.queries, "attention heads")
    count: int = mine.stop - mine.start
    return count


def _state_layout(group: LayerGroup, tp: TpGroup) -> StateLayout:
    mine = share(tp, group.heads, "heads of a state") if group.heads else slice(0, 1)
    return StateLayout(mine.stop - mine.start, group.layers, group.numbers)


def compared_dtype(dtype: Dtype, kv_dtype: KvCacheDtype) -> str:
    """Returns ``EngineSpec.dtype``: ``bf16``, or ``bf16, KV cache fp8``."""
    return dtype.short if kv_dtype is AUTO else f"{dtype.short}, KV cache {kv_dtype.value}"


def group_specs(
    config: DecoderConfig, dtype: Dtype, block_size: int, kv_dtype: KvCacheDtype = AUTO
) -> tuple[GroupSpec, ...]:
    """Returns what two engines compare of the model's groups."""
    return tuple(_spec(group, dtype, block_size, kv_dtype) for group in layer_groups(config).groups)


def compared_groups(
    config: DecoderConfig, dtype: Dtype, block_size: int, kv_dtype: KvCacheDtype = AUTO
) -> tuple[GroupSpec, ...]:
    """Returns ``EngineSpec.groups``: none for a model of one group, which the other fields of the spec describe."""
    specs = group_specs(config, dtype, block_size, kv_dtype)
    return specs if len(specs) > 1 else ()


def _spec(group: LayerGroup, dtype: Dtype, block_size: int, kv_dtype: KvCacheDtype) -> GroupSpec:
    numbers, name = group.layers * group.numbers * STATE_BYTES, Dtype.FP32.short
    if group.keep is not Keep.LATEST:
        row = row_bytes(group.channels(block_size), cache_item_bytes(dtype, kv_dtype))
        numbers = group.stored_layers(block_size) * group.stored * block_size * row
        name = dtype.short if kv_dtype is AUTO else kv_dtype.value
    return GroupSpec(group.name, group.keep, group.layers, group.heads, numbers, name, group.window)


def rank_layouts(
    config: DecoderConfig, dtype: Dtype, block_size: int, tp: TpGroup = ALONE, kv_dtype: KvCacheDtype = AUTO
) -> tuple[KvLayout | StateLayout, ...]:
    """Returns the layout of each group on one rank. Raises ModelError if a group cannot be split over the ranks."""
    return tuple(
        _state_layout(group, tp) if group.keep is Keep.LATEST else _kv_layout(group, dtype, block_size, tp, kv_dtype)
        for group in layer_groups(config).groups
    )


def rank_sizes(
    config: DecoderConfig, dtype: Dtype, block_size: int, tp: TpGroup = ALONE, kv_dtype: KvCacheDtype = AUTO
) -> tuple[GroupSize, ...]:
    """Returns what the groups take on one rank. Raises ModelError if a group cannot be split over the ranks."""
    layouts = rank_layouts(config, dtype, block_size, tp, kv_dtype)
    groups = layer_groups(config).groups
    return tuple(
        GroupSize(group.keep, layout.block_bytes, group.window) for group, layout in zip(groups, layouts, strict=True)
    )


def cache_place(
    config: DecoderConfig,
    dtype: Dtype,
    block_size: int,
    counts: Sequence[int],
    tp: TpGroup = ALONE,
    kv_dtype: KvCacheDtype = AUTO,
) -> tuple[tuple[GroupBlocks, ...], int]:
    """Returns where one rank's cache has ``counts`` blocks of each group, and its bytes.

    Raises ModelError if a group cannot be split over the ranks.
    """
    layouts = rank_layouts(config, dtype, block_size, tp, kv_dtype)
    return laid_out(
        group_specs(config, dtype, block_size, kv_dtype), counts, [layout.block_bytes for layout in layouts]
    )


@dataclass(frozen=True, slots=True)
class KvGroup:
    """The keys and values of one group with layers on this rank."""

    number: int
    """Its number among all groups."""
    blocks: GroupBlocks
    layout: KvLayout
    cache: torch.Tensor
    heads: int
    """The query heads of its layers on this rank."""
    entries: tuple[Entries, ...] = ()
    """As in ``LayerGroup``."""
    beside: tuple[Entries, ...] = ()
    """As in ``LayerGroup``."""

    def held(self, table: Sequence[int], start: int) -> tuple[Sequence[int], int]:
        """Returns the places in ``cache`` of the blocks that a row from token ``start`` on reads and writes.

        ``table`` has the ids of the row's blocks. The second result is the number of the first block that is returned.
        """
        if self.number == 0:
            return table, 0
        first, begin = self.blocks.first, self.blocks.spec.needed(start, self.layout.block_size).start
        return [block - first for block in table[begin:]], begin

    def begins(self, starts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """Returns the number of the first block that ``held`` returns for each of ``starts``; None for group 0."""
        if self.number == 0:
            return None
        # Without a window, no token is before what is seen.
        window = self.blocks.spec.window or np.iinfo(np.int32).max
        begins: npt.NDArray[np.int32] = np.maximum(starts - (window - 1), 0) // self.layout.block_size
        return begins

    def most_blocks(self, tokens: int) -> int:
        """Returns the most blocks that a single token reads and writes in a context of up to ``tokens``."""
        most, window = -(-tokens // self.layout.block_size), self.blocks.spec.window
        # The blocks of a window may begin and end in the middle.
        return min(most, window // self.layout.block_size + 2) if window else most


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The states of one group on this rank."""

    number: int
    """Its number among all groups."""
    blocks: GroupBlocks
    layers: tuple[torch.Tensor, ...]
    """The states of each layer, fp32 ``[num_blocks, heads, numbers]``."""

    def places(self, table: Sequence[int]) -> tuple[int, int]:
        """Returns the places in ``layers`` of a row's states; -1 if it has none to begin with.

        ``table`` has the ids of both. Raises ValueError if one is another group's.
        """
        source, destination = table
        first = self.blocks.first
        end = first + self.blocks.count
        if not first <= destination < end or not (source == -1 or first <= source < end):
            raise ValueError(f"a row has the states {source} and {destination}, and this group has {self.blocks.ids}")
        return source - first if source >= 0 else -1, destination - first


class RankCache:
    """The cache of one rank."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: Dtype,
        block_size: int,
        counts: Sequence[int],
        tp: TpGroup,
        device: torch.device,
        memory: memoryview | None = None,
        kv_dtype: KvCacheDtype = AUTO,
    ) -> None:
        """Takes the memory for ``counts`` blocks of each group: ``memory``, zeroed and of their bytes, or its own.

        Raises ModelError if the heads of a group cannot be split over the ranks.
        """
        layouts = rank_layouts(config, dtype, block_size, tp, kv_dtype)
        if len(counts) != len(layouts):
            raise ValueError(f"{len(counts)} numbers of blocks for {len(layouts)} groups")
        self.groups, nbytes = cache_place(config, dtype, block_size, counts, tp, kv_dtype)
        if memory is None:
            self.memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        else:
            self.memory = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
        self._views = [
            layout.view(self.memory[group.start : group.start + group.count * group.block_bytes], group.count)
            for layout, group in zip(layouts, self.groups, strict=True)
        ]
        assert isinstance(layouts[0], KvLayout)
        self.layout = layouts[0]
        self.whole = self._views[0]
        """The blocks of the first group, which keeps whole contexts."""
        parts = list(enumerate(zip(layouts, self.groups, self._views, strict=True)))
        of_model = layer_groups(config).groups
        self.attention = [
            KvGroup(number, group, layout, view, _queries(own := of_model[number], tp), own.entries, own.beside)
            for number, (layout, group, view) in parts
            if isinstance(layout, KvLayout) and layout.num_layers
        ]
        self.states = [
            StateGroup(number, group, view.unbind(2))
            for number, (layout, group, view) in parts
            if isinstance(layout, StateLayout)
        ]

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole blocks. All sources are read before any destination is written.

        Raises ValueError if a block would be copied into another group.
        """
        for view, first, places in self._by_group(sources):
            targets = [destinations[place] - first for place in places]
            if not 0 <= min(targets) <= max(targets) < len(view):
                raise ValueError("a block cannot be copied into another group")
            copied = view.index_select(0, self._index([sources[place] - first for place in places]))
            view.index_copy_(0, self._index(targets), copied)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes these blocks."""
        for view, first, places in self._by_group(blocks):
            view.index_fill_(0, self._index([blocks[place] - first for place in places]), 0)

    def _by_group(self, ids: Sequence[int]) -> Iterator[tuple[torch.Tensor, int, Sequence[int]]]:
        """Yields each group that has some of these blocks: its tensor, its first id, and the places of its ids."""
        if len(self.groups) == 1:
            if ids:
                yield self.whole, 0, range(len(ids))
            return
        for group, view in zip(self.groups, self._views, strict=True):
            if group.block_bytes and (places := [place for place, block in enumerate(ids) if block in group.ids]):
                yield view, group.first, places

    def _index(self, places: Sequence[int]) -> torch.Tensor:
        """Returns indices on the device. To index by a list would wait until the GPU has done all that is queued."""
        (moved,) = to_device([places], self.memory.device)
        return moved.long()


@dataclass(frozen=True, slots=True)
class RunNumbers:
    """The numbers of ``StateRuns``, on the host."""

    starts: list[int]
    sources: list[int]
    destinations: list[int]
    kept: list[int]
    """One for each token; empty if no state is kept."""
    single: bool

    def padded(self, tokens: int) -> list[list[int]]:
        """Returns sources, destinations, starts, and what is kept, of as many runs as ``tokens``.

        The tokens behind the last run are padding, of which each is a run. The runs that are left have no tokens.
        """
        end, count = self.starts[-1], len(self.sources)
        nowhere = [-1] * (tokens - count)
        starts = [*self.starts, *range(end + 1, tokens + 1)]
        starts += [tokens] * (tokens + 1 - len(starts))
        kept = self.kept or [-1] * end
        return [self.sources + nowhere, self.destinations + nowhere, starts, kept + [-1] * (tokens - end)]


def run_numbers(lengths: Sequence[int], tables: Sequence[Sequence[int]], group: StateGroup) -> RunNumbers:
    """Returns the runs of rows of ``lengths`` tokens, whose ``tables`` are the ids (source, destination) of states.

    Rows that go on with the state which the row before them writes are of the same run. That state stays if they write
    another block. Raises ValueError if a row names a block of another group, or one of which something else is kept.
    """
    starts, sources, destinations, kept = [0], list[int](), list[int](), dict[int, int]()
    end, single = 0, True
    for length, table in zip(lengths, tables, strict=True):
        source, destination = group.places(table)
        begin, end = end, end + length
        single = single and length == 1
        if destinations and source == destinations[-1]:
            if destination != source:
                kept[source] = begin - 1
                destinations[-1] = destination
            if destination in kept or sources[-1] in kept:
                raise ValueError(f"a row writes the state {table[1]}, where that of an earlier row has to stay")
            starts[-1], single = end, False
            continue
        starts.append(end)
        sources.append(source)
        destinations.append(destination)
    places = [-1] * (end if kept else 0)
    for block, token in kept.items():
        places[token] = block
    return RunNumbers(starts, sources, destinations, places, single)


def state_runs(
    lengths: Sequence[int], tables: Sequence[Sequence[int]], group: StateGroup, device: torch.device
) -> StateRuns:
    """Returns what ``run_numbers`` does, on the device. Raises ValueError as that does."""
    return on_device(run_numbers(lengths, tables, group), device)


def on_device(runs: RunNumbers, device: torch.device) -> StateRuns:
    """Returns the same runs with their numbers on the device."""
    starts, sources, destinations, kept = to_device([runs.starts, runs.sources, runs.destinations, runs.kept], device)
    return StateRuns(starts, sources, destinations, runs.single, kept if runs.kept else None)


@dataclass(frozen=True, slots=True)
class StepStates:
    """One group's states in one step."""

    layers: Sequence[torch.Tensor]
    """The states of each layer of the group, fp32 ``[num_blocks, heads, numbers]``."""
    runs: StateRuns


@dataclass(frozen=True, slots=True)
class StepCache:
    """The cache as one step uses it."""

    attention: Sequence[Attention]
    """The attention of each group of keys and values that has layers, in the order of the groups."""
    states: Sequence[StepStates] = ()
    """Each group of states, in the order of the groups."""
    latents: Sequence[LatentStep] = ()
    """Latent attention of each group, in place of ``attention``, for a model that has it."""
    shared: SharedStep | None = None
    """Attention to one vector of a token and to entries, in place of ``attention``, for a model that has it."""
    blocks: BlockStep | None = None
    """Attention to chosen blocks, in place of ``attention``, for a model that has it."""
    head_blocks: HeadBlockStep | None = None
    """Attention to chosen blocks, and to whole contexts, in place of ``attention``, for a model that has both."""
