"""Small runners, and the greedy continuation of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
