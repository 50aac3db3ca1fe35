"""Tests penalties, bias and bans, each against its definition and against transformers where that has the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from pdserve.engine.sampling.logit_rules import _array, _Identity, apply_rules, has_own_rules
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.wire.sampling_params import SamplingParams
from tests.examples import examples

VOCAB = 12
EOS = frozenset({2, 9})
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=10)
RULES = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, -2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, -1.0, 0.25]),
        "repetition_penalty": st.sampled_from([1.0, 0.8, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4).map(
            lambda biases: tuple(biases.items())
        ),
        "allowed_token_ids": st.sets(st.integers(0, VOCAB - 1), max_size=4).map(tuple),
        "bad_words": st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), max_size=3).map(
            tuple
        ),
        "min_tokens": st.integers(0, 8),
        "stop_token_ids": st.sets(st.integers(0, VOCAB - 1), max_size=2).map(tuple),
        "ignore_eos": st.booleans(),
    }
)


def row_of(prompt: list[int], answer: list[int], **rules: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=100, seed=1, **rules), prompt + answer, len(prompt))


def meaning(logits: list[float], prompt: list[int], answer: list[int], rules: dict[str, Any]) -> list[float]:
    """Applies the penalties to one token at a time, as the documents define them."""
    result = []
    for token, given_logit in enumerate(logits):
        logit = given_logit
        if token in prompt + answer:
            logit = logit / rules["repetition_penalty"] if logit > 0 else logit * rules["repetition_penalty"]
        logit -= rules["frequency_penalty"] * answer.count(token)
        if token in answer:
            logit -= rules["presence_penalty"]
        logit += dict(rules["logit_bias"]).get(token, 0.0)
        result.append(logit)
    allowed = set(rules["allowed_token_ids"] or range(len(logits)))
    banned = {word[-1] for word in rules["bad_words"] if ends_with(answer, word[:-1])}
    if len(answer) < rules["min_tokens"]:
        banned |= set(rules["stop_token_ids"]) | (set() if rules["ignore_eos"] else EOS)
    choice = allowed - banned or allowed
    return [logit if token in choice else float("-inf") for token, logit in enumerate(result)]


def ends_with(tokens: list[int], ending: tuple[int, ...]) -> bool:
    return not ending or tuple(tokens[-len(ending) :]) == ending


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(TOKENS, TOKENS, RULES), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_rules_mean_what_they_say(rows: list[tuple[list[int], list[int], dict[str, Any]]], torch_seed: int) -> None:
    torch.manual_seed(torch_seed)
    logits = torch.randn(len(rows), VOCAB) * 4
    wanted = [meaning(own.tolist(), *row) for own, row in zip(logits, rows, strict=True)]
    changed = apply_rules(logits.clone(), [row_of(prompt, answer, **rules) for prompt, answer, rules in rows], EOS)
    torch.testing.assert_close(changed, torch.tensor(wanted), atol=1e-4, rtol=1e-5)


@settings(max_examples=examples(100))
@given(TOKENS, TOKENS, RULES, st.integers(0, 2**32 - 1))
def test_rows_without_rules_are_left_alone(
    prompt: list[int], answer: list[int], rules: dict[str, Any], torch_seed: int
) -> None:
    torch.manual_seed(torch_seed)
    logits = torch.randn(1, VOCAB)
    row = row_of(prompt, answer, **rules)
    if not has_own_rules(row):
        assert torch.equal(apply_rules(logits.clone(), [row], EOS), logits)


def test_plain_requests_have_no_rules() -> None:
    assert not has_own_rules(row_of([1], [2, 3], temperature=0.7, top_p=0.5, stop_token_ids=(3,), logprobs=5))
    assert not has_own_rules(row_of([1], [2, 3], min_tokens=2)), "enough are there"
    assert has_own_rules(row_of([1], [2, 3], min_tokens=3))


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    torch.manual_seed(3)
    tokens = torch.randint(0, 200, (6, 40))
    logits = torch.randn(6, 200) * 3
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    rows = [row_of(own[:25], own[25:], repetition_penalty=penalty, temperature=0.0) for own in tokens.tolist()]
    torch.testing.assert_close(apply_rules(logits.clone(), rows, EOS), wanted)
    chosen = [token.token_id for token in sample(logits, rows, EOS) if token is not None]
    assert chosen == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("generated", [0, 4, 5, 6])
def test_min_tokens_is_that_of_transformers(generated: int) -> None:
    torch.manual_seed(4)
    tokens = torch.randint(0, VOCAB, (3, 7 + generated))
    logits = torch.randn(3, VOCAB)
    logits[:, 9] = 50.0
    processor = MinNewTokensLengthLogitsProcessor(7, 5, eos_token_id=sorted(EOS))
    wanted = processor(tokens, logits.clone())
    rows = [row_of(own[:7], own[7:], min_tokens=5, temperature=0.0) for own in tokens.tolist()]
    assert torch.equal(apply_rules(logits.clone(), rows, EOS), wanted)
    chosen = [token.token_id for token in sample(logits, rows, EOS) if token is not None]
    assert (chosen == [9] * 3) is (generated >= 5)


def test_a_request_that_forbids_everything_gets_what_it_allows() -> None:
    logits = torch.tensor([[5.0, 1.0, 2.0]])
    row = row_of([0], [], allowed_token_ids=(1, 2), stop_token_ids=(1, 2), min_tokens=3, temperature=0.0)
    (token,) = sample(logits, [row])
    assert token is not None
    assert token.token_id == 2


def test_a_token_that_the_model_itself_forbids_is_not_sampled() -> None:
    logits = torch.tensor([[5.0, float("-inf"), 2.0]])
    assert sample(logits, [row_of([0], [], allowed_token_ids=(1,))]) == [None]


def test_allowed_ids_are_read_once_for_all_steps_and_answers_of_a_request() -> None:
    ids = tuple(range(16_384))
    assert _array(_Identity(ids)) is _array(_Identity(ids))
    assert _array(_Identity(tuple(range(16_384)))) is not _array(_Identity(ids)), "another request's are another's"
