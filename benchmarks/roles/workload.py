"""The requests of ``benchmarks roles``: phases of long prompts and phases of long answers, by turns."""

from __future__ import annotations

import random

from benchmarks.settings import RolesBenchConfig
from pdserve.bench.load import Arrival, uniform_jobs


def arrivals(config: RolesBenchConfig) -> list[Arrival]:
    """Returns the requests of all phases, which come independently of each other (a Poisson process)."""
    source = random.Random(f"roles:{config.seed}")  # noqa: S311  # the times must be repeatable, not secret
    shapes = [
        (config.prompt_rate, config.long_prompt, config.short_answer),
        (config.answer_rate, config.short_prompt, config.long_answer),
    ]
    found: list[Arrival] = []
    for phase in range(2 * config.cycles):
        rate, prompt_tokens, output_tokens = shapes[phase % 2]
        at_s, end_s = phase * config.phase_s, (phase + 1) * config.phase_s
        times = []
        while (at_s := at_s + source.expovariate(rate)) < end_s:
            times.append(at_s)
        jobs = uniform_jobs(len(times), prompt_tokens, output_tokens, config.vocab_size, f"roles:{config.seed}:{phase}")
        found += [Arrival(at_s, job) for at_s, job in zip(times, jobs, strict=True)]
    return found
