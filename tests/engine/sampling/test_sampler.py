"""Tests which token is sampled: greedily or at random, and the same whatever else is in the batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.sampling import filters, sampling_row, token_choice
from pdserve.engine.sampling.filters import BEST_FEW
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.wire.sampling_params import SamplingParams
from tests.examples import examples

VOCAB = 50
EOS = frozenset({3, 4})


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 1, "seed": 7} | changes))


def row(position: int = 0, **changes: Any) -> SamplingRow:
    """Returns a row of a request with two tokens of prompt."""
    return SamplingRow(params(**changes), [1, 2, *range(position)], 2)


def ids(logits: torch.Tensor, *rows: SamplingRow) -> list[int | None]:
    return [None if token is None else token.token_id for token in sample(logits, rows, EOS)]


def drawn(logits: torch.Tensor, count: int = 400, **changes: Any) -> Counter[int | None]:
    """Returns how often each token is sampled over positions of one request."""
    rows = [row(position, **changes) for position in range(count)]
    return Counter(ids(logits.expand(count, -1), *rows))


def test_greedy_takes_the_best() -> None:
    logits = torch.randn(5, 100)
    assert ids(logits, *[row(temperature=0.0)] * 5) == logits.argmax(-1).tolist()


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


def test_top_p_over_a_flat_vocabulary_takes_its_share() -> None:
    tokens = drawn(torch.zeros(1000), 3000, top_p=0.9)
    assert len(tokens) > BEST_FEW
    assert max(token for token in tokens if token is not None) < 900, "of equals those with the lowest ids"


def by_sorting(weights: torch.Tensor, share: float) -> torch.Tensor:
    """Returns the nucleus by the definition of top-p."""
    wide = weights.double()
    best, order = wide.sort(descending=True, stable=True)
    inside = best.cumsum(-1) - best < share * wide.sum()
    inside[0] = True
    kept = torch.zeros_like(weights)
    kept[order[inside]] = weights[order[inside]]
    return kept


@settings(max_examples=examples(150))
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 63, 64, 65, 700]),
    st.sampled_from([0.0, 0.01, 0.5, 5.0, 100.0]),
    st.lists(st.floats(0.001, 0.999999), min_size=1, max_size=4),
    st.booleans(),
)
def test_top_p_is_what_sorting_gives(
    torch_seed: int, size: int, spread: float, shares: list[float], coarse: bool
) -> None:
    torch.manual_seed(torch_seed)
    logits = torch.randn(len(shares), size) * spread
    if coarse:  # Many tokens are equal then, as in bf16.
        logits = logits.bfloat16().float()
    weights = logits.softmax(-1)
    kept = filters.filter_rows(weights.clone(), logits, [params(top_p=share) for share in shares])
    for own, share, result in zip(weights, shares, kept, strict=True):
        assert torch.equal(result, by_sorting(own, share))


def test_min_p_is_relative_to_the_best() -> None:
    assert set(drawn(torch.tensor([0.6, 0.25, 0.1, 0.05]).log(), min_p=0.4)) == {0, 1}


PARAMETERS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 7]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "min_tokens": st.sampled_from([0, 4]),
        "presence_penalty": st.sampled_from([0.0, -1.5, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.3]),
        "logit_bias": st.sampled_from([(), ((5, 100.0),), ((0, -2.0), (49, 1.5))]),
        "allowed_token_ids": st.sampled_from([(), tuple(range(0, VOCAB, 3))]),
        "bad_words": st.sampled_from([(), ((7,), (1, 2))]),
        "stop_token_ids": st.sampled_from([(), (9,)]),
        "logprobs": st.sampled_from([None, 0, 5]),
    }
)


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(PARAMETERS, st.integers(0, 8)), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_a_token_does_not_depend_on_batch_mates(rows: list[tuple[dict[str, Any], int]], torch_seed: int) -> None:
    torch.manual_seed(torch_seed)
    logits = torch.randn(len(rows), VOCAB) * 3
    before = logits.clone()
    batch = [row(position, **changes) for changes, position in rows]
    together = sample(logits, batch, EOS)
    assert together == [sample(logits[i : i + 1], batch[i : i + 1], EOS)[0] for i in range(len(rows))]
    assert torch.equal(logits, before)


def test_a_token_does_not_depend_on_how_rows_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    logits = torch.randn(12, 40_000) * torch.linspace(0.1, 4, 12).unsqueeze(1)
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.02}]
    rows = [row(i, seed=i, **kinds[i % 4]) for i in range(12)]
    grouped = []
    for at_once in (1, 100_000, 10**9):
        monkeypatch.setattr(sampling_row, "CPU_LOGITS_AT_ONCE", at_once)
        grouped.append(ids(logits, *rows))
    assert grouped[0] == grouped[1] == grouped[2]
    assert len(set(grouped[0])) > 6


def test_seeds_and_positions_differ() -> None:
    logits = torch.zeros(1, 10_000)
    tokens = {ids(logits, row(position, seed=seed))[0] for seed in range(10) for position in range(10)}
    assert len(tokens) > 95


TINY = [0.0, 1e-320, 1e-40, 1e-6]


@pytest.mark.parametrize("temperature", [*TINY, 0.5, 2.0])
@pytest.mark.parametrize("top_p", [*TINY[1:], 0.5, 1.0])
@pytest.mark.parametrize("min_p", [*TINY, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 2**62])
def test_every_valid_parameter_gives_a_token(temperature: float, top_p: float, min_p: float, top_k: int) -> None:
    logits = torch.tensor([[0.0, 5.0, -3.0, 4.9]])
    (token,) = ids(logits, row(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k))
    assert token in range(4)
    if min(temperature, top_p) < 1e-6 or min_p == 1.0 or top_k == 1:
        assert token == 1


def test_the_least_share_is_the_best_token() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 6] = 0.1
    assert ids(logits, row(top_p=5e-324, top_k=1)) == [6]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_token(bad: float, temperature: float) -> None:
    healthy = [1.0, 2.0, 9.0, 3.0]
    logits = torch.tensor([healthy, [bad] * 4, healthy])
    assert ids(logits, *[row(temperature=temperature, top_k=1, logprobs=1)] * 3) == [2, None, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_nan_among_logits_is_enough(temperature: float) -> None:
    assert ids(torch.tensor([[1.0, float("nan"), 2.0]]), row(temperature=temperature)) == [None]


def test_forbidden_tokens_are_no_reason_to_fail() -> None:
    assert ids(torch.tensor([[1.0, float("-inf"), 2.0]]), row(top_k=1)) == [2]


def test_a_zero_of_either_sign_is_the_same() -> None:
    logits = torch.tensor([[-0.0, 0.0, -9.0]])
    assert {ids(logits, row(i, top_p=0.9, top_k=2))[0] for i in range(40)} == {0, 1}


def test_block_edges_let_no_forbidden_token_through() -> None:
    """Inverts the distribution at a number at the very edge of a block, give or take a rounding."""
    block = token_choice.INVERSION_BLOCK
    for torch_seed in range(100):
        torch.manual_seed(torch_seed)
        logits = torch.rand(1, 8 * block).log()
        logits[:, ::block] = float("-inf")
        ends = logits.softmax(-1).view(-1, block).sum(-1).double().cumsum(-1)
        edges = (ends / ends[-1])[:-1].tolist()
        tokens = token_choice.draw(logits.repeat(len(edges), 1), [params()] * len(edges), edges)
        assert all(token % block for token in tokens)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_only_what_may_be_drawn_is_drawn(size: int) -> None:
    """The distribution is inverted by blocks, and no block's edge lets a forbidden token through."""
    torch.manual_seed(size)
    logits = torch.full((size,), float("-inf"))
    open_ids = set(torch.randperm(size)[: max(size // 100, 1)].tolist())
    logits[list(open_ids)] = 0.0
    assert set(drawn(logits, 600)) == open_ids
