"""Tests that observations are counted as prometheus_client counts them, and that buckets reach their limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from pdserve.metrics import BucketCounts, seconds_to, tokens_to
from tests.examples import examples

BOUNDS = (0.5, 1.0, 16384.0, 1e6)
VALUES = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 2e6))


@settings(max_examples=examples(50))
@given(st.lists(VALUES))
def test_counts_are_those_of_prometheus(values: list[float]) -> None:
    own, theirs = BucketCounts(BOUNDS), Histogram("h", "help", buckets=BOUNDS, registry=CollectorRegistry())
    for value in values:
        own.observe(value)
        theirs.observe(value)
    (expected,) = theirs.collect()
    assert [(s.name, s.labels, s.value) for s in own.family("h", "help").samples] == [
        (s.name, s.labels, s.value) for s in expected.samples if not s.name.endswith("_created")
    ]


def test_equal_values_are_counted_at_once() -> None:
    one_by_one, at_once = BucketCounts(BOUNDS), BucketCounts(BOUNDS)
    for _ in range(4):
        one_by_one.observe(0.75)
    at_once.observe_equal(3.0, 4)
    assert at_once.family("h", "").samples == one_by_one.family("h", "").samples


@pytest.mark.parametrize("limit_s", [0.1, 120.0, 121.0, 600.0, 601.0, 86_400.0])
def test_buckets_of_times_reach_the_timeout(limit_s: float) -> None:
    bounds = seconds_to(limit_s)
    assert bounds[-1] >= limit_s > (bounds[-2] if limit_s > 120 else 0)
    assert list(bounds) == sorted(set(bounds))


def test_buckets_of_tokens_reach_the_longest_context() -> None:
    assert tokens_to(1) == (1,)
    assert tokens_to(60) == (1, 2, 5, 10, 20, 50, 100)
    assert tokens_to(100) == (1, 2, 5, 10, 20, 50, 100)
    assert tokens_to(131_072)[-2:] == (100_000, 200_000)
