"""Tests how the arrival times of chunks become TTFT, ITL, TPOT and the figures of a run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.load import take_chunk
from pdserve.bench.streamed_answer import AnswerTargets, Stream, distribution, summarise
from tests.bench.reports import stream


def test_the_times_of_one_answer() -> None:
    answer = stream(10.0, [10.5, 10.7, 11.1])
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.itls_s == pytest.approx([0.2, 0.4])
    assert answer.tpot_s == pytest.approx(0.3)
    assert answer.e2e_s == pytest.approx(1.1)


def test_tpot_counts_tokens_and_not_chunks() -> None:
    answer = Stream(0.0, [1.0, 2.0], 2.0, output_tokens=11)
    assert answer.tpot_s == pytest.approx(0.1)
    assert answer.itls_s == [1.0]


def test_an_answer_of_one_token_has_no_tpot() -> None:
    answer = stream(0.0, [1.0])
    assert answer.tpot_s is None
    assert answer.itls_s == []
    assert math.isnan(summarise([answer]).tpot_s.mean)


def test_a_run_from_its_first_request_to_its_last_end() -> None:
    failed = Stream(0.0, ended=9.0, error="status 503")
    result = summarise([stream(1.0, [2.0, 4.0]), stream(2.0, [5.0, 6.0, 7.0]), failed])
    assert (result.succeeded, result.failed, result.errors) == (2, 1, ("status 503",))
    assert result.duration_s == 9.0
    assert result.output_tokens_per_s == pytest.approx(5 / 9)
    assert result.requests_per_s == pytest.approx(2 / 9)
    assert result.ttft_s.mean == pytest.approx(2.0)
    assert result.itl_s.count == 3
    assert result.itl_s.maximum == 2.0


def test_what_lies_between_two_runs_counts_for_neither() -> None:
    result = summarise([stream(1.0, [2.0, 4.0])], [stream(100.0, [101.0, 102.0])])
    assert result.duration_s == 5.0
    assert result.output_tokens_per_s == pytest.approx(4 / 5)


def test_nothing_answered_is_no_division_by_zero() -> None:
    result = summarise([])
    assert result.output_tokens_per_s == 0.0
    assert math.isnan(result.ttft_s.p99)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_numpys(values: list[float]) -> None:
    found = distribution(values)
    assert found.p99 == pytest.approx(float(np.percentile(values, 99)))
    assert found.p50 == pytest.approx(float(np.median(values)))
    assert found.mean == pytest.approx(sum(values) / len(values))


def test_which_chunks_bring_a_token() -> None:
    answer = Stream(0.0)
    for now, payload in enumerate(
        [
            b'{"choices": [{"index": 0, "text": "", "finish_reason": null}]}',  # This chunk has half a character.
            b'{"choices": [{"index": 0, "text": "a", "token_ids": [5, 6]}]}',
            b'{"choices": [{"index": 0, "text": "b", "finish_reason": "length", "token_ids": [7]}]}',
            b'{"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}',
            b'{"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 1}}',
        ]
    ):
        take_chunk(answer, payload, float(now))
    assert answer.arrivals == [0.0, 1.0, 2.0]
    assert answer.token_ids == [5, 6, 7]
    assert answer.output_tokens == 4
    assert not answer.error


def test_an_error_event_is_the_streams_error() -> None:
    answer = Stream(0.0)
    take_chunk(answer, b'{"error": {"message": "no node"}}', 1.0)
    assert "no node" in answer.error
    assert not answer.arrivals


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
