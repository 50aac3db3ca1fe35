"""Tells the other ranks what is new in the rows of a step, or of its drafts, because they have the rows before.

A row with the block table of a row that they have, in the last step or before it in this one, says which row that is,
and has its tokens and the blocks that the table has grown by. All other rows are sent whole: those of requests that
come in, or were left out of a step, and those whose blocks have changed. So nobody has to be told that a request has
ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.errors import MalformedFrame
from pdserve.models.runner import DraftRow, StepRow
from pdserve.wire.rank import Draft, NextRow, RankDraft, RankRow, Step


class _Sent(msgspec.Struct, frozen=True):
    """A row as the ranks know it."""

    place: int
    """Its place in its step."""
    end: int
    """The number of its context's tokens."""
    table: BlockTable
    """Holds the table, so that no other one can be at its address."""
    num_blocks: int
    rearranged: int


class SentRows:
    """Rank 0's end."""

    def __init__(self) -> None:
        self._last: dict[int, _Sent] = {}
        """The rows of the last step by the addresses of their tables; of several with one table, the last one."""
        self._rows: Sequence[StepRow] = ()

    def step(self, rows: Sequence[StepRow]) -> Step:
        """Returns the message about a step. Every rank has to get every one of them."""
        last, sent, told = self._last, dict[int, _Sent](), list[RankRow | NextRow]()
        for place, row in enumerate(rows):
            table, end = row.block_table, row.start + len(row.token_ids)
            if not isinstance(table, BlockTable):
                told.append(_whole(row))
                continue
            beside = sent.get(id(table))
            known = last.get(id(table)) if beside is None else beside
            if known is None or known.rearranged != table.rearranged or row.scored:
                told.append(_whole(row))
            else:
                others = [list(other) for other in row.others] if row.others else []
                ref = known.place if beside is None else -1 - known.place
                blocks, back = table[known.num_blocks :], known.end - row.start
                told.append(NextRow(ref, list(row.token_ids), blocks, row.wants_logits, back, others))
            sent[id(table)] = _Sent(place, end, table, len(table), table.rearranged)
        self._last, self._rows = sent, rows
        return Step(told)

    def draft(self, rows: Sequence[DraftRow], count: int) -> Draft:
        """Returns the message about drafts behind rows of the last step."""
        return Draft([self._drafted(row) for row in rows], count)

    def _drafted(self, row: DraftRow) -> RankDraft:
        # A table may have grown since the step. All ranks have to see the same blocks, because drafts end with them.
        table = self._rows[row.row].block_table if row.block_table is None else row.block_table
        sent = self._last.get(id(table))
        if sent is None or not isinstance(table, BlockTable) or sent.rearranged != table.rearranged:
            return RankDraft(row.row, list(row.next_tokens), row.wanted, list(table), whole=True)
        blocks = table[sent.num_blocks :]
        if blocks:
            self._last[id(table)] = msgspec.structs.replace(sent, num_blocks=len(table))
        return RankDraft(row.row, list(row.next_tokens), row.wanted, blocks)


class ReceivedRows:
    """Another rank's end."""

    def __init__(self) -> None:
        self._last: list[StepRow] = []

    def rows(self, step: Step) -> list[StepRow]:
        """Returns the rows of a step. Raises MalformedFrame if one goes on with a row that there was not."""
        last, rows = self._last, list[StepRow]()
        for told in step.rows:
            if isinstance(told, RankRow):
                whole = BlockTable(told.block_table)
                rows.append(StepRow(told.token_ids, told.start, whole, told.wants_logits, told.scored, told.others))
                continue
            held, place = (last, told.row) if told.row >= 0 else (rows, -1 - told.row)
            if place >= len(held):
                raise MalformedFrame(f"a row goes on with row {place} of a step that had {len(held)}")
            before = held[place]
            table, start = before.block_table, before.context_len - told.back
            assert isinstance(table, BlockTable)
            table.extend(told.blocks)
            rows.append(StepRow(told.token_ids, start, table, told.wants_logits, others=told.others))
        self._last = rows
        return rows

    def drafts(self, draft: Draft) -> list[DraftRow]:
        """Returns the rows of drafts. Raises MalformedFrame if one is of a row that the last step did not have."""
        rows = list[DraftRow]()
        for told in draft.rows:
            if told.row >= len(self._last):
                raise MalformedFrame(f"drafts of row {told.row} of a step that had {len(self._last)}")
            table = self._last[told.row].block_table
            assert isinstance(table, BlockTable)
            if not told.whole:
                table.extend(told.blocks)
            rows.append(DraftRow(told.row, told.next_tokens, told.wanted, told.blocks if told.whole else table))
        return rows


def _whole(row: StepRow) -> RankRow:
    scored, others = row.scored, [list(table) for table in row.others]
    return RankRow(
        list(row.token_ids),
        row.start,
        list(row.block_table),
        row.wants_logits,
        scored.start,
        max(scored.stop, 0),
        others,
    )
