"""Small runners, the greedy continuation of one prompt, and a token whose numbers are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pdserve.config import Dtype
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import ModelRunner, StepRow
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.grouped_runner import GroupedRunner


def small_runner(path: Path, dtype: Dtype = Dtype.FP32, block_size: int = 4) -> GroupedRunner:
    """Returns a runner of the model at ``path`` with room for 128 tokens."""
    return GroupedRunner(path, read_decoder_config(path), dtype, block_size, 128 // block_size, 128, TorchKernels())


def greedy_tokens(runner: ModelRunner, prompt: Sequence[int], count: int, chunk: int = 64) -> list[int]:
    """Returns the ``count`` likeliest tokens one after another. The prompt is computed ``chunk`` tokens at a time."""
    blocks = range(runner.kv_cache.shape[0])
    for start in range(0, len(prompt), chunk):
        logits = runner.run([StepRow(prompt[start : start + chunk], start, blocks, True)])
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        logits = runner.run([StepRow(tokens[-1:], len(prompt) + len(tokens) - 1, blocks, True)])
        tokens.append(int(logits.argmax()))
    return tokens


def assert_not_finite_stays_in_its_request(folder: Path, prompt: Sequence[int]) -> None:
    """Makes token 7 of the saved model no number, and computes a prompt without it beside two that have it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    finite = [token for token in prompt if token != 7]
    alone = small_runner(folder).run([StepRow(finite, 0, range(16), True)])
    beside = small_runner(folder).run(
        [
            StepRow([7], 0, range(31, 32), True),
            StepRow(finite, 0, range(16), True),
            StepRow([9, 7] * 9, 0, range(16, 31), True),
        ]
    )
    assert beside.isfinite().all(-1).tolist() == [False, True, False]
    torch.testing.assert_close(beside[1:2], alone, rtol=1e-4, atol=1e-4)
