"""Tests that a seed always gives the same requests, with lengths within the range that was asked for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.settings import WorkloadConfig
from benchmarks.workload import mixed_jobs
from pdserve.bench.load import uniform_jobs
from tests.examples import examples


def test_a_seed_gives_the_same_jobs_and_another_one_others() -> None:
    work = WorkloadConfig()
    assert mixed_jobs(work, 8, "a") == mixed_jobs(work, 8, "a")
    assert mixed_jobs(work, 8, "a") != mixed_jobs(work, 8, "b")


@settings(max_examples=examples(30))
@given(st.integers(1, 50), st.integers(0, 300), st.text(max_size=4))
def test_lengths_and_ids_stay_within_bounds(least: int, more: int, seed: str) -> None:
    work = WorkloadConfig(
        min_prompt_tokens=least,
        max_prompt_tokens=least + more,
        min_output_tokens=least,
        max_output_tokens=least + more,
        vocab_size=100,
    )
    for job in mixed_jobs(work, 20, seed):
        assert least <= len(job.prompt) <= least + more
        assert least <= job.output_tokens <= least + more
        assert all(isinstance(token, int) and 3 <= token < 100 for token in job.prompt)


def test_most_answers_are_short() -> None:
    lengths = sorted(job.output_tokens for job in mixed_jobs(WorkloadConfig(), 1000, "x"))
    assert lengths[500] < (lengths[0] + lengths[-1]) / 3


def test_uniform_jobs() -> None:
    jobs = uniform_jobs(3, 7, 5, 100, "s")
    assert [(len(job.prompt), job.output_tokens) for job in jobs] == [(7, 5)] * 3
    assert len({tuple(job.prompt) for job in jobs}) == 3
