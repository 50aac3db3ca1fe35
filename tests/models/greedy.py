"""Greedy continuation by a runner alone."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.models.runner import ModelRunner
from pdserve.models.step_batch import StepRow


def greedy_tokens(runner: ModelRunner, prompt: Sequence[int], count: int, chunk: int = 64) -> list[int]:
    """The ``count`` likeliest tokens one after another, with the prompt computed ``chunk`` tokens at a time."""
    blocks = range(runner.kv_cache.shape[0])
    for start in range(0, len(prompt), chunk):
        logits = runner.run([StepRow(prompt[start : start + chunk], start, blocks, True)])
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        logits = runner.run([StepRow(tokens[-1:], len(prompt) + len(tokens) - 1, blocks, True)])
        tokens.append(int(logits.argmax()))
    return tokens
