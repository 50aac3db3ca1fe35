"""Tests that blocks which go through host memory come out the same."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.kv_connector.staging.block_copier import BlockCopier, copy_kernels
from pdserve.liveness import LifeBoard
from tests.eventually import eventually
from tests.examples import examples

NUM_BLOCKS, STAGING = 12, 8
PATIENCE_S = 30.0


class Moving:
    """A copier, and a wait for its copies."""

    def __init__(self) -> None:
        self.cache = torch.randn(NUM_BLOCKS, 2, 3, 5)
        self.staging = torch.zeros(STAGING, 2, 3, 5)
        self._news = threading.Semaphore(0)
        self.copier: BlockCopier[int] = BlockCopier(
            self.cache, self.staging, copy_kernels(self.cache.device), self._news.release
        )

    def finish(self, jobs: int) -> list[int]:
        done: list[int] = []
        while len(done) < jobs:
            assert self._news.acquire(timeout=PATIENCE_S)
            assert self.copier.failure is None
            done += self.copier.done()
        return done


@settings(max_examples=examples(30))
@given(
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1, max_size=STAGING),
    order=st.permutations(range(STAGING)),
)
def test_there_and_back(blocks: list[int], order: list[int]) -> None:
    moving = Moving()
    staged = order[: len(blocks)]
    before = moving.cache.clone()
    targets = list(reversed(blocks))
    moving.copier.download(1, blocks, staged)
    moving.copier.upload(2, staged, targets)
    assert moving.finish(2) == [1, 2]
    moving.copier.close(PATIENCE_S)
    assert torch.equal(moving.staging[staged], before[blocks])
    wanted = before.clone()
    wanted[targets] = before[blocks]
    assert torch.equal(moving.cache, wanted)


def test_both_kernels_have_run_once_before_the_first_job_and_changed_nothing() -> None:
    ran: list[str] = []

    class Recorder:
        def gather(self, cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None:
            ran.append("gather")
            kernels.gather(cache, blocks, buffer)

        def scatter(self, cache: torch.Tensor, blocks: torch.Tensor, buffer: torch.Tensor) -> None:
            ran.append("scatter")
            kernels.scatter(cache, blocks, buffer)

    cache, staging = torch.randn(NUM_BLOCKS, 2, 3, 5), torch.zeros(STAGING, 2, 3, 5)
    kernels, before = copy_kernels(cache.device), cache.clone()
    copier: BlockCopier[int] = BlockCopier(cache, staging, Recorder(), lambda: None)
    assert ran == ["gather", "scatter"]
    assert torch.equal(cache, before) and not staging.any()
    copier.close(PATIENCE_S)


def test_more_than_one_buffer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.engine.kv_connector.staging.block_copier.BATCH_BYTES", 3 * 2 * 3 * 5 * 4)
    moving = Moving()
    moving.copier.download(1, range(STAGING), range(STAGING))
    assert moving.finish(1) == [1]
    moving.copier.close(PATIENCE_S)
    assert torch.equal(moving.staging, moving.cache[:STAGING])


def test_the_thread_shows_life_while_nothing_is_to_be_copied() -> None:
    with closing(LifeBoard.create(1)) as board:
        cache, staging = torch.randn(NUM_BLOCKS, 2, 3, 5), torch.zeros(STAGING, 2, 3, 5)
        kernels = copy_kernels(cache.device)
        copier: BlockCopier[int] = BlockCopier(cache, staging, kernels, lambda: None, board.sign(0))
        first = eventually(lambda: board.shown(0), "the thread runs")
        eventually(lambda: board.shown(0) != first, "it shows life")
        copier.close(PATIENCE_S)
        assert board.shown(0) is None


def test_lists_that_do_not_fit_each_other_are_refused() -> None:
    moving = Moving()
    with pytest.raises(ValueError, match="2 blocks do not fit 1 staging blocks"):
        moving.copier.download(1, [0, 1], [0])
    moving.copier.close(PATIENCE_S)


def test_a_copy_that_fails_is_said() -> None:
    moving = Moving()
    moving.copier.upload(1, [0], [NUM_BLOCKS])
    assert moving._news.acquire(timeout=PATIENCE_S)
    assert "IndexError" in (moving.copier.failure or "")
    assert moving.copier.done() == []
    moving.copier.close(PATIENCE_S)
