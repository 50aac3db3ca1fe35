"""Tests the rate that an engine measures of itself."""

from __future__ import annotations

import pytest

from pdserve.engine.placement.prefill_rate import PRIOR_TOKENS_PER_S, PrefillRate


def test_before_the_first_prompt_the_rate_is_assumed() -> None:
    rate = PrefillRate()
    assert not rate.known
    assert rate.tokens_per_s == PRIOR_TOKENS_PER_S
    rate.step(0, 3, 0.02, 1.0)
    assert not rate.known
    assert rate.decode_step_s == pytest.approx(0.02)


def test_the_first_step_counts_in_full_and_later_ones_move_it() -> None:
    rate = PrefillRate()
    rate.step(256, 0, 0.128, 1.0)
    assert rate.measured_at == 1.0
    assert rate.tokens_per_s == pytest.approx(2000)
    for now in range(20):
        rate.step(256, 0, 0.256, float(now))
    assert 1000 <= rate.tokens_per_s < 1020


def test_the_time_of_those_that_decode_beside_it_is_not_the_prompts() -> None:
    rate = PrefillRate()
    for _ in range(10):
        rate.step(0, 8, 0.02, 0.0)
    rate.step(200, 8, 0.12, 1.0)
    assert rate.tokens_per_s == pytest.approx(2000)


def test_steps_of_a_few_tokens_say_little() -> None:
    rate = PrefillRate()
    rate.step(256, 0, 0.128, 1.0)
    for _ in range(100):
        rate.step(2, 0, 0.01, 2.0)
    assert rate.measured_at == 1.0
    assert rate.tokens_per_s == pytest.approx(2000)


def test_a_step_without_time_is_no_measurement() -> None:
    rate = PrefillRate()
    rate.step(256, 0, 0.0, 1.0)
    assert not rate.known
