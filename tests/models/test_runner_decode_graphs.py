"""Tests which captured step serves which rows, and what its inputs receive. A replay computes again on the CPU."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.kv_cache.block_table import BlockTable, WindowTable
from pdserve.models.backend import CPU
from pdserve.models.rank_cache import KvGroup, StateGroup
from pdserve.models.runner import (
    DecodeGraphs,
    DecodeInputs,
    GroupTables,
    StepRow,
    bucket_for,
    decode_buckets,
    padded_parts,
)
from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep
from pdserve_kernels.kv_layout import KvLayout
from tests.models.rerun_graph import RerunGraphs

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
WINDOW = 6
LAYOUT = KvLayout(1, 1, BLOCK_SIZE, 8, torch.float32)


def kv_group(number: int, first: int, keep: Keep, window: int = 0) -> KvGroup:
    blocks = GroupBlocks(GroupSpec(f"group {number}", keep, 1, 1, 64, "fp32", window), first, 1000, 0, 64)
    return KvGroup(number, blocks, LAYOUT, torch.zeros(0), 1)


WHOLE = kv_group(0, 0, Keep.ALL)


def test_buckets() -> None:
    assert decode_buckets(1) == [1]
    assert decode_buckets(7) == [1, 2, 4, 7]
    assert decode_buckets(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert decode_buckets(300)[-4:] == [128, 192, 256, 300]


@given(st.integers(1, 2000), st.integers(1, 2100))
def test_the_bucket_is_the_smallest_that_fits(max_rows: int, rows: int) -> None:
    buckets = decode_buckets(max_rows)
    assert buckets == sorted(set(buckets))
    bucket = bucket_for(rows, buckets)
    if rows > max_rows:
        assert bucket is None
    else:
        assert bucket == min(size for size in buckets if size >= rows)
        assert bucket <= max(8, rows + 64)


def step_row(token: int, start: int, first_block: int) -> StepRow:
    # A block table is longer than the context if blocks were reserved ahead.
    return StepRow([token], start, list(range(first_block, first_block + start // BLOCK_SIZE + 2)), True)


def test_rows_are_padded_with_rows_that_store_and_read_nothing() -> None:
    rows = [step_row(5, 0, 10), step_row(6, 7, 20), step_row(7, 8, 30)]
    parts = [list(part) for part in padded_parts(rows, 4, [GroupTables(WHOLE)], [])]
    token_ids, positions, context_lens, slots, starts, blocks = parts
    assert token_ids == [5, 6, 7, 0]
    assert positions == [0, 7, 8, 0]
    assert slots == [40, 21 * 4 + 3, 32 * 4, -1]
    assert context_lens == [1, 8, 9, 0]
    assert starts[3] == 0
    tables = [blocks[start : start + count] for start, count in zip(starts, (1, 2, 3), strict=False)]
    assert tables == [[10], [20, 21], [30, 31, 32]]


def echo(inputs: DecodeInputs) -> torch.Tensor:
    """Returns "logits" that show all that a row received."""
    (own,) = inputs.attention
    tables = own.tables
    first = tables.blocks[tables.block_starts]
    last = tables.blocks[tables.block_starts + ((tables.context_lens - 1).clamp(0) // BLOCK_SIZE)]
    return torch.stack([inputs.token_ids, inputs.positions, own.slots, tables.context_lens, first, last], 1).float()


def wanted(row: StepRow) -> list[float]:
    last = row.block_table[row.start // BLOCK_SIZE]
    return [
        row.token_ids[0],
        row.start,
        last * BLOCK_SIZE + row.start % BLOCK_SIZE,
        row.context_len,
        row.block_table[0],
        last,
    ]


def make_graphs(max_rows: int) -> tuple[DecodeGraphs, RerunGraphs]:
    graphs = RerunGraphs()
    return DecodeGraphs(echo, graphs, max_rows, MAX_MODEL_LEN, [WHOLE], [], CPU), graphs


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 99), st.integers(0, MAX_MODEL_LEN - 1), st.integers(0, 99)), min_size=1, max_size=9
        ),
        max_size=4,
    )
)
def test_every_replay_sees_its_own_rows(steps: list[list[tuple[int, int, int]]]) -> None:
    graphs, _ = make_graphs(9)
    for step in steps:
        rows = [step_row(token, start, block) for token, start, block in step]
        logits = graphs.run(rows)
        assert logits is not None
        assert logits.tolist() == [wanted(row) for row in rows]


def test_a_full_batch_of_the_longest_contexts_fits_the_inputs() -> None:
    graphs, _ = make_graphs(9)
    rows = [step_row(1, MAX_MODEL_LEN - 1, 100 * i) for i in range(9)]
    logits = graphs.run(rows)
    assert logits is not None
    assert logits.tolist() == [wanted(row) for row in rows]


def test_one_graph_a_bucket_largest_first_and_only_the_fitting_one_is_replayed() -> None:
    graphs, made = make_graphs(8)
    assert len(made.made) == 4
    graphs.run([step_row(1, 3, 0)] * 3)
    assert [graph.replays for graph in made.made] == [0, 1, 0, 0]


def test_other_steps_are_left_to_the_caller() -> None:
    graphs, made = make_graphs(2)
    assert graphs.run([step_row(1, 3, 0)] * 3) is None
    assert graphs.run([step_row(1, 3, 0), StepRow([1, 2], 0, [5], True)]) is None
    assert sum(graph.replays for graph in made.made) == 0


WINDOWED = kv_group(1, 1000, Keep.WINDOW, WINDOW)
STATES = StateGroup(2, GroupBlocks(GroupSpec("state", Keep.LATEST, 1, 1, 4, "fp32"), 2000, 50, 0, 4), ())
NO_BLOCK = -1


def hybrid_row(token: int, start: int, first_block: int, states: tuple[int, int]) -> StepRow:
    """Returns a row of a model with whole contexts, a window, and a state."""
    row = step_row(token, start, first_block)
    seen = WINDOWED.blocks.spec.needed(start, BLOCK_SIZE).start
    window = [NO_BLOCK if number < seen else 1000 + block for number, block in enumerate(row.block_table)]
    return StepRow([token], start, row.block_table, True, others=(window, states))


class Context:
    """A request that decodes: its next position, and its blocks of whole contexts and of a window."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self.position = 0
        self.table, self.window = BlockTable(), WindowTable()
        self.go_on(chance.randint(0, 60))

    def go_on(self, tokens: int) -> None:
        self.position += tokens
        while len(self.table) * BLOCK_SIZE <= self.position:
            self.table.append(self._chance.randrange(1000))
            self.window.append(1000 + self._chance.randrange(1000))
        self.window.give_back(WINDOWED.blocks.spec.needed(self.position, BLOCK_SIZE).start)

    def change(self) -> None:
        match self._chance.randint(0, 9):
            case 0:  # a block was replaced
                self.table[self._chance.randrange(len(self.table))] = self._chance.randrange(1000)
                self.window[-1] = 1000 + self._chance.randrange(1000)
            case 1:  # the request was preempted
                self.position = 0
                self.table.clear()
                self.window = WindowTable()
                self.go_on(self._chance.randint(0, 60))
            case _:
                self.go_on(self._chance.choice((0, 1, 5, 40)))

    @property
    def row(self) -> StepRow:
        return StepRow([1], self.position, self.table, True, others=[self.window])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("group", [WHOLE, WINDOWED])
def test_tables_that_go_on_from_step_to_step_are_those_of_each_step(group: KvGroup, seed: int) -> None:
    chance = Random(seed)
    contexts, tables, first = [Context(chance) for _ in range(5)], GroupTables(group), group.blocks.first
    last, steps_without_layout = None, 0
    for _ in range(200):
        for context in contexts:
            if chance.random() < 0.02:
                context.change()
            else:
                context.go_on(1)
        if chance.random() < 0.02:
            contexts[chance.randrange(5)] = Context(chance)
            chance.shuffle(contexts)
        rows = [context.row for context in contexts[: chance.choice((5,) * 20 + (1, 4))]]
        positions = np.array([row.start for row in rows] + [0], np.int32)
        (slots, starts), ids = tables.parts(rows, positions)
        steps_without_layout += ids is last
        last = ids
        for row, slot, start in zip(rows, slots, starts, strict=False):
            seen = group.blocks.spec.needed(row.start, BLOCK_SIZE).start
            count = row.start // BLOCK_SIZE + 1
            own = [block - first for block in row.table(group.number)[seen:count]]
            assert ids[start + seen : start + count].tolist() == own
            assert slot == own[-1] * BLOCK_SIZE + row.start % BLOCK_SIZE
        assert (slots[-1], starts[-1]) == (-1, 0)
    assert steps_without_layout > 60


def seen_by(inputs: DecodeInputs) -> torch.Tensor:
    """Returns "logits" that show what a row received of its window and of its states."""
    window, states = inputs.attention[1], inputs.states[0]
    tables = window.tables
    last = tables.context_lens - 1
    first = (tables.context_lens - WINDOW).clamp(0) // BLOCK_SIZE
    # A row of padding has no table.
    blocks = [tables.blocks[(tables.block_starts + at).clamp(0)] for at in (first, last.clamp(0) // BLOCK_SIZE)]
    assert states.single
    assert states.starts.tolist() == list(range(len(inputs.token_ids) + 1))
    return torch.stack([window.slots, *blocks, states.sources, states.destinations], 1).float()


def test_a_replay_sees_the_windows_and_the_states_of_its_rows() -> None:
    made = RerunGraphs()
    graphs = DecodeGraphs(seen_by, made, 9, MAX_MODEL_LEN, [WHOLE, WINDOWED], [STATES], CPU)
    rows = [
        hybrid_row(5 + i, start, 20 * i, (1999 + i if i else -1, 2010 + i)) for i, start in enumerate((0, 5, 39, 12))
    ]
    logits = graphs.run(rows)
    assert logits is not None
    for i, (row, found) in enumerate(zip(rows, logits.tolist(), strict=True)):
        table = row.block_table
        newest, oldest = table[row.start // BLOCK_SIZE], table[max(0, row.start - WINDOW + 1) // BLOCK_SIZE]
        assert found == [newest * BLOCK_SIZE + row.start % BLOCK_SIZE, oldest, newest, i - 1, 10 + i]
    padded = padded_parts(rows, 6, [GroupTables(WHOLE), GroupTables(WINDOWED)], [STATES])
    assert [list(part[4:]) for part in padded[3:9]] == [[-1, -1], [0, 0], [-1, -1], [0, 0], [-1, -1], [-1, -1]]


def test_rows_that_go_on_with_each_others_state_are_left_to_the_caller() -> None:
    graphs = DecodeGraphs(seen_by, RerunGraphs(), 4, MAX_MODEL_LEN, [WHOLE, WINDOWED], [STATES], CPU)
    for left in (2001, 2002):
        assert graphs.run([hybrid_row(5, 3, 0, (2000, 2001)), hybrid_row(6, 4, 0, (2001, left))]) is None


def runs_seen(inputs: DecodeInputs) -> torch.Tensor:
    """Returns "logits" that show the run of each row, and what stays of it."""
    (states,) = inputs.states
    if states.single:
        assert states.kept is None
        return torch.zeros(len(inputs.token_ids), 5)
    assert states.kept is not None
    assert (states.starts[1:] >= states.starts[:-1]).all()
    tokens = torch.arange(len(inputs.token_ids))
    run = torch.searchsorted(states.starts, tokens, right=True) - 1
    own = [states.starts[run], states.sources[run], states.destinations[run], states.kept]
    return torch.stack([inputs.token_ids, *own], 1).float()


def test_rows_that_go_on_with_each_others_state_have_steps_of_their_own_where_these_are_captured() -> None:
    made = RerunGraphs()
    graphs = DecodeGraphs(runs_seen, made, 8, MAX_MODEL_LEN, [WHOLE, WINDOWED], [STATES], CPU, linked=True)
    assert len(made.made) == 2 * 4
    chain = [(2000, 2001), (2001, 2002), (2002, 2003)]
    rows = [hybrid_row(5, 9, 0, (2010, 2010))]
    rows += [hybrid_row(6 + at, 3 + at, 20, states) for at, states in enumerate(chain)]
    rows += [hybrid_row(20, 0, 40, (-1, 2020))]
    for _ in range(2):
        logits = graphs.run(rows)
        assert logits is not None
        assert logits.tolist() == [
            [5, 0, 10, 10, -1],
            *([6 + at, 1, 0, 3, kept] for at, kept in enumerate((1, 2, -1))),
            [20, 4, -1, 20, -1],
        ]
        # Steps without drafts, between them, have graphs of their own.
        assert graphs.run(rows[:1]) is not None
    assert [graph.replays for graph in made.made if graph.replays] == [2, 2]


def test_tables_of_a_window_take_no_more_than_the_window() -> None:
    assert WHOLE.most_blocks(MAX_MODEL_LEN) == MAX_MODEL_LEN // BLOCK_SIZE
    assert WINDOWED.most_blocks(MAX_MODEL_LEN) == 3
    assert (
        max(
            len(WINDOWED.held(range(1000, 1100), start)[0][: start // 4 + 1 - WINDOWED.held([], start)[1]])
            for start in range(80)
        )
        <= 3
    )
