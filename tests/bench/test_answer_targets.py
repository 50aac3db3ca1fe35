"""Tests which answers are good."""

from __future__ import annotations

from pdserve.bench.answer_targets import AnswerTargets
from pdserve.bench.streamed_answer import Stream

TARGETS = AnswerTargets(1.0, 0.025)


def answer(first_s: float, *gaps_s: float, error: str = "") -> Stream:
    arrivals_s = [1.0 + first_s]
    for gap_s in gaps_s:
        arrivals_s.append(arrivals_s[-1] + gap_s)
    return Stream(1.0, arrivals_s, arrivals_s[-1], len(arrivals_s), error=error)


def test_an_answer_is_good_within_both_targets() -> None:
    for met in (TARGETS.met_in_mean, TARGETS.met_at_p99):
        assert met(answer(0.5, 0.02, 0.02))
        assert not met(answer(1.5, 0.02, 0.02))
        assert not met(answer(0.5, 0.03, 0.03))
        assert not met(answer(0.5, 0.02, error="broken off"))
        assert not met(Stream(1.0))


def test_a_stall_is_lost_in_the_mean_and_not_in_the_percentile() -> None:
    stalled = answer(0.5, *[0.01] * 20, 0.2)
    assert TARGETS.met_in_mean(stalled)
    assert not TARGETS.met_at_p99(stalled)


def test_an_answer_of_one_token_has_only_a_first_one() -> None:
    assert TARGETS.met_in_mean(answer(0.5))
    assert TARGETS.met_at_p99(answer(0.5))
    assert not TARGETS.met_at_p99(answer(1.5))
