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


class BlockLife(RuleBasedStateMachine):
    """Every block is in one state, and the manager knows which, whatever the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, block_size=2)
        self.tables: list[list[int]] = []
        self.quarantined: list[int] = []

    @rule(tokens=st.integers(1, 12))
    def allocate(self, tokens: int) -> None:
        table: list[int] = []
        if self.blocks.grow(table, tokens):
            self.tables.append(table)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.tables:
            self.blocks.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule(data=st.data())
    def fail_transfer(self, data: st.DataObject) -> None:
        if self.tables:
            table = self.tables[data.draw(st.integers(0, len(self.tables) - 1))]
            bad = data.draw(st.lists(st.sampled_from(table), unique=True))
            self.blocks.quarantine(bad)
            self.quarantined += bad
            if not self.blocks.replace(table, bad):
                self.tables.remove(table)
                self.blocks.free(table)

    @rule()
    def release(self) -> None:
        self.blocks.end_quarantine(self.quarantined)
        self.quarantined.clear()

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        held = [block for table in self.tables for block in table] + self.quarantined
        assert len(held) == len(set(held))
        assert self.blocks.num_free == 12 - len(held)
        assert self.blocks.num_quarantined == len(self.quarantined)


TestBlockLife = BlockLife.TestCase
TestBlockLife.settings = settings(max_examples=examples(50))
