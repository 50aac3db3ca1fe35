"""Tests NCCL with one rank, the most that one GPU has room for: its operations run, are recorded, and end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from pdserve.config import Dtype
from pdserve.errors import RankLost
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import CudaGraphs, ModelRunner, StepRow
from pdserve.models.tp.rank_board import RankBoard
from pdserve.models.tp.shares import ALONE
from pdserve.models.tp.tp_groups import NcclGroup
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

CUDA = torch.device("cuda", 0)
TIMEOUT_S = 10.0


@pytest.fixture
def board() -> Iterator[RankBoard]:
    with closing(RankBoard.create(1)) as board:
        yield board


@pytest.fixture
def group(board: RankBoard, tmp_path: Path) -> Iterator[NcclGroup]:
    with closing(NcclGroup(tmp_path / "ranks", board, 0, 1, TIMEOUT_S, CUDA)) as group:
        yield group


def test_operations(group: NcclGroup) -> None:
    assert group.all_reduce(torch.tensor([1.0, 2.0], device=CUDA)).tolist() == [1.0, 2.0]
    x = torch.arange(8, device=CUDA, dtype=torch.bfloat16).view(4, 2)
    assert torch.equal(group.gather(x), x)
    assert torch.equal(group.gather(x[::2]), x[::2])
    assert group.gather(x[:0]).shape == (0, 2)
    group.finish_step()


def test_recorded_steps_of_a_group_are_those_without_one(group: NcclGroup, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    config = read_decoder_config(folder)
    kernels = TritonKernels.of(CUDA)
    prompts, tables = [list(range(5, 20)), list(range(30, 37))], [list(range(8)), list(range(8, 16))]
    answers = []
    for tp in (ALONE, group):
        runner = ModelRunner(folder, config, Dtype.FP32, 4, 16, 32, kernels, CUDA, tp)
        runner.run([StepRow(prompts[0], 0, tables[0], True)])
        runner.capture_decode(kernels, 4, CudaGraphs())
        logits = runner.run([StepRow(ids, 0, table, True) for ids, table in zip(prompts, tables, strict=True)])
        answer = [logits.argmax(-1).tolist()]
        for i in range(8):
            # The tokens stay on the device, as in steps that are launched ahead.
            rows = [StepRow([0], len(ids) + i, table, True) for ids, table in zip(prompts, tables, strict=True)]
            logits = runner.run(rows, logits.argmax(-1))
            answer.append(logits.argmax(-1).tolist())
        tp.finish_step()
        answers.append(answer)
    assert answers[0] == answers[1]


@pytest.fixture
def no_waits() -> Iterator[None]:
    """Lets every call fail that waits for the GPU, as far as torch knows."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["llama-scaled", "qwen3-window", "gemma3", "qwen3-moe"])
def test_no_step_waits_for_the_gpu_but_in_the_group(
    group: NcclGroup, tmp_path: Path, family: str, request: pytest.FixtureRequest
) -> None:
    folder = save_tiny_model(family, tmp_path / "model")
    kernels = TritonKernels.of(CUDA)
    runner = ModelRunner(folder, read_decoder_config(folder), Dtype.FP32, 4, 64, 64, kernels, CUDA, group)
    mixed = [StepRow([5], 0, [0], False), StepRow([7], 6, [1, 2], True), StepRow([1, 2, 3], 3, [3, 4], True, range(2))]
    singles = [StepRow([5], 0, [0], False), StepRow([7], 6, [1, 2], True)]
    pieces: list[torch.Tensor] = []

    def steps() -> None:
        assert runner.run(mixed, score=pieces.append).shape == (2, VOCAB_SIZE)
        assert runner.run(singles).shape == (1, VOCAB_SIZE)
        runner.copy_blocks([1, 2], [3, 4])
        runner.clear([5])

    steps()  # kernels are compiled
    runner.capture_decode(kernels, 4, CudaGraphs())
    steps()
    group.finish_step()
    request.getfixturevalue("no_waits")
    steps()


def test_a_gpu_that_is_not_done_is_waited_for_until_a_rank_is_gone(group: NcclGroup, board: RankBoard) -> None:
    group.begin_step()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # torch has no annotation
    group.finish_step()
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]  # torch has no annotation
    board.abandon()
    with pytest.raises(RankLost, match="is gone"):
        group.finish_step()
    torch.cuda.synchronize()
