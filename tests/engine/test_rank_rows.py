"""Other ranks compute the rows that rank 0 computes, whatever has happened to the requests since the last step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_table import BlockTable, StateTable, WindowTable
from pdserve.engine.tp.rank_rows import ReceivedRows, SentRows
from pdserve.errors import MalformedFrame
from pdserve.models.runner import DraftRow, StepRow
from pdserve.wire.cache_groups import Keep
from pdserve.wire.rank import Draft, NextRow, NextRows, RankDraft, RankRow, Step
from tests.engine.fake_model import groups_of

SIZE = 4


@dataclass(eq=False)
class Context:
    """A request, as far as rows know it."""

    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0


def plain(rows: list[StepRow]) -> list[object]:
    return [
        (
            list(row.token_ids),
            row.start,
            list(row.block_table),
            row.wants_logits,
            row.scored,
            [list(each) for each in row.others],
        )
        for row in rows
    ]


class Pair:
    """Rank 0 and another rank."""

    def __init__(self) -> None:
        self._sent, self.received, self._rows = SentRows(), ReceivedRows(), list[StepRow]()

    def told(self, rows: list[StepRow]) -> Step:
        """Returns the message about these rows, after both have seen that the other rank makes the same of it."""
        wanted = plain(rows)
        frame = msgspec.msgpack.encode(self._sent.step(rows))
        message = msgspec.msgpack.decode(frame, type=Step)
        assert plain(self.received.rows(message)) == wanted
        self._rows = rows
        return message

    def drafted(self, rows: list[DraftRow], count: int) -> Draft:
        """Does the same with the message about drafts behind rows that were told last."""
        wanted = [(row.row, row.next_tokens, row.wanted, list(row.block_table or self._table(row))) for row in rows]
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(self._sent.draft(rows, count)), type=Draft)
        received = self.received.drafts(message)
        assert [(row.row, row.next_tokens, row.wanted, list(row.block_table or ())) for row in received] == wanted
        assert message.count == count
        return message

    def _table(self, row: DraftRow) -> Sequence[int]:
        return self._rows[row.row].block_table


def test_the_states_after_drafts_are_those_of_rank_0() -> None:
    pair, table = Pair(), BlockTable(range(4))
    for start, states in (
        (5, StateTable(present=7, next=8, drafted=[5, 9])),
        (7, StateTable(present=5, next=9, drafted=[8, 7])),  # one draft was accepted
    ):
        table.open([states])
        rows = [StepRow([9], start + number, table, True, others=table.row_tables(number)) for number in range(3)]
        pair.told(rows)
        chain = [states.present, states.next, *states.drafted]
        assert [row.others for row in rows] == [(states,) for states in pairwise(chain)]


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_arrive_as_they_were(seed: int) -> None:
    chance, pair, contexts = random.Random(seed), Pair(), [Context() for _ in range(5)]
    whole = told = 0
    for _ in range(60):
        rows = []
        for context in chance.sample(contexts, chance.randint(1, 5)):
            match chance.randint(0, 9):
                case 0:  # preempted: its blocks are gone, and the table is the same object
                    context.table.clear()
                    context.computed = 0
                case 1 if context.table:  # a quarantined block was replaced
                    context.table[chance.randrange(len(context.table))] = chance.randrange(1000)
                case 2:  # ended, and another one has come
                    contexts[contexts.index(context)] = context = Context()
            count = 1 if context.computed else chance.randint(2, 9)
            while len(context.table) * SIZE < context.computed + count:
                context.table.append(chance.randrange(1000))
            tokens = [chance.randrange(200_000) for _ in range(count)]
            others = [[-1, chance.randrange(9)]] if chance.random() < 0.5 else []
            rows.append(StepRow(tokens, context.computed, context.table, chance.random() < 0.9, others=others))
            context.computed += count
        message = pair.told(rows)
        for context in contexts:
            # Blocks for drafts.
            context.table.extend(
                chance.randrange(1000) for _ in range(chance.choice((0, 0, 1, 2)) if context.table else 0)
            )
        drafts = [place for place, row in enumerate(rows) if chance.random() < 0.7 and row.block_table]
        pair.drafted([DraftRow(place, [chance.randrange(1000)], chance.random() < 0.5) for place in drafts], 3)
        told += len(rows)
        whole += sum(isinstance(row, RankRow) for row in message.rows)
    assert 0 < whole < told


def test_a_row_that_decodes_on_takes_a_few_bytes_however_long_its_context_is() -> None:
    pair, tables = Pair(), [BlockTable(range(2000)) for _ in range(256)]
    pair.told([StepRow([150_000], 31_000, table, True) for table in tables])
    message = pair.told([StepRow([150_000], 31_001, table, True) for table in tables])
    assert [type(row) for row in message.rows] == [NextRows]
    assert len(msgspec.msgpack.encode(message)) < 16 * 256


def test_drafts_take_a_few_bytes_however_long_their_contexts_are() -> None:
    pair, tables = Pair(), [BlockTable(range(2000)) for _ in range(256)]
    pair.told([StepRow([150_000], 31_000, table, True) for table in tables])
    for table in tables:
        table.append(2000)
    message = pair.drafted([DraftRow(place, [150_000], True) for place in range(256)], 3)
    assert len(msgspec.msgpack.encode(message)) < 16 * 256
    # What the message has brought is not sent again.
    step = pair.told([StepRow([150_000], 31_001, table, True) for table in tables])
    assert [row.grown for row in step.rows if isinstance(row, NextRows)] == [[]]


def test_drafts_of_several_rows_of_a_request_and_of_tables_that_are_not_known_arrive_as_they_were() -> None:
    pair, table, plain_table = Pair(), BlockTable(range(3)), [7, 8]
    pair.told([*(StepRow([at], at, table, True) for at in range(5, 8)), StepRow([1], 4, plain_table, True)])
    table.append(30)
    rows = [DraftRow(place, [9], place == 2) for place in range(3)]
    message = pair.drafted([*rows, DraftRow(3, [1], True), DraftRow(0, [1], False, [4, 5])], 2)
    assert [(row.blocks, row.whole) for row in message.rows] == [
        ([30], False),
        ([], False),
        ([], False),
        ([7, 8], True),
        ([4, 5], True),
    ]
    table[1] = 11
    assert pair.drafted([DraftRow(1, [9], True)], 2).rows[0].whole
    with pytest.raises(MalformedFrame, match="drafts of row 4 of a step that had 4"):
        pair.received.drafts(Draft([RankDraft(4, [1], True)], 1))


def test_rows_of_one_request_and_scored_rows_arrive_as_they_were() -> None:
    pair, table = Pair(), BlockTable(range(10))
    pair.told([StepRow([at], at, table, at == 7) for at in range(5, 8)])
    message = pair.told([StepRow([at], at, table, at == 9) for at in range(8, 10)])
    assert all(isinstance(row, NextRow) for row in message.rows)
    # Of the last two, the second was a draft that was refused.
    table.append(10)
    message = pair.told([StepRow([at], at, table, True) for at in range(9, 12)])
    assert all(isinstance(row, NextRow) for row in message.rows)
    pair.told([StepRow([1, 2, 3], 10, table, True, range(2))])
    # Nor is a table that is no ``BlockTable`` taken for one that is known.
    pair.told([StepRow([1], 13, list(table), True)])


def test_rows_that_go_on_with_none_or_with_other_tables_are_malformed() -> None:
    received = ReceivedRows()
    for row, match in (
        (NextRow(3, [1], [], True), "row 3 of a step that had 0"),
        (NextRows(3, [1, 2]), "rows 3 to 5 of a step that had 0"),
    ):
        with pytest.raises(MalformedFrame, match=match):
            received.rows(Step([row]))
    for row in (
        NextRow(0, [1], [], True, others=[[1], [2]]),
        NextRows(0, [1], grown=[0], blocks=[[1]], given_back=[[]]),
        NextRows(0, [1], grown=[1], blocks=[[1], [1]], given_back=[[]]),
        NextRows(0, [1], given_back=[[], [0]]),
        NextRows(0, [1], given_back=[[]], blocks=[[]], states=[[3]]),
    ):
        received.rows(Step([RankRow([1], 0, [1], True, others=[[5]], windows={0: 0})]))
        with pytest.raises(MalformedFrame):
            received.rows(Step([row]))


def test_a_window_that_took_the_place_of_another_one_is_sent_whole() -> None:
    pair, table = Pair(), BlockTable(range(4))
    for start, blocks in ((12, [7, 8, 9, 5]), (13, [1, 2, 3, 4])):
        table.open([WindowTable(blocks)])
        message = pair.told([StepRow([1], start, table, True, others=table.row_tables())])
        assert [type(row) for row in message.rows] == [RankRow]


def test_a_window_gives_back_the_blocks_of_its_first_places() -> None:
    table = WindowTable([7, 8, -1, 5])
    assert (table.give_back(1), table.give_back(1), table.give_back(3)) == ([7], [], [8])
    assert table == [-1, -1, -1, 5]
    # A window may begin behind all that the table has.
    assert (table.give_back(6), table.given_back, len(table)) == ([5], 6, 4)


class Groups:
    """Contexts of a model with a window and states, whose blocks are those of a real ``BlockManager``."""

    def __init__(self, keeps: Sequence[tuple[Keep, int]], most: int, blocks: int = 4000) -> None:
        groups = groups_of([(*keep, blocks) for keep in keeps], blocks)
        self.blocks = BlockManager(blocks, SIZE, bounded=groups[1:])
        self.contexts = [Context() for _ in range(most)]
        self.quarantined: list[int] = []

    def rows(self, context: Context, tokens: int, drafts: int = 0, last: int = 200_000) -> list[StepRow]:
        """Returns the rows of a context's next tokens: one, or one for each draft and the token before them."""
        end = context.computed + tokens + drafts
        assert self.blocks.grow(context.table, end)
        assert self.blocks.grow_bounded(context.table, context.computed, end)
        if not drafts:
            return [StepRow([last] * tokens, context.computed, context.table, True, others=context.table.row_tables())]
        drafts = self.blocks.take_for_drafts(context.table, drafts) if context.table.has_states else drafts
        return [
            StepRow([last], context.computed + i, context.table, True, others=context.table.row_tables(i))
            for i in range(1 + drafts)
        ]

    def computed(self, context: Context, rows: Sequence[StepRow], refused: int = 0) -> None:
        """Notes that all tokens of rows are final but those of the last ones, which were drafts that were refused."""
        for row in rows[: len(rows) - refused]:
            context.computed += len(row.token_ids)
            self.blocks.next_states(context.table)
        self.blocks.drop_drafts(context.table)
        self.blocks.give_back(context.table, context.computed)

    def end(self, context: Context) -> None:
        self.blocks.free(context.table)
        context.computed = 0


WINDOW, SECOND_WINDOW, STATES = (Keep.WINDOW, 6), (Keep.WINDOW, 11), (Keep.LATEST, 0)


@pytest.mark.parametrize("keeps", [(WINDOW,), (STATES,), (WINDOW, SECOND_WINDOW), (STATES, WINDOW), (WINDOW, STATES)])
@pytest.mark.parametrize("seed", range(6))
def test_the_tables_of_all_groups_arrive_as_they_were(keeps: tuple[tuple[Keep, int], ...], seed: int) -> None:
    chance, pair, groups = random.Random(seed), Pair(), Groups(keeps, 6)
    kinds, chosen = set[type[object]](), groups.contexts
    for _ in range(150):
        if chance.random() < 0.2:  # some wait, in another order
            chosen = chance.sample(groups.contexts, chance.randint(1, 6))
        rows, ran = list[StepRow](), list[tuple[Context, list[StepRow], int]]()
        for context in chosen:
            match chance.randint(0, 30):
                case 0:  # preempted, or ended: its blocks are free, and another one may take them
                    groups.end(context)
                case 1 if context.computed:  # a block was replaced, as after a transfer that failed
                    tables = [context.table, *(each for each in context.table.others if isinstance(each, WindowTable))]
                    bad = [table[-1] for table in tables if table[-1] >= 0]
                    groups.blocks.quarantine(bad)
                    assert groups.blocks.replace(context.table, bad)
                    groups.blocks.end_quarantine(bad)
                case 2 if context.computed:  # a transfer that brings blocks further on was given up
                    assert groups.blocks.grow_landing(context.table, context.computed, context.computed + 30)
            drafts = chance.randint(1, 3) if context.computed and chance.random() < 0.1 else 0
            own = groups.rows(context, 1 if context.computed else chance.randint(2, 40), drafts)
            rows += own
            ran.append((context, own, chance.randint(0, len(own) - 1)))
        kinds |= {type(row) for row in pair.told(rows).rows}
        for context, own, refused in ran:
            groups.computed(context, own, refused)
    assert kinds == {RankRow, NextRow, NextRows}


@pytest.mark.parametrize("keeps", [(), (WINDOW,), (STATES,), (WINDOW, SECOND_WINDOW)])
def test_a_decode_step_of_any_model_is_told_in_2_kib_and_16_bytes_a_request(
    keeps: tuple[tuple[Keep, int], ...],
) -> None:
    pair, groups = Pair(), Groups(keeps, 256, blocks=200_000)
    sizes, steps = list[int](), list[Step]()
    for number in range(3 * SIZE):
        rows = list[StepRow]()
        for place, context in enumerate(groups.contexts):
            own = groups.rows(context, 1 if number else 60 + place % SIZE)
            rows += own
        steps.append(pair.told(rows))
        sizes.append(len(msgspec.msgpack.encode(steps[-1])))
        for context, row in zip(groups.contexts, rows, strict=True):
            groups.computed(context, [row])
    # Right after its prompt, a context may give back several blocks.
    assert all([type(row) for row in step.rows] == [NextRows] for step in steps[2:])
    assert max(sizes[1:]) <= 2048 + 16 * 256
