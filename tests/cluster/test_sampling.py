"""Tests that sampling and log probabilities are the same, whichever node samples the first token."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.nodes import MODEL, ServedCluster, http, random_prompt
from tests.eventually import eventually

PROMPT = random_prompt(50, seed=7)
EOS = 2
FEW_TOKENS = [28, 30, 260, 281, 284]
"""Fewer than an answer has, so that it repeats some."""
SETTINGS: list[dict[str, Any]] = [
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "allowed_token_ids": FEW_TOKENS},
    {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 11},
    {"logit_bias": {"260": 20, "28": 19.5}, "frequency_penalty": 1.0},
    {"logit_bias": {str(EOS): 100}, "min_tokens": 4},
    {"allowed_token_ids": FEW_TOKENS, "temperature": 1.5, "seed": 5, "top_p": 0.9},
    {"guided_regex": "[a-z]{2,9} [0-9]{1,3}!", "max_tokens": 20},
    {
        "guided_json": {"type": "array", "items": {"enum": ["red", 1.5, None]}, "maxItems": 3},
        "temperature": 1,
        "seed": 3,
    },
]


def answers(cluster: ServedCluster, **fields: Any) -> list[dict[str, Any]]:
    """Returns the choices of a completion, greedy unless ``fields`` say otherwise. No prefix cache has its prompt."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
    reply = http(cluster.url + "/v1/completions", {**body, "cache_salt": uuid.uuid4().hex})
    assert reply.status == 200, reply.body
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


def answer(cluster: ServedCluster, **fields: Any) -> dict[str, Any]:
    """Returns the only choice of a completion."""
    [choice] = answers(cluster, **fields)
    return choice


def remote_prefills(cluster: ServedCluster) -> float:
    return sum(node.metric("prefills_total", source="remote") for node in cluster.decode)


def wait_remote_prefills(cluster: ServedCluster, count: float) -> None:
    """Waits until a prefill node has computed ``count`` prompts, since counters are a little later than answers."""
    eventually(lambda: remote_prefills(cluster) >= count, f"{count} remote prefills")


@pytest.mark.timeout(300)
def test_log_probabilities_are_those_of_transformers(pd_cluster: ServedCluster, tiny_model: Path) -> None:
    before = remote_prefills(pd_cluster)
    choice = answer(pd_cluster, logprobs=5, ignore_eos=True, presence_penalty=2, frequency_penalty=2)
    wait_remote_prefills(pd_cluster, before + 1)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + choice["token_ids"]])).logits[0, len(PROMPT) - 1 : -1]
    wanted = logits.log_softmax(-1)
    reported = choice["logprobs"]
    own = [wanted[i, token_id].item() for i, token_id in enumerate(choice["token_ids"])]
    assert reported["token_logprobs"] == pytest.approx(own, abs=1e-3)
    for by_name, best in zip(reported["top_logprobs"], wanted.topk(5).values.tolist(), strict=True):
        assert sorted(by_name.values(), reverse=True)[:5] == pytest.approx(best, abs=1e-3)


@pytest.mark.timeout(300)
def test_log_probabilities_of_prompts_are_those_of_transformers_with_and_without_remote_prefill(
    pd_cluster: ServedCluster, mixed_cluster: ServedCluster, tiny_model: Path
) -> None:
    before = remote_prefills(pd_cluster)
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1, "prompt_logprobs": 2}
    choice, local = answer(pd_cluster, **asked), answer(mixed_cluster, **asked)
    wait_remote_prefills(pd_cluster, before + 1)
    assert {**choice, "logprobs": None, "prompt_logprobs": None} == {**local, "logprobs": None, "prompt_logprobs": None}
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    token_ids = PROMPT + choice["token_ids"]
    with torch.inference_mode():
        wanted = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    own = [wanted[i, token_id].item() for i, token_id in enumerate(token_ids[1:])]
    for one in (choice, local):
        first, *others = one["logprobs"]["token_logprobs"]
        assert first is None
        assert others == pytest.approx(own, abs=1e-4)
        first, *others = one["prompt_logprobs"]
        assert first is None
        listed = [entry[str(token_id)]["logprob"] for token_id, entry in zip(PROMPT[1:], others, strict=True)]
        assert listed == pytest.approx(own[:-1], abs=1e-4)


@pytest.mark.timeout(300)
def test_parameters_give_the_same_tokens_with_and_without_remote_prefill(
    pd_cluster: ServedCluster, mixed_cluster: ServedCluster
) -> None:
    before = remote_prefills(pd_cluster)
    remote = [answer(pd_cluster, **fields)["token_ids"] for fields in SETTINGS]
    wait_remote_prefills(pd_cluster, before + len(SETTINGS))
    assert remote == [answer(mixed_cluster, **fields)["token_ids"] for fields in SETTINGS]
    plain = answer(mixed_cluster)["token_ids"]
    assert all(ids != plain for ids in remote), "each of them makes a difference"
    assert remote[0] != answer(mixed_cluster, allowed_token_ids=FEW_TOKENS)["token_ids"], "penalties do too"
    assert [token_id == EOS for token_id in remote[3]] == [False] * 4 + [True]
    assert set(remote[4]) <= set(FEW_TOKENS)
    assert remote[5][-1] == EOS


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "more",
    [{}, {"guided_regex": "[a-z ]+"}, {"logprob_token_ids": [260, 41, 5]}],
    ids=["any text", "a grammar", "named tokens"],
)
def test_choices_of_one_prompt_have_their_own_first_tokens(
    pd_cluster: ServedCluster, mixed_cluster: ServedCluster, more: dict[str, Any]
) -> None:
    fields = {"n": 3, "seed": 40, "temperature": 1.2, "logprobs": 2, "max_tokens": 4, "presence_penalty": 1.0} | more
    before = remote_prefills(pd_cluster)
    remote, local = answers(pd_cluster, **fields), answers(mixed_cluster, **fields)
    wait_remote_prefills(pd_cluster, before + 1)
    assert len({choice["token_ids"][0] for choice in remote}) > 1
    for there, here in zip(remote, local, strict=True):
        assert there["token_ids"] == here["token_ids"]
        assert there["logprobs"]["tokens"] == here["logprobs"]["tokens"]
        assert there["logprobs"]["token_logprobs"] == pytest.approx(here["logprobs"]["token_logprobs"], abs=1e-3)
        for by_name, wanted in zip(there["logprobs"]["top_logprobs"], here["logprobs"]["top_logprobs"], strict=True):
            assert by_name == pytest.approx(wanted, abs=1e-3)
