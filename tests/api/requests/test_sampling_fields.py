"""Tests that each sampling parameter that a client gives reaches the engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.api.requests.openai_request import ChatRequest, CompletionRequest, GenerationRequest
from pdserve.api.requests.request_fields import SharedFields
from pdserve.api.requests.sampling_fields import sampling_params
from pdserve.wire.sampling_params import SamplingParams

DEFAULT = SamplingParams(max_tokens=7, seed=1)
SET_ELSEWHERE = frozenset({"max_tokens", "seed", "bad_words", "logprobs", "prompt_logprobs", "grammar"})
"""The parameters that ``sampling_params`` gets as arguments, and those that are made of several fields."""
GIVEN: dict[str, tuple[Any, Any]] = {
    "temperature": (0.5, 0.5),
    "top_p": (0.9, 0.9),
    "top_k": (7, 7),
    "min_p": (0.1, 0.1),
    "stop_token_ids": ([5], (5,)),
    "ignore_eos": (True, True),
    "min_tokens": (3, 3),
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (-0.25, -0.25),
    "repetition_penalty": (1.2, 1.2),
    "logit_bias": ({"5": 3.0}, ((5, 3.0),)),
    "allowed_token_ids": ([9, 4, 9], (4, 9)),
    "logprob_token_ids": ([8, 2, 8], (8, 2)),
}
"""What a client gives in each field, and the parameter of that name."""


def test_each_parameter_has_a_value_here() -> None:
    """A parameter that is not in this table could be accepted of a client and then ignored."""
    assert GIVEN.keys() == {*SamplingParams.__struct_fields__} - SET_ELSEWHERE
    fields = {*GenerationRequest.__struct_fields__, *SharedFields.__struct_fields__}
    assert GIVEN.keys() <= fields


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("name", GIVEN)
def test_each_parameter_arrives_alone(kind: type[GenerationRequest], name: str) -> None:
    given, arrives = GIVEN[name]
    content: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "x"}]} if kind is ChatRequest else {"prompt": "x"}
    )
    request = msgspec.json.decode(msgspec.json.encode({**content, name: given}), type=kind)
    params = sampling_params(request, seed=1, max_tokens=7, bad_words=())
    assert params == msgspec.structs.replace(DEFAULT, **{name: arrives})
