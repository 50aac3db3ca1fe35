"""Tests that a wrong request gets an error in OpenAI's form that names the field, and never reaches the engine."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from pdserve.api.requests.request_fields import MAX_MESSAGES
from tests.api.behaviour import Behaviour
from tests.api.node import MODEL, NodeUnderTest
from tests.api.plain_http import Answer, get, post, send
from tests.eventually import eventually

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": MODEL, "prompt": "Hi"}

WRONG_EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 256}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [49_152]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
    ({"add_special_tokens": "yes"}, "add_special_tokens"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"stream_interval": 0}, "stream_interval"),
    ({"stream": True, "stream_interval": -1}, "stream_interval"),
    ({"stream": True, "stream_interval": 1.5}, "stream_interval"),
    ({"stream": True, "stream_interval": "many"}, "stream_interval"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"presence_penalty": "much"}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 40: 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": 256}, "min_tokens"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": "x"}, "bad_words"),
    ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [49_152]}, "allowed_token_ids"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}}, "response_format.format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"guided_json": "nonsense"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"regex": "a+", "ebnf": "root ::= 'a'"}, "ebnf"),
    ({"structural_tag": "{}"}, "structural_tag"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"num_beams": 2}, "num_beams"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprob_token_ids": [-1]}, "logprob_token_ids[0]"),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids"),
    ({"logprob_token_ids": [49_152]}, "logprob_token_ids"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"stop_regex": "a+"}, "stop_regex"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"max_tokens": 256.0}, "max_tokens"),
    ({"max_tokens": 3.0, "n": 1.5}, "n"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache_salt": "s" * 1025}, "cache_salt"),
]
WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": 3, "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "a"}], "continue_final_message": 1}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"conversations": []}}, "chat_template_kwargs.conversations"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
]
WRONG_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [49_152]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**64]}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 128}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 1, "echo": True, "max_tokens": 0, "logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "echo": True}, "max_tokens"),
    ({"best_of": 21}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"priority": 101}, "priority"),
    ({"target_ttft_ms": 0}, "target_ttft_ms"),
    ({"target_itl_ms": 60_001}, "target_itl_ms"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 1, "n": 2}, "best_of"),
]


def refused(url: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
    answer = post(url, body)
    assert answer.status == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(("change", "param"), WRONG_EVERYWHERE + WRONG_CHAT, ids=str)
def test_chat_refuses(change: dict[str, Any], param: str, node: NodeUnderTest) -> None:
    with node.new_submits() as submits:
        error = refused(f"{node.url}/v1/chat/completions", {**CHAT, **change})
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert submits() == []


@pytest.mark.parametrize(("change", "param"), WRONG_EVERYWHERE + WRONG_TEXT, ids=str)
def test_completions_refuses(change: dict[str, Any], param: str, node: NodeUnderTest) -> None:
    with node.new_submits() as submits:
        error = refused(f"{node.url}/v1/completions", {**TEXT, **change})
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert submits() == []


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    "neutral",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "min_tokens": 0},
        {"logprobs": None, "top_logprobs": None, "tools": [], "tool_choice": "auto", "bad_words": []},
        {"allowed_token_ids": [], "top_logprobs": 0, "logit_bias": None, "min_tokens": None},
        {"response_format": {"type": "text"}, "suffix": None, "user": "me", "metadata": {"a": "b"}},
        {"temperature": None, "top_p": None, "n": None, "stop": None, "max_tokens": None, "stream": None},
        {"regex": None, "grammar": "", "priority": 0, "use_beam_search": False, "spaces_between_special_tokens": True},
        {"truncation_side": "left", "logprob_token_ids": [], "vllm_xargs": {}, "prediction": None},
    ],
    ids=str,
)
def test_values_that_ask_for_nothing_are_fine(neutral: dict[str, Any], route: str, node: NodeUnderTest) -> None:
    body = (CHAT if route == "chat/completions" else TEXT) | {"seed": 0} | neutral
    answer = post(f"{node.url}/v1/{route}", body)
    assert answer.status == 200, answer.text
    assert "x-pdserve-ignored" not in answer.headers


def test_unknown_fields_are_named_in_a_header(node: NodeUnderTest) -> None:
    body = {**TEXT, "seed": 0, "temprature": 0, "bad\r\nname: ü": 1}
    answer = post(f"{node.url}/v1/completions", body)
    assert answer.status == 200
    assert answer.headers["x-pdserve-ignored"] == "temprature,bad??name???"


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_unknown_model(route: str, node: NodeUnderTest) -> None:
    error = refused(f"{node.url}/v1/{route}", {**CHAT, **TEXT, "model": "gpt-9"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert MODEL in error["message"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", CHAT),
        ("completions", TEXT),
        ("responses", {"input": "Hi"}),
        ("messages", {**CHAT, "max_tokens": 4}),
    ],
)
@pytest.mark.parametrize("model", [{}, {"model": None}], ids=["missing", "null"])
def test_the_model_may_be_left_out(
    model: dict[str, None], route: str, body: dict[str, Any], node: NodeUnderTest
) -> None:
    given = {name: value for name, value in body.items() if name != "model"}
    answer = post(f"{node.url}/v1/{route}", {**given, **model, "seed": 0})
    assert (answer.status, answer.json()["model"]) == (200, MODEL)


def test_required_fields(node: NodeUnderTest) -> None:
    assert refused(f"{node.url}/v1/completions", {"model": MODEL})["param"] == "prompt"
    assert refused(f"{node.url}/v1/chat/completions", {"model": MODEL})["param"] == "messages"


@pytest.mark.parametrize("content", [b"", b" \n "])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_an_empty_body_is_called_so(path: str, content: bytes, node: NodeUnderTest) -> None:
    answer = send("POST", node.url + path, content=content)
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (400, "empty_body")
    assert "no body" in error["message"]


@pytest.mark.parametrize(
    ("biases", "named"),
    [
        ({"5": 1, "five": 1}, "at 'five':"),
        ({"-5": 1}, "at '-5':"),
        ({"5": 101}, "at '5':"),
        ({"5": 1, "7": "x"}, "at '7':"),
        ({"5.0": 1}, "at '5.0':"),
        ({"one": 1, "5": 1, "two": 2}, "at 'one', 'two':"),
        ({f"k{i}": 1 for i in range(100)}, "at " + ", ".join(f"'k{i}'" for i in range(8)) + ":"),
    ],
)
def test_the_wrong_keys_of_logit_bias_are_named(biases: dict[str, Any], named: str, node: NodeUnderTest) -> None:
    error = refused(f"{node.url}/v1/completions", {**TEXT, "logit_bias": biases})
    assert error["param"] == "logit_bias"
    assert named in error["message"]


def test_an_id_that_the_model_does_not_have_is_out_of_vocabulary(node: NodeUnderTest) -> None:
    error = refused(f"{node.url}/v1/completions", {**TEXT, "prompt": [5, 49_152]})
    assert error["param"] == "prompt"
    assert "token id 49152 is out of vocabulary" in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800", "prompt": "x"}',
        b'{"model": "scripted", "prompt": "x", "temperature": NaN}',
        b'{"model": "scripted", "prompt": "x", "temperature": 1e999}',
        b'{"model": "scripted", "prompt": ' + b"[" * 40_000,
        b'{"model": "scripted", "prompt": "x", "zzz": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b'{"model": "scripted", "prompt": "x", "tools": ' + b'{"a":' * 15_000 + b"1" + b"}" * 15_000 + b"}",
    ],
    ids=lambda content: repr(content[:50]),
)
def test_bodies_that_are_no_requests(content: bytes, node: NodeUnderTest) -> None:
    answer = send("POST", f"{node.url}/v1/completions", content=content)
    assert answer.status == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert get(f"{node.url}/health").status == 200


@pytest.mark.parametrize("text", [rb"\ud800", rb"a \ud83d b", rb"\udc00", rb"\ud800 and more text"])
def test_unpaired_surrogates_are_called_so(text: bytes, node: NodeUnderTest) -> None:
    answer = send("POST", f"{node.url}/v1/completions", content=b'{"model": "scripted", "prompt": "' + text + b'"}')
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (400, "invalid_json")
    assert "unpaired surrogate" in error["message"]


def test_surrogate_pairs_are_text(node: NodeUnderTest) -> None:
    content = rb'{"model": "scripted", "prompt": "\ud83d\ude00", "seed": 0}'
    assert send("POST", f"{node.url}/v1/completions", content=content).status == 200


@pytest.mark.parametrize("field", [b"n", b"seed", b"logit_bias", b"min_tokens", b"cache_salt"])
def test_numbers_beyond_all_types_name_their_field(field: bytes, node: NodeUnderTest) -> None:
    content = b'{"model": "scripted", "prompt": "x", "' + field + b'": ' + b"1" * 5_000 + b"}"
    answer = send("POST", f"{node.url}/v1/completions", content=content)
    assert (answer.status, answer.json()["error"]["param"]) == (400, field.decode())


def test_too_many_messages(node: NodeUnderTest) -> None:
    error = refused(f"{node.url}/v1/chat/completions", {**CHAT, "messages": [{}] * (MAX_MESSAGES + 1)})
    assert error["param"] == "messages"
    assert str(MAX_MESSAGES) in error["message"]


def test_long_model_names_are_not_echoed(node: NodeUnderTest) -> None:
    error = refused(f"{node.url}/v1/completions", {**TEXT, "model": "m" * 60_000}, 404)
    assert len(error["message"]) < 400


def test_deeply_nested_values_inside_the_limit_of_json(node: NodeUnderTest) -> None:
    nested: Any = "x"
    for _ in range(400):
        nested = [nested]
    error = refused(f"{node.url}/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": nested}]})
    assert error["param"] == "messages[0].content[0].type"


@pytest.mark.parametrize("sized", [True, False])
def test_body_too_large(sized: bool, node: NodeUnderTest) -> None:
    piece = b"x" * 10_000
    content = piece * 30 if sized else (piece for _ in range(30))
    answer = send("POST", f"{node.url}/v1/completions", content=content)
    assert answer.status == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_prompt_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt=list(range(100, 356)))
    assert raised.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 256 tokens" in raised.value.message
    assert "the prompt has 256 tokens" in raised.value.message


def test_prompt_and_output_too_long(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=MODEL, prompt=list(range(100, 300)), max_tokens=57)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "max_tokens")
    answer = client.completions.create(model=MODEL, prompt=list(range(100, 300)), max_tokens=56, seed=0)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/nothing", 404, "not_found_error"),
        ("GET", "/v1/completions", 405, "invalid_request_error"),
        ("POST", "/v1/models", 405, "invalid_request_error"),
        ("GET", "/v1/models//x", 404, "not_found_error"),
        ("POST", "/v1//completions", 404, "not_found_error"),
        ("POST", "/v1/completions/", 404, "not_found_error"),
    ],
)
def test_routes_that_are_none(method: str, path: str, status: int, kind: str, node: NodeUnderTest) -> None:
    answer = send(method, node.url + path)
    assert answer.status == status
    error = answer.json()["error"]
    assert error["type"] == kind
    assert f"{method} {path}" in error["message"] or status == 405
    assert answer.headers["x-request-id"]
    assert status != 405 or "allow" in answer.headers


# ------------------------------------------------------------------ failures on the way

FAILURES = [(Behaviour.ERROR, 500, "engine_error"), (Behaviour.DEADLINE, 504, "deadline_exceeded")]
LATE_FAILURES = [(Behaviour.ERROR_LATE, 500, "engine_error"), (Behaviour.DEADLINE_LATE, 504, "deadline_exceeded")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("seed", "status", "code"), FAILURES)
def test_failure_before_the_first_byte_is_a_status(
    seed: int, status: int, code: str, stream: bool, node: NodeUnderTest
) -> None:
    body = {**CHAT, "seed": seed, "stream": stream}
    assert refused(f"{node.url}/v1/chat/completions", body, status)["code"] == code


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_an_encoded_body_is_refused_as_such(path: str, node: NodeUnderTest) -> None:
    answer = post(f"{node.url}{path}", TEXT, content_encoding="gzip")
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"
    assert post(f"{node.url}/v1/completions", TEXT, content_encoding="identity").status == 200


@pytest.mark.parametrize(("seed", "status", "code"), LATE_FAILURES)
def test_late_failure_of_a_whole_answer_is_a_status(seed: int, status: int, code: str, node: NodeUnderTest) -> None:
    assert refused(f"{node.url}/v1/chat/completions", {**CHAT, "seed": seed}, status)["code"] == code


def streamed(url: str, body: object) -> Answer:
    """Returns the answer to a reader that was in time. A late one gets a status in place of an event."""
    return next(answer for answer in (post(url, body) for _ in range(50)) if answer.status == 200)


@pytest.mark.parametrize(("seed", "status", "code"), LATE_FAILURES)
def test_late_failure_of_a_stream_is_an_event(seed: int, status: int, code: str, node: NodeUnderTest) -> None:
    answer = streamed(f"{node.url}/v1/chat/completions", {**CHAT, "seed": seed, "stream": True})
    *chunks, error, end = answer.text.split("\n\n")
    assert end == ""
    assert error.startswith("event: error\ndata: ")
    assert f'"code":"{code}"' in error
    assert len(chunks) >= 1
    assert not any('finish_reason":"' in chunk or "[DONE]" in chunk for chunk in chunks)


@pytest.mark.parametrize("interval", [1, 10])
@pytest.mark.parametrize("seed", [Behaviour.ERROR_LATE, Behaviour.DEADLINE_LATE])
def test_text_before_a_failure_is_not_lost(seed: int, interval: int, node: NodeUnderTest) -> None:
    """The client gets also text that might have begun a stop string, and text that waits for its interval."""
    body = {**TEXT, "seed": seed, "stream": True, "stop": "Hello, there", "stream_interval": interval}
    answer = streamed(f"{node.url}/v1/completions", body)
    texts = [line.split('"text":"')[1].split('"')[0] for line in answer.text.split("\n\n") if '"text":"' in line]
    assert "".join(texts) == "Hello,"


def test_client_library_raises_for_a_failed_stream(client: openai.OpenAI) -> None:
    # A reader that is late gets a status instead of an event.
    with pytest.raises(openai.APIError, match="failed on purpose"):
        for _ in client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], seed=Behaviour.ERROR_LATE, stream=True
        ):
            pass


def test_one_failed_choice_fails_all_and_aborts_the_others(node: NodeUnderTest) -> None:
    before = len(node.submits())
    body = {**TEXT, "seed": Behaviour.ERROR - 1, "n": 2}  # These are seeds of SILENT and ERROR.
    error = refused(f"{node.url}/v1/completions", body, 500)
    assert error["code"] == "engine_error"
    silent = node.submits()[before].local_id
    eventually(lambda: silent in node.aborted())


def test_unknown_fields_within_others_are_named(node: NodeUnderTest) -> None:
    body = {
        "model": MODEL,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}] * 2}],
        "new_field": 1,
    }
    answer = post(f"{node.url}/v1/chat/completions", body)
    assert answer.status == 200
    named = answer.headers["x-pdserve-ignored"]
    assert named == "new_field,stream_options.include_obfuscation,messages.content.cache_control"
    plain = post(f"{node.url}/v1/completions", {**TEXT, "seed": 0, "stream_options": None})
    assert "x-pdserve-ignored" not in plain.headers


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenised(chat: bool, node: NodeUnderTest) -> None:
    """The context has 256 tokens. A request that asks for its prompt to be cut is answered."""
    text = "word " * 15_000
    body = {**CHAT, "messages": [{"role": "user", "content": text}]} if chat else {**TEXT, "prompt": text}
    answer = post(f"{node.url}/v1/{'chat/' if chat else ''}completions", body)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json()["error"]["param"] == ("messages" if chat else "prompt")
    assert "This model's maximum context length is 256 tokens" in answer.json()["error"]["message"]
    cut = post(f"{node.url}/v1/completions", {**TEXT, "prompt": text, "truncate_prompt_tokens": 9, "seed": 0})
    assert (cut.status, cut.json()["usage"]["prompt_tokens"]) == (200, 9)
    assert post(f"{node.url}/tokenize", {"prompt": text}).json()["count"] > 15_000


def test_token_ids_that_every_prompt_repeats_are_bounded_together(node: NodeUnderTest) -> None:
    """A body of a hundred kilobytes would otherwise become messages of hundreds of megabytes to the engine."""
    body = {**TEXT, "prompt": ["x"] * 200, "seed": 0, "allowed_token_ids": list(range(1_000, 2_500))}
    error = refused(f"{node.url}/v1/completions", body, 400)
    assert "at most 262144 together" in error["message"]
    fine = post(f"{node.url}/v1/completions", {**body, "prompt": ["x"] * 2})
    assert fine.status == 200
