"""The requests of a benchmark: random prompts, the same for the same seed on every machine. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench_config import WorkloadConfig

_FIRST_ID = 3
"""The first few ids of most vocabularies are control tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: a prompt, and how many tokens its answer has whatever the model says."""

    prompt: Sequence[int]
    output_tokens: int


def uniform_jobs(count: int, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: str) -> list[Job]:
    """Jobs of equal lengths."""
    source = random.Random(seed)  # noqa: S311  # repeatable, not secret
    return [Job(_prompt(source, prompt_tokens, vocab_size), output_tokens) for _ in range(count)]


def mixed_jobs(workload: WorkloadConfig, count: int, seed: str) -> list[Job]:
    """Jobs of log-uniform lengths: many short ones, few long ones, as people's are."""
    source = random.Random(seed)  # noqa: S311  # repeatable, not secret
    return [
        Job(
            _prompt(
                source,
                _log_uniform(source, workload.min_prompt_tokens, workload.max_prompt_tokens),
                workload.vocab_size,
            ),
            _log_uniform(source, workload.min_output_tokens, workload.max_output_tokens),
        )
        for _ in range(count)
    ]


def _prompt(source: random.Random, tokens: int, vocab_size: int) -> list[int]:
    return [source.randrange(_FIRST_ID, vocab_size) for _ in range(tokens)]


def _log_uniform(source: random.Random, least: int, most: int) -> int:
    return min(most, round(math.exp(source.uniform(math.log(least), math.log(most)))))
