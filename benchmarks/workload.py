"""Random requests of mixed lengths, which several studies send."""

from __future__ import annotations

import math
import random

from benchmarks.settings import WorkloadConfig
from pdserve.bench.load import Job, random_prompt


def mixed_jobs(workload: WorkloadConfig, count: int, seed: str) -> list[Job]:
    """Returns jobs of log-uniform lengths: many short ones and few long ones, as people's are."""
    source = random.Random(seed)  # noqa: S311  # the prompts must be repeatable, not secret
    return [
        Job(
            random_prompt(
                source,
                _log_uniform(source, workload.min_prompt_tokens, workload.max_prompt_tokens),
                workload.vocab_size,
            ),
            _log_uniform(source, workload.min_output_tokens, workload.max_output_tokens),
        )
        for _ in range(count)
    ]


def _log_uniform(source: random.Random, least: int, most: int) -> int:
    return min(most, round(math.exp(source.uniform(math.log(least), math.log(most)))))
