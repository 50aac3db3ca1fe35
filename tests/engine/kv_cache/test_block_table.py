"""The array of a table's ids is that of the table, whatever has changed since the last call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve_kernels.contract import AttentionRow
from pdserve_kernels.cpu.compiled_attention import _tables
from pdserve_kernels.host_copies import block_ids

IDS = st.integers(0, 99)
CHANGES = st.lists(
    st.tuples(st.just("append"), IDS)
    | st.tuples(st.just("set"), IDS)
    | st.tuples(st.just("clear"), IDS)
    | st.tuples(st.just("read"), IDS),
    max_size=30,
)


@given(CHANGES)
def test_ids_are_those_of_the_table(changes: list[tuple[str, int]]) -> None:
    table, wanted = BlockTable(), list[int]()
    for change, number in changes:
        match change:
            case "append":
                table.append(number)
                wanted.append(number)
            case "set" if wanted:
                table[number % len(wanted)] = wanted[number % len(wanted)] = number
            case "clear" if number < 10:
                table.clear()
                wanted.clear()
            case "read":
                assert block_ids(table, number).tolist() == block_ids(wanted, number).tolist() == wanted[:number]
    assert block_ids(table, 99).tolist() == wanted


def test_a_step_is_planned_from_tables_as_from_lists() -> None:
    blocks = [[3, 1, 4], [5, 9]]
    kinds = BlockTable, list
    planned = [_tables([AttentionRow(1, 7, kind(each)) for each in blocks], 4, 10) for kind in kinds]
    assert [[part.tolist() for part in plan[:2]] for plan in planned] == [
        [[3, 1, 5, 9], [[1, 7, 0, 0], [1, 7, 1, 2]]],
    ] * 2
