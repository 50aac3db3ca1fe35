"""Tests what clients get of prompts' log probabilities: in OpenAI's form of an echo, and in vLLM's list."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.api.requests.openai_request import CompletionRequest
from pdserve.api.requests.sampling_fields import check_scores
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.errors import InvalidRequest
from tests.api.behaviour import Behaviour
from tests.api.node import MODEL, NodeUnderTest
from tests.api.plain_http import post

TEXT = "One two three, 漢字 and the rest."
LISTED = {"logprob": -1.0, "rank": 2}


def complete(node: NodeUnderTest, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": TEXT, "max_tokens": 1, "seed": Behaviour.ENDLESS, **fields}
    reply = post(f"{node.url}/v1/completions", body)
    assert reply.status == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def check_echo(logprobs: dict[str, Any], tokens: int, answer_tokens: int) -> None:
    """Checks the lists that a client which scores answers reads, as lm-eval does."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert {len(logprobs[name]) for name in names} == {tokens + answer_tokens}
    assert logprobs["token_logprobs"] == [None] + [-1.0] * (tokens + answer_tokens - 1)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for name, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        # The scripted engine has another token as the likeliest.
        assert top[name] == -1.0
        assert max(top.values()) == -0.5


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_them_before_the_answer(
    stream: bool, max_tokens: int, node: NodeUnderTest, tokenizer: Tokenizer
) -> None:
    prompts = [tokenizer.encode(TEXT, add_special_tokens=False), [17, 18, 19]]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": max_tokens, "seed": Behaviour.ENDLESS}
    body |= {"echo": True, "logprobs": 1, "n": 2, "stream": stream}
    reply = post(f"{node.url}/v1/completions", body)
    assert reply.status == 200, reply.text
    texts, merged = [""] * 4, [dict[str, Any]() for _ in range(4)]
    events = reply.text.split("\n\n") if stream else ["data: " + reply.text]
    for event in events:
        chunk = {} if "[DONE]" in event or not event else json.loads(event.removeprefix("data: "))
        for choice in chunk.get("choices", ()):
            texts[choice["index"]] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                merged[choice["index"]].setdefault(name, []).extend(values)
    for index, logprobs in enumerate(merged):
        prompt = prompts[index // 2]
        check_echo(logprobs, len(prompt), max_tokens)
        echo = tokenizer.decode(prompt, skip_special_tokens=True)
        assert texts[index] == echo + " word" * max_tokens
        assert logprobs["text_offset"][-max_tokens - 1] <= len(echo)
        if max_tokens:
            assert logprobs["text_offset"][-max_tokens] == len(echo)


def test_offsets_are_those_of_the_echoed_text(node: NodeUnderTest) -> None:
    [choice] = complete(node, echo=True, logprobs=0, prompt="The quick brown fox", max_tokens=0)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "The quick brown fox"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    spans = zip(logprobs["text_offset"], ends, strict=True)
    assert [choice["text"][start:end] for start, end in spans] == logprobs["tokens"]


def test_scores_alone_have_no_tokens(node: NodeUnderTest) -> None:
    answer = complete(node, echo=True, logprobs=1, max_tokens=0, return_token_ids=True)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["token_ids"] == []


@pytest.mark.parametrize("how", [{}, {"truncate_prompt_tokens": -1}])
def test_a_prompt_that_is_only_scored_may_be_as_long_as_the_context(how: dict[str, int], node: NodeUnderTest) -> None:
    """The context has 256 tokens."""
    scored = {"echo": True, "logprobs": 0, "max_tokens": 0}
    [choice] = complete(node, prompt=[17] * 256, **scored, **how)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 256
    for fields in ({"prompt": [17] * 257, **scored}, {"prompt": [17] * 256, "echo": True, "logprobs": 0}):
        reply = post(f"{node.url}/v1/completions", {"model": MODEL, "max_tokens": 1, **fields})
        assert (reply.status, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_tokens_may_be_named_by_their_ids(node: NodeUnderTest) -> None:
    [choice] = complete(node, prompt=[17, 18], echo=True, logprobs=1, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"][:2] == ["token_id:17", "token_id:18"]
    assert choice["logprobs"]["top_logprobs"][1] == {"token_id:20": -0.5, "token_id:18": -1.0}


def test_a_prompt_of_one_token_has_no_log_probability(node: NodeUnderTest) -> None:
    [choice] = complete(node, prompt=[17], echo=True, logprobs=1, max_tokens=0, prompt_logprobs=1)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None]
    assert choice["prompt_logprobs"] == [None]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_text_completions_list_them_in_each_choice(count: int, node: NodeUnderTest) -> None:
    answer = complete(node, prompt=[[17, 18], [20, 21, 22]], prompt_logprobs=count, n=2)
    for choice in answer["choices"]:
        first, *others = choice["prompt_logprobs"]
        ids = [[18], [21, 22]][choice["index"] // 2]
        assert first is None
        assert choice["logprobs"] is None
        assert [list(entry) for entry in others] == [[str(i), *([str(i + 2)] if count else [])] for i in ids]
        for token_id, entry in zip(ids, others, strict=True):
            assert entry[str(token_id)].items() >= LISTED.items()
            assert count == 0 or (entry[str(token_id + 2)]["logprob"], entry[str(token_id + 2)]["rank"]) == (-0.5, 1)


def test_an_echo_and_a_list_may_have_different_counts(node: NodeUnderTest) -> None:
    [choice] = complete(node, prompt=[17, 18], echo=True, logprobs=0, prompt_logprobs=2)["choices"]
    assert list(choice["logprobs"]["top_logprobs"][1].values()) == [-1.0]
    assert len(choice["prompt_logprobs"][1]) == 2


def test_a_chat_has_the_list_beside_its_choices(node: NodeUnderTest) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "seed": 0, "prompt_logprobs": 1}
    answer = post(f"{node.url}/v1/chat/completions", {**body, "n": 2}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert all(entry["decoded_token"] for token in answer["prompt_logprobs"][1:] for entry in token.values())
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


def test_a_request_without_them_asks_the_engine_for_none(node: NodeUnderTest) -> None:
    with node.new_submits() as submits:
        complete(node, logprobs=1)
        complete(node, echo=True)
    assert [submit.sampling.prompt_logprobs for submit in submits()] == [None, None]


def test_the_likeliest_of_several_answers_are_shown(node: NodeUnderTest) -> None:
    """The scripted engine gives each token the same log probability, so the shortest answer is the likeliest."""
    seed = Behaviour.ENDLESS - 2
    answer = complete(node, max_tokens=20, seed=seed, best_of=4, n=3, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [9, 9, 20]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 9 + 9 + 20 + 20


@pytest.mark.parametrize(
    ("fields", "param"), [({"echo": True, "logprobs": 20}, "logprobs"), ({"prompt_logprobs": 20}, "prompt_logprobs")]
)
def test_those_of_all_prompts_are_bounded_together(fields: dict[str, Any], param: str) -> None:
    request = CompletionRequest(model="m", prompt="x", n=4, **fields)
    check_scores(request, [[17] * 3000] * 2)
    with pytest.raises(InvalidRequest, match="at most 524288 together") as refused:
        check_scores(request, [[17] * 3000] * 3)
    assert refused.value.param == param
