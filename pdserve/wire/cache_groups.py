"""Cache groups: sets of layers with one block layout and one rule of what is kept of a context.

Every model has group 0, which keeps all blocks; it may have no layers, and then its blocks have no bytes. The blocks of
every group are counted by the same token positions: block ``i`` covers tokens ``i * block_size`` to ``(i + 1) *
block_size``. A block id is a number of one engine, and no two groups of it have an id in common.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


class Keep(enum.Enum):
    """What a group keeps of a context."""

    ALL = "all"
    """Every block."""
    WINDOW = "window"
    """The blocks that the last ``window`` tokens touch."""
    LATEST = "latest"
    """One block: the state after all tokens so far. A step reads one block and writes another, so that a state which
    was written never changes."""


def needed_blocks(keep: Keep, window: int, tokens: int, block_size: int) -> range:
    """Returns the numbers of the blocks of a group that the token after the first ``tokens`` needs.

    The range of a ``LATEST`` group is empty: its state has no number.
    """
    end = -(-tokens // block_size)
    match keep:
        case Keep.ALL:
            return range(end)
        case Keep.WINDOW:
            return range(min(end, max(0, tokens - window + 1) // block_size), end)
        case Keep.LATEST:
            return range(0)


class GroupSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What two engines compare of a group before they exchange its blocks."""

    name: str
    keep: Keep
    layers: int
    heads: int
    """The heads of a block on all ranks together, each of which is one run of bytes; 0 if every rank has the whole."""
    head_bytes: int
    """The bytes of one head of a block over all layers of the group, or of the whole block if ``heads`` is 0."""
    dtype: str
    window: int = 0
    """A token sees itself and at most ``window - 1`` tokens before it; 0 if the group has no window."""

    def needed(self, tokens: int, block_size: int) -> range:
        """Returns ``needed_blocks`` of this group."""
        return needed_blocks(self.keep, self.window, tokens, block_size)


def context_blocks(keep: Keep, window: int, tokens: int, block_size: int) -> int:
    """Returns how many blocks of a group a context of up to ``tokens`` tokens holds at most between two steps."""
    blocks = -(-tokens // block_size)
    match keep:
        case Keep.ALL:
            return blocks
        case Keep.WINDOW:
            return min(blocks, -(-window // block_size) + 2)
        case Keep.LATEST:
            return 2 if tokens else 0


def split_heads(specs: Sequence[GroupSpec]) -> tuple[int, ...]:
    """Returns for each group the heads by which ranks split its blocks; 0 if they do not, or if there are no bytes."""
    return tuple(spec.heads if spec.head_bytes else 0 for spec in specs)


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """One group's blocks in the memory of one rank."""

    spec: GroupSpec
    first: int
    """The id of its first block. The other ids follow."""
    count: int
    start: int
    """The byte of the cache's memory at which the first block begins."""
    block_bytes: int
    """The bytes of one block on this rank."""

    @property
    def ids(self) -> range:
        return range(self.first, self.first + self.count)

    def place(self, block_id: int) -> int:
        """Returns the byte of the cache's memory at which a block of this group begins."""
        return self.start + (block_id - self.first) * self.block_bytes


ALIGNMENT = 4096
"""Each group's blocks begin at a multiple of so many bytes."""


def laid_out(
    specs: Sequence[GroupSpec], counts: Sequence[int], block_bytes: Sequence[int]
) -> tuple[tuple[GroupBlocks, ...], int]:
    """Returns where the groups' blocks are in one rank's memory, one group after another, and the bytes of them all.

    ``counts`` and ``block_bytes`` have one number for each group: its blocks, and the bytes of one on this rank.
    """
    groups: list[GroupBlocks] = []
    first = end = 0
    for spec, count, size in zip(specs, counts, block_bytes, strict=True):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        groups.append(GroupBlocks(spec, first, count, start, size))
        first, end = first + count, start + count * size
    return tuple(groups), end


@dataclass(frozen=True, slots=True)
class GroupBlock:
    """A block of a context: its group, and its number among the blocks of the context (0 for a state)."""

    group: int
    number: int


def moved_blocks(
    specs: Sequence[GroupSpec], block_size: int, first_block: int, num_tokens: int
) -> tuple[GroupBlock, ...]:
    """Returns the blocks that move to a node which has the first ``first_block`` blocks of ``num_tokens`` tokens.

    Both nodes compute the same list. Blocks come in the order in which a prompt makes them final; states come last.
    Groups without bytes have none.
    """
    moved = [
        GroupBlock(group, number)
        for group, spec in enumerate(specs)
        if spec.head_bytes
        for number in spec.needed(num_tokens, block_size)
        if number >= first_block
    ]
    moved.sort(key=lambda block: (block.number, block.group))
    states = [GroupBlock(group, 0) for group, spec in enumerate(specs) if spec.keep is Keep.LATEST and spec.head_bytes]
    return (*moved, *states)
