from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.errors import EngineError
from tests.examples import examples


def test_grow_gives_exactly_the_blocks_that_are_missing() -> None:
    blocks = BlockManager(4, block_size=16)
    table: list[int] = []
    assert blocks.grow(table, 1)
    assert len(table) == 1
    assert blocks.grow(table, 16)
    assert len(table) == 1
    assert blocks.grow(table, 17)
    assert len(table) == 2
    assert blocks.num_free == 2


def test_grow_changes_nothing_when_too_few_are_free() -> None:
    blocks = BlockManager(2, block_size=4)
    table: list[int] = []
    assert not blocks.grow(table, 9)
    assert table == []
    assert blocks.num_free == 2


def test_double_free_is_an_error() -> None:
    blocks = BlockManager(2, block_size=4)
    table: list[int] = []
    blocks.grow(table, 4)
    again = list(table)
    blocks.free(table)
    with pytest.raises(EngineError, match="freed twice"):
        blocks.free(again)


def test_quarantined_blocks_are_not_handed_out() -> None:
    blocks = BlockManager(2, block_size=4)
    table: list[int] = []
    blocks.grow(table, 8)
    quarantined = table[0]
    blocks.quarantine([quarantined])
    blocks.free(table)
    assert blocks.num_free == 1
    assert not blocks.grow([], 8)
    blocks.end_quarantine([quarantined])
    assert blocks.num_free == 2


def test_replace_puts_free_blocks_in_the_places_of_quarantined_ones() -> None:
    blocks = BlockManager(4, block_size=1)
    table: list[int] = []
    blocks.grow(table, 3)
    first, bad, last = table
    blocks.quarantine([bad])
    assert blocks.replace(table, [bad])
    assert [table[0], table[2]] == [first, last]
    assert table[1] not in (first, bad, last)


def test_a_block_that_was_not_quarantined_does_not_leave_quarantine() -> None:
    with pytest.raises(EngineError, match="was not quarantined"):
        BlockManager(1, 1).end_quarantine([0])


def test_a_copy_holds_its_source_until_it_is_taken() -> None:
    blocks = BlockManager(2, block_size=4)
    parent, child = list[int](), list[int]()
    blocks.grow(parent, 4)
    blocks.grow(child, 4)
    (source,), (destination,) = parent, child
    blocks.copy(source, destination)
    blocks.free(parent)
    assert not blocks.grow([], 4), "the source is still to be read"
    assert blocks.take_copies() == {destination: source}
    assert blocks.grow([], 4)


def test_a_copy_ends_with_its_destination() -> None:
    blocks = BlockManager(2, block_size=4)
    parent, child = list[int](), list[int]()
    blocks.grow(parent, 4)
    blocks.grow(child, 4)
    blocks.copy(parent[0], child[0])
    blocks.free(parent)
    blocks.free(child)
    assert blocks.num_free == 2
    assert blocks.take_copies() == {}


def test_nothing_else_may_write_where_a_copy_is_pending() -> None:
    blocks = BlockManager(4, block_size=4)
    parent, child, other = list[int](), list[int](), list[int]()
    for table in (parent, child, other):
        blocks.grow(table, 4)
    free = next(block for block in range(4) if block not in (*parent, *child, *other))
    blocks.copy(parent[0], child[0])
    for source, destination in ((other[0], child[0]), (child[0], other[0]), (free, other[0]), (other[0], free)):
        with pytest.raises(EngineError, match="is to be copied"):
            blocks.copy(source, destination)
    for block in (parent[0], child[0]):
        with pytest.raises(EngineError, match="is quarantined but"):
            blocks.quarantine([block])


class BlockLife(RuleBasedStateMachine):
    """Every block is in one state, and the manager knows which, whatever the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, block_size=2)
        self.tables: list[list[int]] = []
        self.quarantined: list[int] = []
        self.copies: dict[int, int] = {}

    @rule(tokens=st.integers(1, 12))
    def allocate(self, tokens: int) -> None:
        table: list[int] = []
        if self.blocks.grow(table, tokens):
            self.tables.append(table)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.tables:
            self.forget(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    def forget(self, table: list[int]) -> None:
        for block in table:
            self.copies.pop(block, None)
        self.blocks.free(table)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Gives a new table a copy of another one's last block."""
        sources = [table[-1] for table in self.tables if table[-1] not in self.copies]
        table: list[int] = []
        if sources and self.blocks.grow(table, 1):
            self.tables.append(table)
            source = data.draw(st.sampled_from(sources))
            self.blocks.copy(source, table[0])
            self.copies[table[0]] = source

    @rule()
    def make_copies(self) -> None:
        assert self.blocks.take_copies() == self.copies
        self.copies = {}

    @rule(data=st.data())
    def fail_transfer(self, data: st.DataObject) -> None:
        if self.tables:
            table = self.tables[data.draw(st.integers(0, len(self.tables) - 1))]
            copied = {*self.copies, *self.copies.values()}
            bad = [block for block in data.draw(st.lists(st.sampled_from(table), unique=True)) if block not in copied]
            self.blocks.quarantine(bad)
            self.quarantined += bad
            if not self.blocks.replace(table, bad):
                self.tables.remove(table)
                self.forget(table)

    @rule()
    def release(self) -> None:
        self.blocks.end_quarantine(self.quarantined)
        self.quarantined.clear()

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        held = [block for table in self.tables for block in table] + self.quarantined
        assert len(held) == len(set(held))
        assert self.blocks.num_free == 12 - len({*held, *self.copies.values()}), "a copy reads or writes a free block"
        assert self.blocks.num_quarantined == len(self.quarantined)


TestBlockLife = BlockLife.TestCase
TestBlockLife.settings = settings(max_examples=examples(50))
