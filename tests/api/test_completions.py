"""Tests both completion routes as the official client sees them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from pdserve.api.requests.openai_request import ChatRequest, CompletionRequest
from pdserve.api.requests.prompts import ModelLimits, chat_prompts, completion_prompts
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.errors import InvalidRequest
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.terms import NO_OWN_TARGETS, RequestTargets
from tests.api.behaviour import REPLY_TEXT, SPLIT_TEXT, Behaviour
from tests.api.node import MODEL, NodeUnderTest
from tests.api.plain_http import post

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=Behaviour.REPLY)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY_TEXT, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=Behaviour.REPLY, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == REPLY_TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_tokens_go_out_before_the_answer_is_over(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=Behaviour.HOLD, stream=True) as stream:
        texts = (chunk.choices[0].delta.content for chunk in stream)
        assert REPLY_TEXT.startswith(next(text for text in texts if text))


def test_stream_with_usage(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=0, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 9
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}])
def test_stream_interval(extra: dict[str, Any], client: openai.OpenAI) -> None:
    """Nine tokens, the last without text, come as one, four, and four with the end. A late reader gets fewer chunks."""
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="x", seed=Behaviour.REPLY, stream=True, extra_body={"stream_interval": 4, **extra}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY_TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert 2 <= len(chunks) <= 4


def test_bytes_of_a_stream(node: NodeUnderTest) -> None:
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = post(f"{node.url}/v1/chat/completions", body, x_request_id="mine-1")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-request-id"] == "mine-1"
    *events, end = answer.text.split("\n\n")
    assert end == ""
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-1])
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_all_tokens_at_once(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=Behaviour.BURST, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == [REPLY_TEXT, None]


@pytest.mark.parametrize("stream", [False, True])
def test_characters_split_over_tokens(stream: bool, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="x", max_tokens=99, seed=Behaviour.SPLIT_CHARACTER, stream=stream
    )
    pieces = [answer] if isinstance(answer, openai.types.Completion) else list(answer)
    texts = [piece.choices[0].text for piece in pieces]
    assert "".join(texts) == SPLIT_TEXT
    assert not any("\ufffd" in text for text in texts)


def test_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="x", seed=Behaviour.ENDLESS, max_tokens=5)
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" word" * 5, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_max_tokens(field: str, node: NodeUnderTest) -> None:
    for value, expected in ((7, 7), (None, 256 - 31)):
        body = {"model": MODEL, "messages": MESSAGES, "seed": Behaviour.ENDLESS, field: value}
        answer = post(f"{node.url}/v1/chat/completions", body).json()
        assert answer["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize(("prompt_tokens", "expected"), [(1, 16), (250, 6)])
@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
def test_a_text_completion_has_16_tokens_if_they_fit(
    given: dict[str, None], prompt_tokens: int, expected: int, node: NodeUnderTest
) -> None:
    body = {"model": MODEL, "prompt": [17] * prompt_tokens, "seed": Behaviour.ENDLESS, **given}
    answer = post(f"{node.url}/v1/completions", body).json()
    assert answer["usage"]["completion_tokens"] == expected


def test_whole_numbers_are_integers_however_they_are_written(node: NodeUnderTest) -> None:
    body = {
        "model": MODEL,
        "prompt": [17.0, 18],
        "seed": 1e3,
        "max_tokens": 3.0,
        "stop_token_ids": [5.0],
        "logit_bias": {"7": 2.0},
        "temperature": 1.0,
    }
    with node.new_submits() as submits:
        assert post(f"{node.url}/v1/completions", body).json()["usage"]["completion_tokens"] == 3
    [submit] = submits()
    assert (submit.token_ids, submit.sampling.seed, submit.sampling.stop_token_ids) == ([17, 18], 1000, (5,))


async def test_async_client(node: NodeUnderTest) -> None:
    async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="unused", max_retries=0) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=0)
        stream = await client.completions.create(model=MODEL, prompt="x", seed=0, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        many = await asyncio.gather(
            *(client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=i) for i in range(30))
        )
        found = [
            chat.choices[0].message.content or "",
            text,
            *(each.choices[0].message.content or "" for each in many),
        ]
    assert found == [REPLY_TEXT] * 32


# ------------------------------------------------------------------ requests for several choices


def test_n_choices_have_seeds_of_their_own(client: openai.OpenAI, node: NodeUnderTest) -> None:
    with node.new_submits() as submits:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, seed=10)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {REPLY_TEXT}
    [submit] = submits()
    assert (submit.sampling.seed, [child.seed for child in submit.children]) == (10, [11, 12])
    assert len({submit.local_id, *(child.local_id for child in submit.children)}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 27
    assert answer.usage.prompt_tokens == len(submit.token_ids), "a prompt counts once"


def test_without_a_seed_choices_differ(client: openai.OpenAI, node: NodeUnderTest) -> None:
    with node.new_submits() as submits:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, n=4)
    [submit] = submits()
    assert len({submit.sampling.seed, *(child.seed for child in submit.children)}) == 4


@pytest.mark.parametrize(("given", "wanted"), [("tenant 7", "/tenant 7"), (None, "")])
def test_the_cache_salt_reaches_the_engine(given: str | None, wanted: str, node: NodeUnderTest) -> None:
    """Behind the slash, because the salt of the key's owner, of which there is none here, comes before it."""
    body = {"model": MODEL, "prompt": ["x", "y"], "seed": 0, "cache_salt": given}
    with node.new_submits() as submits:
        assert post(f"{node.url}/v1/completions", body).status == 200
    assert [submit.terms.prompt.cache_salt for submit in submits()] == [wanted] * 2


def test_n_choices_streamed(client: openai.OpenAI) -> None:
    texts, roles, finishes = ["", ""], [0, 0], ["", ""]
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, seed=0, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        finishes[choice.index] += choice.finish_reason or ""
    assert (texts, roles, finishes) == ([REPLY_TEXT] * 2, [1, 1], ["stop", "stop"])


def test_forms_of_prompt(client: openai.OpenAI, node: NodeUnderTest, tokenizer: Tokenizer) -> None:
    one, two = (tokenizer.encode(text, add_special_tokens=True) for text in ("one", "two"))
    forms: list[tuple[str | list[str] | list[int] | list[list[int]], list[list[int]]]] = [
        ("one", [one]),
        (["one"], [one]),
        (["one", "two"], [one, two]),
        (one, [one]),
        ([one, two], [one, two]),
    ]
    for prompt, expected in forms:
        with node.new_submits() as submits:
            answer = client.completions.create(model=MODEL, prompt=prompt, seed=0, n=2)
        assert [submit.token_ids for submit in submits()] == expected
        assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))


@pytest.mark.parametrize("stream", [False, True])
def test_echo(stream: bool, client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], echo=True, seed=0, stream=stream)
    texts = ["", ""]
    for piece in [answer] if isinstance(answer, openai.types.Completion) else answer:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == ["one" + REPLY_TEXT, "two" + REPLY_TEXT]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("role", "echo", "before"), [("assistant", True, "I say: "), ("assistant", None, ""), ("user", True, "")]
)
def test_a_chat_echoes_the_beginning_of_its_answer(
    role: str, echo: bool | None, before: str, stream: bool, node: NodeUnderTest
) -> None:
    messages = [*MESSAGES, {"role": role, "content": [{"type": "text", "text": "I say: "}]}]
    body = {"model": MODEL, "messages": messages, "seed": 0, "echo": echo, "stream": stream, "n": 2}
    answer = post(f"{node.url}/v1/chat/completions", {**body, "continue_final_message": True})
    lines = answer.text.split("\n\n") if stream else [f"data: {answer.text}"]
    texts = ["", ""]
    for line in lines:
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            texts[choice["index"]] += choice["delta" if stream else "message"].get("content") or ""
    assert texts == [before + REPLY_TEXT] * 2


def test_what_a_chat_echoes_is_no_longer_than_its_prompt(node: NodeUnderTest, model_dir: Path, tmp_path: Path) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "x" * 100}]
    body = {"model": MODEL, "messages": messages, "echo": True, "seed": 0}
    refused = post(f"{node.url}/v1/chat/completions", {**body, "truncate_prompt_tokens": 3})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "echo")
    silent = shutil.copytree(model_dir, tmp_path / "silent")
    (silent / "chat_template.jinja").write_text("{{ messages[0].content }}")
    request = msgspec.convert(body, ChatRequest)
    with pytest.raises(InvalidRequest, match="does not show"):
        chat_prompts(request, load_tokenizer(silent), ModelLimits(256, 49_152), 0, lambda: None)


# ------------------------------------------------------------------ how answers end


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        (" How", False, "Hello, world!"),
        ([" are", "wor"], False, "Hello, "),
        ("world! H", True, "Hello, world! H"),
        (["never"], False, REPLY_TEXT),
    ],
)
def test_stop_strings(stop: str | list[str], include: bool, expected: str, stream: bool, client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt="x",
        stop=stop,
        seed=Behaviour.SLOW,
        stream=stream,
        extra_body={"include_stop_str_in_output": include},
    )
    pieces = [answer] if isinstance(answer, openai.types.Completion) else list(answer)
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_engines_work(stream: bool, client: openai.OpenAI, node: NodeUnderTest) -> None:
    before = len(node.submits())
    answer = client.completions.create(model=MODEL, prompt="x", stop=",", seed=Behaviour.HOLD, stream=stream)
    pieces = [answer] if isinstance(answer, openai.types.Completion) else list(answer)
    assert "".join(piece.choices[0].text for piece in pieces) == "Hello"
    assert pieces[-1].choices[0].finish_reason == "stop"
    node.wait_aborted(1, before)


def test_stop_token_is_shown_only_on_request(client: openai.OpenAI, node: NodeUnderTest) -> None:
    for extra, expected in (({}, "Hello"), ({"include_stop_str_in_output": True}, "Hello,")):
        with node.new_submits() as submits:
            answer = client.completions.create(
                model=MODEL, prompt="x", seed=Behaviour.STOP_TOKEN, extra_body={"stop_token_ids": [28], **extra}
            )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
        assert submits()[0].sampling.stop_token_ids == (28,)


# ------------------------------------------------------------------ what the engine receives


def test_sampling_parameters_arrive(client: openai.OpenAI, node: NodeUnderTest) -> None:
    with node.new_submits() as submits:
        client.completions.create(
            model=MODEL,
            prompt="x",
            temperature=0.5,
            top_p=0.9,
            max_tokens=3,
            seed=-1,
            extra_body={"top_k": 7, "min_p": 0.1, "ignore_eos": True},
        )
        client.completions.create(model=MODEL, prompt="x", seed=0, extra_body={"top_k": -1})
        client.completions.create(model=MODEL, prompt="x", seed=0, temperature=0)
    given, default, greedy = (submit.sampling for submit in submits())
    assert greedy.temperature == 0
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.5, 0.9, 7, 0.1)
    assert (given.max_tokens, given.ignore_eos, given.seed) == (3, True, 2**63 - 1)
    assert (default.temperature, default.top_p, default.top_k, default.min_p) == (1.0, 1.0, 0, 0.0)
    assert default.max_tokens == 16


def test_penalties_and_the_like_arrive(client: openai.OpenAI, node: NodeUnderTest, tokenizer: Tokenizer) -> None:
    with node.new_submits() as submits:
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            seed=0,
            presence_penalty=0.5,
            frequency_penalty=-0.25,
            logit_bias={"5": 3, "7": -100},
            extra_body={
                "repetition_penalty": 1.2,
                "min_tokens": 3,
                "allowed_token_ids": [9, 4, 9],
                "bad_words": ["Paris", " Paris"],
            },
        )
        client.completions.create(model=MODEL, prompt="x", seed=0)
    given, default = (submit.sampling for submit in submits())
    assert (given.presence_penalty, given.frequency_penalty, given.repetition_penalty) == (0.5, -0.25, 1.2)
    assert (given.logit_bias, given.min_tokens, given.allowed_token_ids) == (((5, 3.0), (7, -100.0)), 3, (4, 9))
    assert given.bad_words == tuple(
        tuple(tokenizer.encode(word, add_special_tokens=False)) for word in ("Paris", " Paris")
    )
    assert default == SamplingParams(max_tokens=16, seed=0)


def test_no_stop_string_ends_an_answer_before_min_tokens(client: openai.OpenAI) -> None:
    for min_tokens, expected in ((0, "Hello"), (1, "Hello"), (2, REPLY_TEXT)):
        answer = client.completions.create(
            model=MODEL, prompt="x", stop=",", seed=0, extra_body={"min_tokens": min_tokens}
        )
        assert answer.choices[0].text == expected


def test_deadline_and_prefill_without_a_ticket(client: openai.OpenAI, node: NodeUnderTest) -> None:
    with node.new_submits() as submits:
        client.completions.create(model=MODEL, prompt="x", seed=0)
    [submit] = submits()
    assert 55 < submit.terms.deadline_s <= 60
    assert submit.terms.prefill == ()


def test_truncated_prompt(client: openai.OpenAI, node: NodeUnderTest) -> None:
    ids = list(range(100, 400))
    for keep, kept in ((4, 4), (-1, 256 - 10)):
        with node.new_submits() as submits:
            client.completions.create(
                model=MODEL, prompt=ids, seed=0, max_tokens=10, extra_body={"truncate_prompt_tokens": keep}
            )
        assert submits()[0].token_ids == ids[-kept:]


@pytest.mark.parametrize(("side", "kept"), [("left", [102, 103]), ("right", [100, 101]), (None, [102, 103])])
def test_the_side_that_is_cut(side: str | None, kept: list[int], node: NodeUnderTest) -> None:
    body = {"model": MODEL, "prompt": [100, 101, 102, 103], "seed": 0, "truncate_prompt_tokens": 2}
    with node.new_submits() as submits:
        post(f"{node.url}/v1/completions", {**body, "truncation_side": side})
    assert submits()[0].token_ids == kept


def test_a_prompt_that_is_cut_to_what_fits_leaves_room_for_an_answer(node: NodeUnderTest) -> None:
    body = {"model": MODEL, "prompt": [17] * 300, "seed": Behaviour.ENDLESS, "truncate_prompt_tokens": -1}
    answer = post(f"{node.url}/v1/completions", body).json()
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (240, 16)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(stream: bool, node: NodeUnderTest, tokenizer: Tokenizer) -> None:
    body = {"model": MODEL, "prompt": "x", "seed": 0, "return_token_ids": True, "stop": "How", "stream": stream}
    answer = post(f"{node.url}/v1/completions", body)
    parts = (
        [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        if stream
        else [answer.json()]
    )
    choices = [part["choices"][0] for part in parts]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello, world! How"
    assert choices[0]["prompt_token_ids"] == tokenizer.encode("x", add_special_tokens=True)


@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_of_a_chats_prompt_are_beside_its_choices(n: int, node: NodeUnderTest) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "seed": 0, "n": n, "return_token_ids": True}
    with node.new_submits() as submits:
        whole = post(f"{node.url}/v1/chat/completions", body).json()
        stream = post(f"{node.url}/v1/chat/completions", {**body, "stream": True})
    prompt = submits()[0].token_ids
    assert whole["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in choice for choice in whole["choices"])
    chunks = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
    first = {chunk["choices"][0]["index"]: chunk for chunk in reversed(chunks)}
    assert [chunk.get("prompt_token_ids") for chunk in first.values()] == [prompt] * n
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == n
    for index in range(n):
        shown = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        streamed = [token_id for choice in shown for token_id in choice.get("token_ids", [])]
        assert streamed == whole["choices"][index]["token_ids"]


def test_what_vllm_gives_and_nobody_asked_for_is_null(node: NodeUnderTest) -> None:
    chat = post(f"{node.url}/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "seed": 0}).json()
    text = post(f"{node.url}/v1/completions", {"model": MODEL, "prompt": "x", "seed": 0}).json()
    assert [chat[name] for name in ("prompt_token_ids", "prompt_logprobs")] == [None] * 2
    assert [chat["choices"][0][name] for name in ("logprobs", "stop_reason", "token_ids")] == [None] * 3
    names = ("logprobs", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
    assert [text["choices"][0][name] for name in names] == [None] * 5


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"seed": Behaviour.REPLY}, None),
        ({"seed": Behaviour.REPLY, "stop": [" are", " How"]}, " How"),
        ({"seed": Behaviour.STOP_TOKEN, "stop_token_ids": [28]}, 28),
        ({"seed": Behaviour.ENDLESS, "max_tokens": 3, "stop_token_ids": [28]}, None),
    ],
    ids=["end of sequence", "stop string", "stop token", "length"],
)
def test_the_stop_reason_is_what_ended_the_answer(
    fields: dict[str, Any], reason: str | int | None, stream: bool, route: str, node: NodeUnderTest
) -> None:
    prompt = {"messages": MESSAGES} if route == "chat/completions" else {"prompt": "x"}
    answer = post(f"{node.url}/v1/{route}", {"model": MODEL, **prompt, **fields, "stream": stream})
    choice = json.loads(answer.text.split("\n\n")[-3][6:] if stream else answer.text)["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["stop_reason"] == reason


def test_chat_template_options(node: NodeUnderTest, tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "One"}]
    for extra, ending in (
        ({}, "<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "One<|im_end|>\n"),
        ({"continue_final_message": True}, "<|im_start|>assistant\nOne"),
    ):
        with node.new_submits() as submits:
            body = {"model": MODEL, "messages": messages, "seed": 0, **extra}
            assert post(f"{node.url}/v1/chat/completions", body).status == 200
        assert tokenizer.decode(submits()[0].token_ids, skip_special_tokens=False).endswith(ending)


@pytest.mark.parametrize("chat", [False, True])
def test_every_chunk_says_what_was_used_so_far(chat: bool, node: NodeUnderTest) -> None:
    prompt = {"messages": MESSAGES} if chat else {"prompt": "x"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, **prompt, "n": 2, "seed": 0, "stream": True, "stream_options": options}
    answer = post(f"{node.url}/v1/{'chat/' if chat else ''}completions", body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    used = [event["usage"]["completion_tokens"] for event in events]
    assert used == sorted(used)
    assert 0 < used[0] < used[-1] == 2 * 9
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages(events))
    without = {**body, "stream_options": {"include_usage": True}}
    plain = post(f"{node.url}/v1/{'chat/' if chat else ''}completions", without)
    last = json.loads(plain.text.splitlines()[-4][6:])
    assert last["usage"] == events[-1]["usage"]


@pytest.mark.parametrize("include", [None, False])
def test_usage_in_every_chunk_implies_it_at_the_end_unless_that_is_ruled_out(
    include: bool | None, node: NodeUnderTest
) -> None:
    options = {"include_usage": include, "continuous_usage_stats": True}
    body = {"model": MODEL, "prompt": "x", "seed": 0, "stream": True, "stream_options": options}
    answer = post(f"{node.url}/v1/completions", body)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert {bool(event.get("usage")) for event in events} == {include is None}
    assert (events[-1]["choices"] == []) == (include is None)


def usages(events: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [event["usage"] for event in events]


def test_special_tokens_around_prompts_and_chats(model_dir: Path, tmp_path: Path) -> None:
    """By default, prompts get special tokens and chats do not. A request may change either."""
    folder = shutil.copytree(model_dir, tmp_path / "with-bos")
    state = json.loads((folder / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": special,
    }
    (folder / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = load_tokenizer(folder)
    limits = ModelLimits(256, 49_152)

    def text(given: bool | None) -> list[int]:
        request = CompletionRequest(model="m", prompt="Hi", add_special_tokens=given)
        return completion_prompts(request, tokenizer, limits, lambda: None)[0].token_ids

    def chat(given: bool | None) -> list[int]:
        request = ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}], add_special_tokens=given)
        return chat_prompts(request, tokenizer, limits, 0, lambda: None)[0].token_ids

    assert text(None) == text(True) == [1, *text(False)]
    assert chat(True) == [1, *chat(None)]
    assert chat(False) == chat(None)


@pytest.mark.parametrize("skip", [None, True])
def test_an_echo_has_the_special_tokens_that_were_given_as_ids(skip: bool | None, node: NodeUnderTest) -> None:
    """The offsets of the log probabilities are those of the text that is shown."""
    with node.new_submits() as submits:
        post(f"{node.url}/v1/completions", {"model": MODEL, "prompt": "<|im_start|>one two", "max_tokens": 1})
    ids = submits()[0].token_ids
    body = {"model": MODEL, "prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 1, "skip_special_tokens": skip}
    choice = post(f"{node.url}/v1/completions", body).json()["choices"][0]
    assert choice["text"].startswith("<|im_start|>one two")
    reported = choice["logprobs"]
    shown = [choice["text"][at:] for at in reported["text_offset"]]
    assert all(text.startswith(name) for text, name in zip(shown, reported["tokens"], strict=True))


def test_named_tokens_are_reported_beside_each_token(node: NodeUnderTest) -> None:
    fields = {"model": MODEL, "max_tokens": 2, "logprob_token_ids": [42, 40, 42], "return_tokens_as_token_ids": True}
    with node.new_submits() as submits:
        text = post(f"{node.url}/v1/completions", {**fields, "prompt": "x", "logprobs": 0}).json()["choices"][0]
        chat = post(
            f"{node.url}/v1/chat/completions", {**fields, "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
        ).json()["choices"][0]
    assert [submit.sampling.logprob_token_ids for submit in submits()] == [(42, 40)] * 2
    named = {"token_id:40": -40.0, "token_id:42": -42.0}
    reported = text["logprobs"]
    for name, by_name in zip(reported["tokens"], reported["top_logprobs"], strict=True):
        assert by_name == named | {name: -1.0}
    for token in chat["logprobs"]["content"]:
        chosen = {token["token"]: -1.0}
        assert {top["token"]: top["logprob"] for top in token["top_logprobs"]} == named | chosen
        assert token["top_logprobs"][0]["token"] == token["token"], "the chosen one is the first"


def test_the_engine_gets_the_priority(node: NodeUnderTest) -> None:
    with node.new_submits() as submits:
        for priority in (None, -100, 3):
            assert (
                post(f"{node.url}/v1/completions", {"model": MODEL, "prompt": "x", "priority": priority}).status == 200
            )
    assert [submit.terms.prompt.priority for submit in submits()] == [0, -100, 3]


def test_the_engine_gets_the_requests_own_targets(node: NodeUnderTest) -> None:
    wanted = RequestTargets(250.0, 40.0)
    with node.new_submits() as submits:
        for route, asked in (
            ("completions", {"prompt": "x"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("responses", {"input": "x"}),
        ):
            body = {"model": MODEL, "target_ttft_ms": 250, "target_itl_ms": 40, **asked}
            assert post(f"{node.url}/v1/{route}", body).status == 200
        assert post(f"{node.url}/v1/completions", {"model": MODEL, "prompt": "x"}).status == 200
    assert [submit.terms.own_targets for submit in submits()] == [wanted] * 3 + [NO_OWN_TARGETS]
