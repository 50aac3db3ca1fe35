"""Tests tensor parallelism over NCCL: rank 0 runs in this process, rank 1 in another one, each on its own GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdserve.config import Device
from pdserve.engine.runner_loading import load_runner, rank_backend
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import CudaGraphs, StepRow
from pdserve.models.tp.shares import ALONE
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.engine.started_ranks import engine_config
from tests.engine.test_tp_ranks import BLOCKS, running
from tests.tiny_models import save_tiny_model

PROMPT = list(range(20, 31))
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def test_tokens_are_those_of_one_rank(folder: Path) -> None:
    config = engine_config(folder, device=Device.CUDA)
    alone = load_runner(config, read_decoder_config(folder), (BLOCKS,), 64, ALONE, rank_backend(config, CUDA))
    kernels = TritonKernels.of(CUDA)
    with running(config) as (_, runner):
        prompt = StepRow(PROMPT, 0, range(8), True)
        torch.testing.assert_close(runner.run([prompt]), alone.run([prompt]), rtol=1e-4, atol=1e-3)
        for i in range(8):
            if i == 4:
                runner.capture_decode(kernels, 64, CudaGraphs())
            row = StepRow([40 + i], len(PROMPT) + i, range(8), True)
            torch.testing.assert_close(runner.run([row]), alone.run([row]), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("signal", "why"),
    [
        ("SIGKILL", r"rank 1 \(process \d+\) was killed by SIGKILL"),
        ("SIGSTOP", r"rank 1 hangs: no sign of it for 1\.0 s"),
    ],
)
def test_a_lost_rank_is_named(folder: Path, signal: str, why: str) -> None:
    # The program has a process of its own, so that work that waits on its GPU ends with it.
    command = [sys.executable, "-m", "tests.gpu.loss_program", str(folder), signal]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=200, check=True)
    assert re.search(why, found.stdout)
