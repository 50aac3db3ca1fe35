from __future__ import annotations

import pytest

from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep, laid_out
from pdserve_kvtransfer.region import KvRegion


def test_a_block_is_the_memory_itself() -> None:
    memory = bytearray(12)
    region = KvRegion(memoryview(memory), 4)
    assert (region.num_blocks, region.block_bytes) == (3, 4)
    region.block(1)[:] = b"abcd"
    assert memory == b"\0\0\0\0abcd\0\0\0\0"


@pytest.mark.parametrize("block_id", [-1, 3])
def test_there_are_no_other_blocks(block_id: int) -> None:
    with pytest.raises(ValueError, match=f"no block {block_id}"):
        KvRegion(memoryview(bytearray(12)), 4).block(block_id)


@pytest.mark.parametrize(
    ("buffer", "block_bytes"),
    [
        (memoryview(b"readonly"), 4),
        (memoryview(bytearray(10)), 4),
        (memoryview(bytearray(0)), 4),
        (memoryview(bytearray(8)), 0),
        (memoryview(bytearray(8)).cast("I"), 4),
        (memoryview(bytearray(16))[::2], 4),
        (memoryview(bytearray(16)).cast("B", (4, 4)), 4),
    ],
)
def test_misfits_are_refused(buffer: memoryview, block_bytes: int) -> None:
    with pytest.raises(ValueError):
        KvRegion(buffer, block_bytes)


SPECS = (GroupSpec("all", Keep.ALL, 1, 1, 4, "bf16"), GroupSpec("state", Keep.LATEST, 1, 1, 6, "fp32"))


def test_each_group_has_blocks_of_its_own_size() -> None:
    groups, nbytes = laid_out(SPECS, (3, 2), (4, 6))
    region = KvRegion(memoryview(bytearray(nbytes)), groups)
    assert (region.num_blocks, region.num_groups, region.block_bytes) == (5, 2, 6)
    assert [region.group_of(block) for block in range(5)] == [0, 0, 0, 1, 1]
    assert [len(region.block(block)) for block in range(5)] == [4, 4, 4, 6, 6]
    assert [region.place(block, 1) for block in range(5)] == [
        group.place(block) + 1 for group in groups for block in group.ids
    ]
    base, stride = region.line(1)
    assert [base + block * stride for block in (3, 4)] == [region.place(block, 0) for block in (3, 4)]
    with pytest.raises(ValueError, match="no block 5"):
        region.check(5)


def test_a_staging_block_takes_a_block_of_any_group() -> None:
    region = KvRegion.of_staging(memoryview(bytearray(18)), 3, (4, 6))
    assert [(region.group_of(block), region.place(block, 0), len(region.block(block))) for block in range(6)] == [
        (0, 0, 4),
        (0, 6, 4),
        (0, 12, 4),
        (1, 0, 6),
        (1, 6, 6),
        (1, 12, 6),
    ]


@pytest.mark.parametrize(("first", "start", "count", "size"), [(1, 0, 2, 4), (0, 4, 2, 4), (0, 0, 3, 4), (0, 0, 2, 0)])
def test_groups_that_do_not_fit_are_refused(first: int, start: int, count: int, size: int) -> None:
    with pytest.raises(ValueError):
        KvRegion(memoryview(bytearray(8)), [GroupBlocks(SPECS[0], first, count, start, size)])
