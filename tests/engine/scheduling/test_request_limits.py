from __future__ import annotations

import pytest

from pdserve.engine.scheduling.request_limits import PromptRule
from pdserve.wire.sampling_params import SamplingParams

RULE = PromptRule(vocab_size=100, max_model_len=10)
FINE = SamplingParams(max_tokens=1, seed=0)


@pytest.mark.parametrize("token_ids", [[0], [99] * 9])
def test_prompts_that_can_be_computed(token_ids: list[int]) -> None:
    assert RULE.misfit(token_ids, FINE) is None


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [([], "empty"), ([1] * 10, "at most 10"), ([1, -1], "outside 0 to 99"), ([1, 100], "outside 0 to 99")],
)
def test_prompts_that_cannot(token_ids: list[int], reason: str) -> None:
    assert reason in (RULE.misfit(token_ids, FINE) or "")


@pytest.mark.parametrize("token", [-1, 100, 2**62])
def test_parameters_that_look_tokens_up_which_are_not_there(token: int) -> None:
    for sampling in (
        SamplingParams(max_tokens=1, seed=0, logit_bias=((5, 1.0), (token, 1.0))),
        SamplingParams(max_tokens=1, seed=0, allowed_token_ids=(5, token)),
        SamplingParams(max_tokens=1, seed=0, logprobs=0, logprob_token_ids=(5, token)),
    ):
        assert "sampling parameters" in (RULE.misfit([1], sampling) or "")


def test_a_token_that_is_never_sampled_may_be_banned() -> None:
    """A tokenizer may have more tokens than its model, and a client's bad words become such tokens."""
    sampling = SamplingParams(max_tokens=1, seed=0, bad_words=((5, 100),), stop_token_ids=(100,))
    assert RULE.misfit([1], sampling) is None


def test_banned_tokens_are_not_counted_from_the_end() -> None:
    for sampling in (
        SamplingParams(max_tokens=1, seed=0, bad_words=((5, -1),)),
        SamplingParams(max_tokens=1, seed=0, stop_token_ids=(-1,)),
    ):
        assert "sampling parameters" in (RULE.misfit([1], sampling) or "")
