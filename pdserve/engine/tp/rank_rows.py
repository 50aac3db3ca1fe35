"""Tells the other ranks what is new in the rows of a step, or of its drafts, because they have the rows before.

A row with the tables of a row that they have, in the last step or before it in this one, says which row that is, and
has its tokens and what is new in the tables: blocks that they have got, and those that a window has given back. Rows
that only decode on, as most do, are told together (``NextRows``). All other rows are sent whole: those of requests that
come in, or were left out of a step, and those whose blocks have changed in other ways. So nobody has to be told that a
request has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.kv_cache.block_table import BlockTable, WindowTable
from pdserve.errors import MalformedFrame
from pdserve.models.runner import DraftRow, StepRow
from pdserve.wire.rank import Draft, NextRow, NextRows, RankDraft, RankRow, Step


@dataclass(slots=True)
class _Window:
    """A window's table as the ranks know it."""

    table: WindowTable
    place: int
    """Its place among a row's ``others``."""
    num_blocks: int
    given_back: int
    rearranged: int

    def told(self) -> list[int]:
        """Returns what is new (``NextRow.others``). The ranks know it from now on."""
        table, known = self.table, self.num_blocks
        if len(table) == known and table.given_back == self.given_back:
            return []
        self.num_blocks, self.given_back = len(table), table.given_back
        return [table.given_back, *table[known:]]


@dataclass(slots=True)
class _Sent:
    """A context's tables as the ranks know them, and its last row."""

    table: BlockTable
    num_blocks: int
    rearranged: int
    windows: list[_Window]
    states: list[int]
    """The states that the row writes."""
    state_places: list[int]
    """The places of their tables among the row's ``others``."""
    others: Sequence[Sequence[int]]
    """The row's tables beside the first one."""
    num_others: int
    step: int
    """The number of the row's step."""
    place: int
    """Its place in that step."""
    end: int
    """The number of the context's tokens."""

    @classmethod
    def whole(cls, table: BlockTable, row: StepRow, step: int, place: int) -> _Sent:
        """Returns what the ranks know of a row that they are sent whole."""
        windows, states = list[_Window](), list[int]()
        for number, other in enumerate(row.others):
            if isinstance(other, WindowTable):
                windows.append(_Window(other, number, len(other), other.given_back, other.rearranged))
            else:
                states.append(number)
        end = row.start + len(row.token_ids)
        others, written = row.others, _written(row)
        return cls(table, len(table), table.rearranged, windows, written, states, others, len(others), step, place, end)

    def knows(self, others: Sequence[Sequence[int]]) -> bool:
        """Returns whether a row's tables beside the first one are those of windows, of which nothing is new."""
        if others is not self.others or self.states:
            return False
        for known in self.windows:
            table = known.table
            if (
                len(table) != known.num_blocks
                or table.given_back != known.given_back
                or table.rearranged != known.rearranged
            ):
                return False
        return True

    def tells(self, row: StepRow) -> bool:
        """Returns whether what is new in the row's tables can be told."""
        windows = _windows(row)
        return (
            self.table.rearranged == self.rearranged
            and len(windows) == len(self.windows)
            and len(row.others) == self.num_others
            and all(
                known.table is table and known.rearranged == table.rearranged
                for known, table in zip(self.windows, windows, strict=True)
            )
        )

    def next_row(self, row: StepRow, step: int, place: int) -> NextRow:
        """Returns the message about the context's next row. The ranks know it from now on."""
        ref = self.place if self.step < step else -1 - self.place
        windows = iter(self.windows)
        others = [next(windows).told() if isinstance(other, WindowTable) else list(other) for other in row.others]
        blocks, back = self.table[self.num_blocks :], self.end - row.start
        self.num_blocks, self.states, self.others = len(self.table), _written(row), row.others
        self.step, self.place, self.end = step, place, row.start + len(row.token_ids)
        return NextRow(ref, list(row.token_ids), blocks, row.wants_logits, back, others)


class _Run:
    """Rows of which the ranks are told together."""

    def __init__(self, first: _Sent) -> None:
        """``first`` is what the ranks know of the context that the first row will be of."""
        self.others = first.num_others
        """The number of tables that each row has beside the first one."""
        self.told = NextRows(
            first.place,
            [],
            blocks=[[] for _ in (first, *first.windows)],
            given_back=[[] for _ in first.windows],
            states=[[] for _ in first.states],
        )

    def takes(self, sent: _Sent, row: StepRow, grown: int) -> bool:
        """Returns whether what is new in a row's tables beside the first one, which has ``grown``, can be told here."""
        others = row.others
        for known in sent.windows:
            table = known.table
            if others[known.place] is not table or table.rearranged != known.rearranged:
                return False
            if len(table) - known.num_blocks != grown or not 0 <= table.given_back - known.given_back <= 1:
                return False
        begins = [others[place][0] for place in sent.state_places]
        return begins == sent.states and len(sent.windows) == len(self.told.given_back)

    def add_others(self, sent: _Sent, row: StepRow, number: int) -> None:
        """Adds what is new in tables beside the first one. ``number`` is the row's place here."""
        told = self.told
        for i, known in enumerate(sent.windows):
            table = known.table
            if len(table) > known.num_blocks:
                told.blocks[1 + i].append(table[-1])
                known.num_blocks += 1
            if table.given_back > known.given_back:
                told.given_back[i].append(number)
                known.given_back += 1
        if sent.states:
            others = row.others
            sent.states = [others[place][1] for place in sent.state_places]
            for states, state in zip(told.states, sent.states, strict=True):
                states.append(state)


class SentRows:
    """Rank 0's end."""

    def __init__(self) -> None:
        self._step = 0
        self._last: list[_Sent | None] = []
        """What the ranks know of each row of the last step; None for one whose table is no ``BlockTable``."""
        self._rows: Sequence[StepRow] = ()

    def step(self, rows: Sequence[StepRow]) -> Step:
        """Returns the message about a step. Every rank has to get every one of them."""
        self._step = step = self._step + 1
        last, sent_rows, told = self._last, list[_Sent | None](), list[RankRow | NextRow | NextRows]()
        known: dict[int, _Sent] | None = None
        run: _Run | None = None
        at = 0
        for place, row in enumerate(rows):
            table, tokens = row.block_table, row.token_ids
            # Most rows are in the order of the last step, so no table has to be looked up.
            sent = last[at] if at < len(last) else None
            if sent is None or sent.table is not table:
                if known is None:
                    known = {id(each.table): each for each in last if each is not None}
                sent = known.get(id(table))
            if sent is not None and not row.scored:
                held = sent.table
                grown, others = len(held) - sent.num_blocks, len(row.others)
                # Of windows, nothing is new while the row stays in its block.
                changed = others and (grown or not sent.knows(row.others))
                # This is done for each row of a decode step: a call would take as long as all of it.
                if (
                    sent.step != step
                    and sent.end == row.start
                    and len(tokens) == 1
                    and row.wants_logits
                    and (not grown or grown == 1)
                    and held.rearranged == sent.rearranged
                    and others == sent.num_others
                ):
                    fits = run if run is not None and sent.place == at else _Run(sent)
                    if fits.others == others and (not changed or fits.takes(sent, row, grown)):
                        if fits is not run:
                            run, at = fits, sent.place
                            told.append(run.told)
                        rows_told = run.told
                        number = len(rows_told.token_ids)
                        rows_told.token_ids.append(tokens[0])
                        if grown:
                            rows_told.grown.append(number)
                            rows_told.blocks[0].append(held[-1])
                            sent.num_blocks += 1
                        if changed:
                            run.add_others(sent, row, number)
                        sent.step, sent.place = step, place
                        sent.end += 1
                        sent_rows.append(sent)
                        at += 1
                        continue
                if sent.tells(row):
                    run = None
                    at = sent.place + 1 if sent.step != step else at
                    told.append(sent.next_row(row, step, place))
                    sent_rows.append(sent)
                    continue
            run = None
            told.append(_whole(row))
            whole = _Sent.whole(table, row, step, place) if isinstance(table, BlockTable) else None
            if whole is not None and known is not None:
                known[id(table)] = whole
            sent_rows.append(whole)
        self._last, self._rows = sent_rows, rows
        return Step(told)

    def draft(self, rows: Sequence[DraftRow], count: int) -> Draft:
        """Returns the message about drafts behind rows of the last step."""
        return Draft([self._drafted(row) for row in rows], count)

    def _drafted(self, row: DraftRow) -> RankDraft:
        # A table may have grown since the step. All ranks have to see the same blocks, because drafts end with them.
        table = self._rows[row.row].block_table if row.block_table is None else row.block_table
        sent = self._last[row.row]
        if sent is None or sent.table is not table or sent.rearranged != sent.table.rearranged:
            return RankDraft(row.row, list(row.next_tokens), row.wanted, list(table), whole=True)
        blocks = sent.table[sent.num_blocks :]
        sent.num_blocks = len(sent.table)
        return RankDraft(row.row, list(row.next_tokens), row.wanted, blocks)


class ReceivedRows:
    """Another rank's end."""

    def __init__(self) -> None:
        self._last: list[StepRow] = []

    def rows(self, step: Step) -> list[StepRow]:
        """Returns the rows of a step. Raises MalformedFrame if one goes on with a row that there was not."""
        last, rows = self._last, list[StepRow]()
        for told in step.rows:
            if isinstance(told, NextRows):
                rows += _next_rows(told, last)
                continue
            if isinstance(told, RankRow):
                rows.append(_received_whole(told))
                continue
            held, place = (last, told.row) if told.row >= 0 else (rows, -1 - told.row)
            if place >= len(held):
                raise MalformedFrame(f"a row goes on with row {place} of a step that had {len(held)}")
            before = held[place]
            table, start = before.block_table, before.context_len - told.back
            assert isinstance(table, BlockTable)
            table.extend(told.blocks)
            if len(told.others) != len(before.others):
                raise MalformedFrame(f"a row with {len(before.others)} more tables goes on with {len(told.others)}")
            others = [_changed(*each) for each in zip(before.others, told.others, strict=True)]
            rows.append(StepRow(told.token_ids, start, table, told.wants_logits, others=others))
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


def _received_whole(told: RankRow) -> StepRow:
    others: list[Sequence[int]] = [
        WindowTable(table, told.windows[i]) if i in told.windows else table for i, table in enumerate(told.others)
    ]
    table = BlockTable(told.block_table)
    return StepRow(told.token_ids, told.start, table, told.wants_logits, told.scored, others)


def _changed(table: Sequence[int], told: list[int]) -> Sequence[int]:
    """Returns what became of one of a row's other tables (``NextRow.others``)."""
    if not isinstance(table, WindowTable):
        return told
    if told:
        table.give_back(told[0])
        table.extend(told[1:])
    return table


def _next_rows(told: NextRows, last: Sequence[StepRow]) -> list[StepRow]:
    """Returns the rows that are told together. Raises MalformedFrame if they do not fit those of the ``last`` step."""
    end = told.row + len(told.token_ids)
    if end > len(last):
        raise MalformedFrame(f"rows go on with rows {told.row} to {end} of a step that had {len(last)}")
    before = last[told.row : end]
    kinds = len(told.given_back) + len(told.states)
    if any(len(row.others) != kinds for row in before):
        raise MalformedFrame(f"rows go on with others that have not {kinds} tables behind the first one each")
    try:
        for number, places in enumerate(told.given_back):
            for place in places:
                window = _windows(before[place])[number]
                window.give_back(window.given_back + 1)
        for number, place in enumerate(told.grown):
            for table, blocks in zip(_growing(before[place]), told.blocks, strict=True):
                table.append(blocks[number])
        rows = list[StepRow]()
        for place, (row, token) in enumerate(zip(before, told.token_ids, strict=True)):
            others = row.others
            if told.states:
                states = iter(told.states)
                others = [
                    other if isinstance(other, WindowTable) else [other[1], next(states)[place]] for other in others
                ]
            rows.append(StepRow([token], row.context_len, row.block_table, True, others=others))
    except (IndexError, ValueError, StopIteration) as exc:
        raise MalformedFrame(f"rows have other tables than those that they go on with: {exc!r}") from exc
    return rows


def _windows(row: StepRow) -> list[WindowTable]:
    return [other for other in row.others if isinstance(other, WindowTable)]


def _growing(row: StepRow) -> list[BlockTable | WindowTable]:
    """Returns the tables that get blocks as the context grows."""
    assert isinstance(row.block_table, BlockTable)
    return [row.block_table, *_windows(row)]


def _written(row: StepRow) -> list[int]:
    """Returns the states that a row writes."""
    return [other[1] for other in row.others if not isinstance(other, WindowTable)]


def _whole(row: StepRow) -> RankRow:
    return RankRow(
        list(row.token_ids),
        row.start,
        list(row.block_table),
        row.wants_logits,
        row.scored.start,
        max(row.scored.stop, 0),
        [list(table) for table in row.others],
        {i: other.given_back for i, other in enumerate(row.others) if isinstance(other, WindowTable)},
    )
