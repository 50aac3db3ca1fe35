"""Tests that log probabilities are the model's own, whatever else the request asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.wire.sampling_params import SampledToken, SamplingParams, TokenLogprobs
from tests.examples import examples


def chosen(logits: torch.Tensor, *counts: int | None, **changes: Any) -> list[SampledToken]:
    rows = [
        SamplingRow(SamplingParams(max_tokens=9, seed=i, logprobs=count, **changes), [1], 1)
        for i, count in enumerate(counts)
    ]
    tokens = [token for token in sample(logits, rows) if token is not None]
    assert len(tokens) == len(counts)
    return tokens


@settings(max_examples=examples(80))
@given(st.lists(st.none() | st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.booleans())
def test_they_are_those_of_log_softmax(counts: list[int | None], torch_seed: int, coarse: bool) -> None:
    torch.manual_seed(torch_seed)
    logits = torch.randn(len(counts), 25) * 4
    if coarse:
        logits = logits.round()
    for own, count, token in zip(logits.log_softmax(-1), counts, chosen(logits, *counts), strict=True):
        if count is None:
            assert token.logprobs is None
            continue
        assert token.logprobs is not None
        values = own.tolist()
        assert token.logprobs.chosen == pytest.approx(values[token.token_id], abs=1e-5)
        assert token.logprobs.rank == 1 + sum(value > values[token.token_id] for value in values)
        best = sorted(range(25), key=lambda i: (-values[i], i))[:count]
        assert [token_id for token_id, _ in token.logprobs.top] == best
        assert [logprob for _, logprob in token.logprobs.top] == pytest.approx([values[i] for i in best], abs=1e-5)


def test_they_are_the_models_own() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    (plain,) = chosen(logits, 4, temperature=0.0)
    (bent,) = chosen(
        logits, 4, temperature=1.7, logit_bias=((2, 100.0),), top_k=1, allowed_token_ids=(2, 3), repetition_penalty=2.0
    )
    assert (plain.token_id, bent.token_id) == (0, 2)
    assert plain.logprobs is not None
    assert bent.logprobs is not None
    assert bent.logprobs.top == plain.logprobs.top
    assert (bent.logprobs.rank, bent.logprobs.chosen) == (3, plain.logprobs.top[2][1])


@settings(deadline=None)
@given(
    st.lists(st.none() | st.lists(st.integers(0, 24), unique=True, max_size=25), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_named_tokens_are_reported_in_place_of_the_likeliest(named: list[list[int] | None], torch_seed: int) -> None:
    torch.manual_seed(torch_seed)
    logits = torch.randn(len(named), 25) * 4
    plain = chosen(logits, *[None if ids is None else 25 for ids in named])
    params = [
        SamplingParams(max_tokens=9, seed=i, logprobs=None if ids is None else 3, logprob_token_ids=tuple(ids or ()))
        for i, ids in enumerate(named)
    ]
    tokens = sample(logits, [SamplingRow(each, [1], 1) for each in params])
    for ids, whole, token in zip(named, plain, tokens, strict=True):
        assert token is not None
        assert token.token_id == whole.token_id
        if whole.logprobs is None or token.logprobs is None:
            assert (ids, whole.logprobs, token.logprobs) == (None, None, None)
            continue
        kept = tuple(pair for pair in whole.logprobs.top if pair[0] in ids) if ids else whole.logprobs.top[:3]
        assert token.logprobs == TokenLogprobs(whole.logprobs.chosen, whole.logprobs.rank, kept)


def test_a_token_that_the_model_rules_out_has_no_probability() -> None:
    (token,) = chosen(torch.tensor([[1.0, float("-inf")]]), 2, temperature=0.0)
    assert token.logprobs is not None
    assert token.logprobs.top == ((0, 0.0), (1, float("-inf")))
