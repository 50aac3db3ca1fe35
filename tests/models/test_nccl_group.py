"""Tests the group of ranks on GPUs, with gloo in place of NCCL and events that are done when the test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from pdserve.errors import ConfigError, RankLost
from pdserve.models.backend import CPU
from pdserve.models.tp.rank_board import RankBoard
from pdserve.models.tp.tp_groups import NcclGroup

TIMEOUT_S = 0.2


class FakeNccl:
    """The part of ``torch.distributed.ProcessGroupNCCL`` that is used, on CPU tensors."""

    class Options:
        _timeout = timedelta()

    aborts = 0

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert options._timeout > timedelta(seconds=60)
        gloo: Any = torch.distributed.ProcessGroupGloo
        gloo_options = gloo._Options()
        gloo_options._devices = [gloo.create_device(hostname="127.0.0.1")]
        self._gloo = gloo(store, rank, size, gloo_options)
        self.allreduce, self.gather = self._gloo.allreduce, self._gloo.gather

    def abort(self) -> None:
        FakeNccl.aborts += 1
        self._gloo.shutdown()


class Gpu:
    """A GPU as ``torch.cuda.Event`` reports it."""

    def __init__(self) -> None:
        self.busy = threading.Event()
        self.on_query: Callable[[], None] = lambda: None

    def make_event(self) -> Gpu:
        return self

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.on_query()
        return not self.busy.is_set()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", gpu.make_event)
    monkeypatch.setattr(FakeNccl, "aborts", 0)
    # The group sets these variables; monkeypatch restores them after the test.
    for name in ("NCCL_SOCKET_IFNAME", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "left as it is")
    return gpu


@pytest.fixture
def board() -> Iterator[RankBoard]:
    with closing(RankBoard.create(3)) as board:
        yield board


def opened(board: RankBoard, folder: Path, size: int) -> list[NcclGroup]:
    """Opens all ranks in this process. Each needs a thread, because they wait for each other."""
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(NcclGroup, folder / "ranks", board, rank, size, TIMEOUT_S, CPU) for rank in range(size)]
        return [rank.result(30) for rank in ranks]


def together(groups: list[NcclGroup], what: Callable[[NcclGroup], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return [done.result(30) for done in [pool.submit(what, group) for group in groups]]


def test_ranks_add_up_and_rank_0_gathers(gpu: Gpu, board: RankBoard, tmp_path: Path) -> None:
    groups = opened(board, tmp_path, 3)
    sums = together(groups, lambda group: group.all_reduce(torch.tensor([[1.0, group.rank]])))
    assert [x.tolist() for x in sums] == [[[3.0, 3.0]]] * 3
    # The parts are not contiguous, as parts of a larger tensor are not.
    parts = together(groups, lambda group: group.gather(torch.full((4, 2), float(group.rank))[::2]))
    assert parts[0].tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert [part.shape for part in parts[1:]] == [(2, 0)] * 2
    assert groups[0].gather(torch.empty(0, 2)).shape == (0, 6)
    for group in groups:
        group.close()
    assert FakeNccl.aborts == 3


def test_a_rank_that_has_not_begun_the_step_is_the_one_that_hangs(gpu: Gpu, board: RankBoard, tmp_path: Path) -> None:
    groups = opened(board, tmp_path, 3)
    for group in groups:
        group.warmed_up()
        group.begin_step()
        group.finish_step()
    groups[0].begin_step()
    groups[2].begin_step()
    gpu.busy.set()
    with pytest.raises(RankLost, match=r"rank 1 hangs: no sign of it for 0\.2 s") as lost:
        groups[0].finish_step()
    assert lost.value.ranks == (1,)
    # The rank that hangs would also make an orderly end wait.
    groups[0].close()
    assert FakeNccl.aborts == 0


def test_a_step_that_takes_long_is_waited_for(gpu: Gpu, board: RankBoard, tmp_path: Path) -> None:
    (group,) = opened(board, tmp_path, 1)
    asked = 0

    def done_at_last() -> None:
        nonlocal asked
        asked += 1
        if asked == 100:
            gpu.busy.clear()

    gpu.on_query = done_at_last
    gpu.busy.set()
    group.begin_step()
    group.finish_step()
    assert asked == 100


def test_a_rank_that_compiles_gets_longer(gpu: Gpu, board: RankBoard, tmp_path: Path) -> None:
    (group,) = opened(board, tmp_path, 1)
    started = time.monotonic()

    def compiled() -> None:
        if time.monotonic() - started > 2 * TIMEOUT_S:
            gpu.busy.clear()

    gpu.on_query = compiled
    gpu.busy.set()
    group.finish_step()
    assert not gpu.busy.is_set()


def test_a_death_on_the_board_ends_the_wait(gpu: Gpu, board: RankBoard, tmp_path: Path) -> None:
    (group,) = opened(board, tmp_path, 1)
    gpu.busy.set()
    gpu.on_query = board.abandon
    with pytest.raises(RankLost, match="a tensor-parallel rank is gone"):
        group.finish_step()


def test_a_gpu_that_fails_is_not_a_rank_that_hangs(gpu: Gpu, board: RankBoard, tmp_path: Path) -> None:
    (group,) = opened(board, tmp_path, 1)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gpu.on_query = fail
    with pytest.raises(RankLost, match="this rank's GPU failed: CUDA error: an illegal memory access"):
        group.finish_step()


def test_a_torch_without_nccl_says_so(board: RankBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="built with NCCL"):
        NcclGroup(tmp_path / "ranks", board, 0, 1, TIMEOUT_S, CPU)
