"""Tests log probabilities as the official client sees them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types import CompletionChoice
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionTokenLogprob

from pdserve.api.requests.tokenizer import Tokenizer
from tests.api.behaviour import REPLY_TEXT, SPLIT_TEXT, Behaviour
from tests.api.node import MODEL, NodeUnderTest
from tests.api.plain_http import post
from tests.api.scripted_engine import EOS

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def chat_tokens(client: openai.OpenAI, *, stream: bool, **more: Any) -> list[tuple[str, ChatCompletionTokenLogprob]]:
    """Returns each token of a single choice, with the content of the chunk that it came with."""
    if not stream:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, **more)
        [choice] = answer.choices
        assert choice.logprobs is not None
        return [(choice.message.content or "", token) for token in choice.logprobs.content or []]
    found = []
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, stream=True, **more):
        logprobs = chunk.choices[0].logprobs
        if logprobs is not None:
            found += [(chunk.choices[0].delta.content or "", token) for token in logprobs.content or []]
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_chat(stream: bool, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    tokens = chat_tokens(client, stream=stream, seed=0, top_logprobs=3)
    ids = tokenizer.encode(REPLY_TEXT, add_special_tokens=False)
    assert "".join(token.token for _, token in tokens) == REPLY_TEXT, "the end token is not among them"
    for (text, token), token_id in zip(tokens, ids, strict=True):
        assert (token.logprob, bytes(token.bytes or [])) == (-1.0, tokenizer.token_bytes(token_id))
        likeliest = [tokenizer.token_bytes(i) for i in (token_id + 2, token_id, token_id + 1)]
        assert [bytes(top.bytes or []) for top in token.top_logprobs] == likeliest
        assert [top.logprob for top in token.top_logprobs] == [-0.5, -1.0, -9999.0]
        # Several tokens come in one chunk if the reader is late.
        assert token.token in text if stream else text == REPLY_TEXT


def test_chat_without_top_logprobs(client: openai.OpenAI) -> None:
    assert all(token.top_logprobs == [] for _, token in chat_tokens(client, stream=False, seed=0))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [Behaviour.REPLY, Behaviour.BURST])
def test_text(stream: bool, seed: int, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", seed=seed, logprobs=1, stream=stream)
    pieces = [answer] if isinstance(answer, openai.types.Completion) else list(answer)
    choices = [piece.choices[0] for piece in pieces]
    tokens, chosen, top, offsets = joined(choices)
    assert "".join(tokens) == REPLY_TEXT
    assert chosen == [-1.0] * len(tokens)
    assert [by_name[name] for by_name, name in zip(top, tokens, strict=True)] == chosen
    assert {len(by_name) for by_name in top} == {2}, "the likeliest and the chosen one"
    assert [next(iter(by_name)) for by_name in top] == tokens
    assert [REPLY_TEXT[offset:].startswith(name) for offset, name in zip(offsets, tokens, strict=True)]
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    for choice in choices:
        assert "".join(choice.logprobs.tokens or [] if choice.logprobs else []) == choice.text


def joined(choices: list[CompletionChoice]) -> tuple[list[str], list[float], list[dict[str, float]], list[int]]:
    reports = [choice.logprobs for choice in choices if choice.logprobs is not None]
    return (
        [name for report in reports for name in report.tokens or []],
        [value for report in reports for value in report.token_logprobs or []],
        [by_name for report in reports for by_name in report.top_logprobs or []],
        [offset for report in reports for offset in report.text_offset or []],
    )


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_characters(stream: bool, client: openai.OpenAI) -> None:
    tokens = chat_tokens(client, stream=stream, seed=Behaviour.SPLIT_CHARACTER)
    assert b"".join(bytes(token.bytes or []) for _, token in tokens) == SPLIT_TEXT.encode()
    partial = [token.token for _, token in tokens if "\\x" in token.token]
    assert len(partial) > 3
    assert not any("\ufffd" in text for text, _ in tokens)
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=99, seed=Behaviour.SPLIT_CHARACTER, logprobs=0
    )
    names, *_ = joined(answer.choices)
    assert [name.removeprefix("bytes:") for name in names if name.startswith("bytes:")] == partial


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_them_with_the_text(stream: bool, client: openai.OpenAI) -> None:
    tokens = chat_tokens(client, stream=stream, seed=0, stop="rld! H")
    assert [token.token for _, token in tokens] == ["Hello", ",", " world"], "of which the last is half shown"
    if stream:
        *whole, (text, _) = tokens
        assert all(token.token in shown for shown, token in whole)
        # Several tokens come in one chunk if the reader is late.
        assert text == "" or text.endswith(" wo"), "it is reported when its fate is known"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, " How"])
def test_beside_token_ids_each_of_them_has_its_log_probability(
    stop: str | None, stream: bool, node: NodeUnderTest
) -> None:
    """That of the token that ended the answer is there too."""
    body = {"model": MODEL, "prompt": "x", "seed": 0, "logprobs": 0, "stop": stop, "stream": stream}
    answer = post(f"{node.url}/v1/completions", {**body, "return_token_ids": True, "return_tokens_as_token_ids": True})
    lines = answer.text.split("\n\n") if stream else [f"data: {answer.text}"]
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
    named = [name for choice in choices if choice.get("logprobs") for name in choice["logprobs"]["tokens"]]
    assert ids
    # Of a stop string's last token only a part may be shown, and then it is not reported.
    assert named == [f"token_id:{token_id}" for token_id in ids[: len(named)]]
    if stop is None:
        assert (len(named), ids[-1]) == (len(ids), EOS)


def test_a_stop_token_is_reported_if_it_is_shown(client: openai.OpenAI) -> None:
    for extra, count in (({}, 1), ({"include_stop_str_in_output": True}, 2)):
        body = {"stop_token_ids": [28], **extra}
        assert len(chat_tokens(client, stream=True, seed=Behaviour.STOP_TOKEN, extra_body=body)) == count


def test_choices_have_their_own(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["x", "y"], n=2, seed=Behaviour.ENDLESS - 1, max_tokens=4, logprobs=0
    )
    texts = ["".join(choice.logprobs.tokens or []) for choice in answer.choices if choice.logprobs]
    assert texts == [choice.text for choice in answer.choices]
    assert len(set(texts)) == 2


def test_null_unless_asked_for(node: NodeUnderTest) -> None:
    for route, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"})):
        for stream in (False, True):
            body = {"model": MODEL, "seed": 0, "stream": stream, **prompt}
            text = post(f"{node.url}/v1/{route}", body).text
            parts = [line.removeprefix("data: ") for line in text.split("\n\n") if line and "[DONE]" not in line]
            assert all(json.loads(part)["choices"][0]["logprobs"] is None for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_by_their_ids(stream: bool, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """Both forms name tokens by their ids, and still give the tokens' own bytes."""
    by_id = {"return_tokens_as_token_ids": True}
    ids = tokenizer.encode(REPLY_TEXT, add_special_tokens=False)
    names = [f"token_id:{token_id}" for token_id in ids]
    tokens = [token for _, token in chat_tokens(client, stream=stream, seed=0, top_logprobs=2, extra_body=by_id)]
    assert [token.token for token in tokens] == names
    assert [token.top_logprobs[0].token for token in tokens] == [f"token_id:{token_id + 2}" for token_id in ids]
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode() == REPLY_TEXT

    answer = client.completions.create(model=MODEL, prompt="x", seed=0, logprobs=2, stream=stream, extra_body=by_id)
    pieces = [answer] if isinstance(answer, openai.types.Completion) else list(answer)
    found, _, top, _ = joined([piece.choices[0] for piece in pieces])
    assert found == names
    assert [set(entry) for entry in top] == [{f"token_id:{i}", f"token_id:{i + 2}"} for i in ids]
