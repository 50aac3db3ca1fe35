"""Runs two ranks on two GPUs, sends one of them a signal during recorded steps, and prints what rank 0 reports."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from pdserve.config import Device
from pdserve.errors import RankLost
from pdserve.models.runner import CudaGraphs, StepRow
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.engine.started_ranks import engine_config
from tests.engine.test_tp_ranks import running


def main() -> None:
    folder, name = sys.argv[1:]
    kernels = TritonKernels.of(torch.device("cuda", 0))
    try:
        with running(engine_config(Path(folder), device=Device.CUDA)) as (ranks, runner):
            runner.run([StepRow([7], 0, [0], True)])
            runner.capture_decode(kernels, 64, CudaGraphs())
            runner.run([StepRow([7], 1, [0], True)])
            runner.warmed_up()
            os.kill(ranks.pids[0], signal.Signals[name])
            runner.run([StepRow([7], 2, [0], True)])
    except RankLost as exc:
        print(exc, flush=True)
        os._exit(0)
    os._exit(1)


if __name__ == "__main__":
    main()
