"""Tests when requests come at a rate, and what the turns of a session say."""

from __future__ import annotations

import itertools
import statistics

import pytest

from pdserve.bench.load import Job, Session, Turn, at_rate, random_sessions
from pdserve.config.bench import LoadConfig

RATE = 20.0
ONE = Session((Turn(Job([1], 1)),))


def gaps_of(burstiness: float, seed: str = "a", count: int = 4000) -> list[float]:
    times = [session.at_s for session in at_rate([ONE] * count, RATE, burstiness, seed)]
    assert times[0] == 0.0
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_the_rate_is_kept_and_the_burstiness_is_the_shape(burstiness: float) -> None:
    gaps = gaps_of(burstiness)
    assert statistics.fmean(gaps) == pytest.approx(1 / RATE, rel=0.1)
    # The standard deviation of a gamma distribution is its mean divided by the root of its shape.
    assert statistics.stdev(gaps) * RATE == pytest.approx(burstiness**-0.5, rel=0.1)


def test_a_seed_gives_the_same_times() -> None:
    assert gaps_of(1.0, "a", 20) == gaps_of(1.0, "a", 20) != gaps_of(1.0, "b", 20)


def test_random_prompts_are_those_of_their_seed_and_no_two_are_alike() -> None:
    load = LoadConfig(prompt_tokens=8, output_tokens=3)
    first, again, other = ([turn.job for s in random_sessions(load, 4, seed) for turn in s.turns] for seed in "aab")
    assert first == again
    prompts = [tuple(job.prompt) for job in (*first, *other)]
    assert len(set(prompts)) == 8


def test_a_turn_that_continues_sends_what_was_said_before() -> None:
    said = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    new = {"role": "user", "content": "c"}
    job = Job((), 4, messages=(new,))
    assert Turn(job, continues=True).after(said).messages == (*said, new)
    assert Turn(job).after(said) == job
