"""What several studies send: random requests of mixed lengths, and requests that come at their times."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.settings import WorkloadConfig
from pdserve.bench.load import Job, Target, connected, random_prompt, run_job
from pdserve.bench.streamed_answer import Stream


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


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, with the time when it is sent, in seconds from the beginning."""

    at_s: float
    job: Job


async def run_arrivals(target: Target, arrivals: Sequence[Arrival]) -> list[Stream]:
    """Returns the streams of all ``arrivals``, which are in the order of their times. Limits are as in ``run_jobs``."""
    streams = [Stream(0.0) for _ in arrivals]
    async with connected() as (session, clients):
        began = time.monotonic()
        for arrival, stream in zip(arrivals, streams, strict=True):
            await asyncio.sleep(max(0.0, began + arrival.at_s - time.monotonic()))
            clients.create_task(run_job(session, target, arrival.job, stream))
    return streams
