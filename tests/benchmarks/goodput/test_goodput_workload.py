"""Tests the requests of ``benchmarks goodput`` and when they come."""

from __future__ import annotations

from itertools import count, islice

import pytest

from benchmarks.goodput.workload import jobs_until, poisson_arrivals, shape_jobs
from benchmarks.settings import WorkloadConfig

WORK = WorkloadConfig(min_prompt_tokens=4, max_prompt_tokens=40, min_output_tokens=2, max_output_tokens=9)


def test_a_shape_is_the_numbers_of_its_tokens() -> None:
    jobs = shape_jobs("12/3", WORK, 5, "x")
    assert [(len(job.prompt), job.output_tokens) for job in jobs] == [(12, 3)] * 5
    assert jobs == shape_jobs("12/3", WORK, 5, "x")


def test_a_mix_keeps_to_its_bounds() -> None:
    jobs = shape_jobs("mix", WORK, 200, "x")
    assert {len(job.prompt) for job in jobs} <= set(range(4, 41))
    assert {job.output_tokens for job in jobs} == set(range(2, 10))


def test_no_prompt_comes_twice() -> None:
    ticks = count()
    closed = list(jobs_until("12/3", WORK, 10.0, "a", lambda: float(next(ticks))))
    again = list(islice(jobs_until("12/3", WORK, 60.0, "b"), 10))
    opened = [arrival.job for arrival in poisson_arrivals("12/3", WORK, 2.0, 5.0, "c")]
    prompts = [tuple(job.prompt) for job in (*closed, *again, *opened)]
    assert len(set(prompts)) == len(prompts) == 30


def test_requests_end_by_the_clock_and_there_is_at_least_one() -> None:
    ticks = count()
    assert len(list(jobs_until("12/3", WORK, 4.0, "x", lambda: float(next(ticks))))) == 4
    assert len(list(jobs_until("12/3", WORK, 0.0, "x", lambda: 0.0))) == 1


@pytest.mark.parametrize(("rate", "seconds", "requests"), [(2.0, 10.0, 20), (0.01, 1.0, 1), (3.0, 0.5, 2)])
def test_as_many_arrive_as_the_rate_has_and_in_order(rate: float, seconds: float, requests: int) -> None:
    arrivals = poisson_arrivals("12/3", WORK, rate, seconds, "x")
    times = [arrival.at_s for arrival in arrivals]
    assert len(times) == requests
    assert times == sorted(times)
    assert times[0] >= 0 and times[-1] <= seconds
    assert arrivals == poisson_arrivals("12/3", WORK, rate, seconds, "x")
    assert times != [arrival.at_s for arrival in poisson_arrivals("12/3", WORK, rate, seconds, "y")]
