from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.sampler import SORTED_CANDIDATES, sample
from pdserve.wire.sampling import SamplingParams


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1, "seed": 7} | changes))


def drawn(logits: torch.Tensor, count: int = 400, **changes: Any) -> Counter[int | None]:
    """How often each token comes, over positions of one request."""
    return Counter(sample(logits.unsqueeze(0), [params(**changes)], [position])[0] for position in range(count))


def test_greedy_takes_the_best() -> None:
    logits = torch.randn(5, 100)
    assert sample(logits, [params(temperature=0.0)] * 5, range(5)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e-4])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(50)
    assert set(drawn(logits, 20, temperature=temperature)) == {int(logits.argmax())}


def test_frequencies_follow_the_distribution() -> None:
    wanted = torch.tensor([0.5, 0.3, 0.2])
    counts = drawn(wanted.log(), 3000)
    for token, probability in enumerate(wanted.tolist()):
        assert abs(counts[token] / 3000 - probability) < 0.04


def test_temperature_flattens() -> None:
    logits = torch.tensor([0.9, 0.1]).log()
    assert drawn(logits, 1000, temperature=5.0)[1] > drawn(logits, 1000)[1]


def test_top_k_keeps_k() -> None:
    assert set(drawn(torch.tensor([3.0, 1.0, 2.9, 2.8, 0.0]), top_k=3)) == {0, 2, 3}


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    logits = torch.tensor([0.1, 0.45, 0.15, 0.3]).log()
    assert set(drawn(logits, top_p=0.5)) == {1, 3}
    assert set(drawn(logits, top_p=0.4)) == {1}


def test_top_p_over_a_flat_vocabulary_looks_beyond_the_first_candidates() -> None:
    size = 2 * SORTED_CANDIDATES[-1]
    tokens = drawn(torch.zeros(size), 1500, top_p=0.9)
    assert len(tokens) > SORTED_CANDIDATES[0]


def test_min_p_is_relative_to_the_best() -> None:
    assert set(drawn(torch.tensor([0.6, 0.25, 0.1, 0.05]).log(), min_p=0.4)) == {0, 1}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 1000),
    st.floats(0.1, 3),
    st.floats(0.05, 1),
    st.integers(0, 60),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_a_token_does_not_depend_on_batch_mates(
    seed: int, position: int, temperature: float, top_p: float, top_k: int, min_p: float, torch_seed: int
) -> None:
    torch.manual_seed(torch_seed)
    logits = torch.randn(3, 50) * 3
    mine = params(seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    alone = sample(logits[1:2], [mine], [position])
    together = sample(logits, [params(seed=1), mine, params(temperature=0.0)], [5, position, 6])
    assert together[1:2] == alone


def test_seeds_and_positions_differ() -> None:
    logits = torch.zeros(1, 10_000)
    tokens = {sample(logits, [params(seed=seed)], [position])[0] for seed in range(10) for position in range(10)}
    assert len(tokens) > 95


TINY = [0.0, 1e-320, 1e-40, 1e-6]


@pytest.mark.parametrize("temperature", [*TINY, 0.5, 2.0])
@pytest.mark.parametrize("top_p", [*TINY[1:], 0.5, 1.0])
@pytest.mark.parametrize("min_p", [*TINY, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 2**62])
def test_every_valid_parameter_gives_a_token(temperature: float, top_p: float, min_p: float, top_k: int) -> None:
    logits = torch.tensor([[0.0, 5.0, -3.0, 4.9]])
    chosen = params(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    (token,) = sample(logits, [chosen], [0])
    assert token in range(4)
    if min(temperature, top_p) < 1e-6 or min_p == 1.0 or top_k == 1:
        assert token == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(bad: float, temperature: float) -> None:
    healthy = [1.0, 2.0, 9.0, 3.0]
    logits = torch.tensor([healthy, [bad] * 4, healthy])
    assert sample(logits, [params(temperature=temperature, top_k=1)] * 3, [0, 0, 0]) == [2, None, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_nan_among_logits_is_enough(temperature: float) -> None:
    assert sample(torch.tensor([[1.0, float("nan"), 2.0]]), [params(temperature=temperature)], [0]) == [None]


def test_forbidden_tokens_are_no_reason_to_fail() -> None:
    assert sample(torch.tensor([[1.0, float("-inf"), 2.0]]), [params(top_k=1)], [0]) == [2]
