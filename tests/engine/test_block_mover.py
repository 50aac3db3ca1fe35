"""Blocks that go through host memory come out the same."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.kv_connector.block_mover import BlockMover, block_copies

NUM_BLOCKS, SLOTS = 12, 8
PATIENCE_S = 30.0


class Moving:
    """A mover, and a wait for what it says."""

    def __init__(self) -> None:
        self.cache = torch.randn(NUM_BLOCKS, 2, 3, 5)
        self.slots = torch.zeros(SLOTS, 2, 3, 5)
        self._news = threading.Semaphore(0)
        self.mover: BlockMover[int] = BlockMover(
            self.cache, self.slots, block_copies(self.cache.device), self._news.release
        )

    def finish(self, jobs: int) -> list[int]:
        done: list[int] = []
        while len(done) < jobs:
            assert self._news.acquire(timeout=PATIENCE_S)
            assert self.mover.failure is None
            done += self.mover.done()
        return done


@settings(max_examples=30, deadline=None)
@given(
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1, max_size=SLOTS),
    order=st.permutations(range(SLOTS)),
)
def test_there_and_back(blocks: list[int], order: list[int]) -> None:
    moving = Moving()
    slots = order[: len(blocks)]
    before = moving.cache.clone()
    targets = list(reversed(blocks))
    moving.mover.download(1, blocks, slots)
    moving.mover.upload(2, slots, targets)
    assert moving.finish(2) == [1, 2]
    moving.mover.close(PATIENCE_S)
    assert torch.equal(moving.slots[slots], before[blocks])
    wanted = before.clone()
    wanted[targets] = before[blocks]
    assert torch.equal(moving.cache, wanted)


def test_more_than_one_buffer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.engine.kv_connector.block_mover.BATCH_BYTES", 3 * 2 * 3 * 5 * 4)
    moving = Moving()
    moving.mover.download(1, range(SLOTS), range(SLOTS))
    assert moving.finish(1) == [1]
    moving.mover.close(PATIENCE_S)
    assert torch.equal(moving.slots, moving.cache[:SLOTS])


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    moving = Moving()
    with pytest.raises(ValueError, match="2 blocks do not fit 1 slots"):
        moving.mover.download(1, [0, 1], [0])
    moving.mover.close(PATIENCE_S)


def test_a_copy_that_fails_is_said() -> None:
    moving = Moving()
    moving.mover.upload(1, [0], [NUM_BLOCKS])
    assert moving._news.acquire(timeout=PATIENCE_S)
    assert "IndexError" in (moving.mover.failure or "")
    assert moving.mover.done() == []
    moving.mover.close(PATIENCE_S)
