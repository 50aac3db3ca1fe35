from __future__ import annotations

import pytest

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
