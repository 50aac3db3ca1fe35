"""Tests on a GPU that steps which are launched ahead of their tokens, also recorded ones, change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pdserve.config import Dtype
from pdserve.models.checkpoint.decoder_config import read_decoder_config
from pdserve.models.runner import CudaGraphs, ModelRunner
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.engine.test_step_loop import BLOCK_SIZE, MAX_LEN, engine, prompt
from tests.tiny_models import save_tiny_model

CUDA = torch.device("cuda", 0)
NUM_BLOCKS = 256
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
]
RULED: list[dict[str, Any]] = [{"temperature": 0.0, "repetition_penalty": 1.3}, {"temperature": 0.9, "logprobs": 2}]
"""These parameters need their tokens on the host, so steps with them are not launched ahead."""


def make_runner(folder: Path, captured: bool) -> ModelRunner:
    kernels = TritonKernels(torch.cuda.get_device_properties(CUDA).multi_processor_count)
    runner = ModelRunner(
        folder, read_decoder_config(folder), Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, kernels, CUDA
    )
    if captured:
        runner.capture_decode(kernels, 8, CudaGraphs())
    return runner


def answers(runner: ModelRunner, folder: Path, overlap: bool) -> list[list[int]]:
    found = []
    with engine(folder, overlap, num_blocks=NUM_BLOCKS, own_runner=runner) as client:
        for parameters in (PARAMETERS, PARAMETERS + RULED):
            asked = [
                (prompt(5 + 9 * i), SamplingParams(seed=i, max_tokens=20 + 7 * i, ignore_eos=True, **own), ())
                for i, own in enumerate(parameters)
            ]
            found += [answer.tokens for answer in client.together(asked).values()]
    return found


def test_steps_ahead_of_their_tokens_give_the_same_answers(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    wanted = answers(make_runner(folder, captured=False), folder, overlap=False)
    for captured in (False, True):
        assert answers(make_runner(folder, captured), folder, overlap=True) == wanted
