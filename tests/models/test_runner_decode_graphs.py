"""Tests which captured step serves which rows, and what its inputs receive. A replay computes again on the CPU."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.models.backend import CPU
from pdserve.models.runner import DecodeGraphs, DecodeInputs, StepRow, bucket_for, decode_buckets, padded_parts
from tests.models.rerun_graph import RerunGraphs

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40


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
    token_ids, positions, slots, context_lens, starts, blocks = padded_parts(rows, 4, BLOCK_SIZE)
    assert token_ids == [5, 6, 7, 0]
    assert positions == [0, 7, 8, 0]
    assert slots == [40, 21 * 4 + 3, 32 * 4, -1]
    assert context_lens == [1, 8, 9, 0]
    assert blocks == [10, 20, 21, 30, 31, 32]
    assert starts == [0, 1, 3, 0]


def echo(inputs: DecodeInputs) -> torch.Tensor:
    """Returns "logits" that show all that a row received."""
    tables = inputs.tables
    first = tables.blocks[tables.block_starts]
    last = tables.blocks[tables.block_starts + ((tables.context_lens - 1).clamp(0) // BLOCK_SIZE)]
    return torch.stack([inputs.token_ids, inputs.positions, inputs.slots, tables.context_lens, first, last], 1).float()


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
    return DecodeGraphs(echo, graphs, max_rows, MAX_MODEL_LEN, BLOCK_SIZE, CPU), graphs


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
