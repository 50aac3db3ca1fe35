"""Turns one step's rows into the tensors that the attention kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pdserve_kernels.contract import AttentionRow, DecodeTables
from pdserve_kernels.host_copies import block_ids, joined, to_device


@dataclass(frozen=True, slots=True)
class SpanTables:
    """Rows with several new tokens, and the tiles of ``tile_size`` tokens that programs take of them, as int32 tensors.

    Tile ``j`` begins at new token ``tile_tokens[j]`` of row ``tile_rows[j]``. Row ``i`` has the new tokens
    ``query_starts[i]`` to ``query_starts[i + 1]`` of the query; the rest is as in ``DecodeTables``.
    """

    tile_size: int
    tile_rows: torch.Tensor
    tile_tokens: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_starts: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The tensors of one step. Its first ``singles`` rows have one token; ``slots`` has every new token of the step."""

    singles: int
    slots: torch.Tensor
    decode: DecodeTables
    spans: SpanTables | None


def plan_step(rows: Sequence[AttentionRow], block_size: int, tile_size: int, device: torch.device) -> AttentionPlan:
    """Returns the plan of a step. Raises ValueError if a row with one token comes after one with several."""
    singles = sum(row.new_tokens == 1 for row in rows)
    spans = rows[singles:]
    if any(row.new_tokens == 1 for row in spans):
        raise ValueError("rows with one token must come before rows with several")
    tables = [block_ids(row.blocks, -(-row.context_len // block_size) - row.first_block) for row in rows]
    # The longest contexts come first: they take longest, and nothing else should wait for them at the end.
    tiles = [
        (i, first)
        for i, row in sorted(enumerate(spans), key=lambda span: -span[1].context_len)
        for first in reversed(range(0, row.new_tokens, tile_size))
    ]
    context_lens = [row.context_len for row in rows]
    # A row's blocks are counted from the beginning of its context. None that is left out is read.
    starts = _starts([len(table) for table in tables])
    block_starts = [start - row.first_block for start, row in zip(starts, rows, strict=False)]
    moved = to_device(
        [
            new_slots(rows, block_size),
            context_lens[:singles],
            block_starts[:singles],
            context_lens[singles:],
            block_starts[singles:],
            _starts([row.new_tokens for row in spans]),
            [row for row, _ in tiles],
            [first for _, first in tiles],
            joined(tables),
        ],
        device,
    )
    slots, single_lens, single_starts, span_lens, span_starts, query_starts, tile_rows, tile_tokens, blocks = moved
    return AttentionPlan(
        singles,
        slots,
        DecodeTables(single_lens, single_starts, blocks),
        SpanTables(tile_size, tile_rows, tile_tokens, query_starts, span_lens, span_starts, blocks) if spans else None,
    )


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def new_slots(rows: Sequence[AttentionRow], block_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns ``block * block_size + offset`` of each new token."""
    parts = []
    for row in rows:
        position = np.arange(row.context_len - row.new_tokens, row.context_len)
        first = int(position[0]) // block_size
        # Only the blocks of the new tokens are taken: a decode step must not copy every table twice.
        begin, end = first - row.first_block, -(-row.context_len // block_size) - row.first_block
        table = np.asarray(row.blocks[begin:end], dtype=np.int64)
        parts.append(table[position // block_size - first] * block_size + position % block_size)
    return np.concatenate(parts)
