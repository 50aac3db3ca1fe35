"""Holds the blocks of one context, in every cache group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.wire.cache_groups import GroupBlock

NONE = -1
"""This stands in a table where there is no block."""


@dataclass(frozen=True, slots=True)
class PassingState:
    """A state that the prefix cache can find until newer ones of the same context take its place."""

    blocks: int
    """It stands after so many blocks."""
    block_hash: bytes
    """The hash of the last of these."""
    block: int
    """Where it is. If it is not found there any more, something else may be."""


@dataclass(slots=True)
class StateTable:
    """The blocks of a context in a group that keeps states."""

    present: int = NONE
    """The state after all computed tokens."""
    next: int = NONE
    """The block that the next state is written to: by a step, or by a transfer."""
    drafted: list[int] = field(default_factory=list)
    """The blocks that the states after a step's drafts are written to. Between steps there are none."""
    checkpoint: int = 0
    """The number of blocks after which the last state stands that the prefix cache keeps."""
    passing: list[PassingState] = field(default_factory=list)
    """The states behind that which the prefix cache can find for a while, the newest last."""


class _Ids(list[int]):
    """Ids of blocks by their numbers, of which most changes only append some."""

    __slots__ = ("rearranged",)

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        super().__init__(blocks)
        self.rearranged = 0
        """The number of changes that neither appended ids nor gave the first ones back."""

    def __setitem__(self, place: Any, block: Any) -> None:
        self.rearranged += 1
        super().__setitem__(place, block)

    def clear(self) -> None:
        self.rearranged += 1
        super().clear()


class WindowTable(_Ids):
    """The ids of a context's blocks in a group with a window, by their numbers.

    ``NONE`` is in the place of a block that was given back or never taken.
    """

    __slots__ = ("given_back",)

    def __init__(self, blocks: Sequence[int] = (), given_back: int = 0) -> None:
        """``given_back`` is the number of first places that have no block any more."""
        super().__init__(blocks)
        self.given_back = given_back
        """So many first places have been without a block since ``give_back``, and stay so."""

    def give_back(self, end: int) -> list[int]:
        """Leaves the places before ``end`` without blocks, and returns those that were there."""
        first = self.given_back
        if end <= first:
            return []
        blocks = self[first:end]
        list.__setitem__(self, slice(first, end), [NONE] * len(blocks))
        self.given_back = end
        return [block for block in blocks if block != NONE]


class BlockTable(_Ids):
    """The ids of a context's blocks in group 0, by their numbers, with those of the other groups in ``others``.

    A context has blocks in the other groups once it has taken some there.
    """

    __slots__ = ("_windows", "has_gaps", "has_states", "others")

    def __init__(self, blocks: Sequence[int] = ()) -> None:
        super().__init__(blocks)
        self.open([])
        self.has_gaps = False
        """Whether blocks of a window may be missing before the last one: a transfer was to bring that, or will."""

    def open(self, others: list[WindowTable | StateTable]) -> None:
        """Gives the context a table for each of the other groups, in place of those that it had."""
        self.others = others
        self.has_states = any(isinstance(held, StateTable) for held in others)
        """Whether a group keeps states of the context."""
        self._windows = [held for held in others if isinstance(held, WindowTable)]

    @property
    def checkpoint(self) -> int:
        """The number of blocks after which the last state stands that the prefix cache keeps."""
        return next((held.checkpoint for held in self.others if isinstance(held, StateTable)), 0)

    @property
    def last_state(self) -> int:
        """The number of blocks after which the last state stands that the prefix cache can find."""
        passing = (held.passing[-1].blocks for held in self.others if isinstance(held, StateTable) and held.passing)
        return max(self.checkpoint, next(passing, 0))

    def bounded_blocks(self) -> Iterator[int]:
        """Yields the blocks of the groups behind group 0, the last one of each first."""
        for held in self.others:
            blocks = (*held.drafted, held.next, held.present) if isinstance(held, StateTable) else reversed(held)
            yield from (block for block in blocks if block != NONE)

    def num_bounded(self) -> list[int]:
        """Returns the number of blocks in each group behind group 0 between steps.

        The list is empty if there are none in any.
        """
        return [
            (held.next != NONE) + (held.present != NONE)
            if isinstance(held, StateTable)
            else len(held) - held.count(NONE)
            for held in self.others
        ]

    def every_block(self) -> Iterator[int]:
        """Yields the blocks of all groups."""
        yield from self
        yield from self.bounded_blocks()

    def row_tables(self, number: int = 0) -> Sequence[Sequence[int]]:
        """Returns what ``StepRow.others`` is of the context's row with this number in the next step.

        A row goes on with the state that the row before it leaves: in the same block, which only the last of them
        keeps, or, of drafts, in one of its own. Of windows alone, the result is the same for all rows.
        """
        if not self.has_states:
            return self._windows
        return tuple([_states_of(held, number) if isinstance(held, StateTable) else held for held in self.others])

    def blocks_of(self, moved: Sequence[GroupBlock]) -> tuple[int, ...]:
        """Returns the ids of these blocks. That of a state is the one to be written, or else the present one."""
        return tuple(map(self._block_of, moved))

    def _block_of(self, block: GroupBlock) -> int:
        if not block.group:
            return self[block.number]
        held = self.others[block.group - 1]
        if isinstance(held, StateTable):
            return held.next if held.next != NONE else held.present
        return held[block.number]


def _states_of(held: StateTable, number: int) -> tuple[int, int]:
    """Returns the state that a row begins with, and the one that it leaves."""
    if not number:
        return held.present, held.next
    left = (held.next, *held.drafted)
    return left[min(number, len(left)) - 1], left[min(number, len(left) - 1)]
