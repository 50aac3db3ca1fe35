"""``POST /v1/responses``: what OpenAI's client reads, and which chat a request becomes."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import openai
import pytest

from pdserve.api.dialects.responses_request import ResponsesRequest, chat_of_response
from pdserve.errors import InvalidRequest
from tests.api.behaviour import REPLY_TEXT, Behaviour
from tests.api.node import MODEL, NodeUnderTest
from tests.api.plain_http import post

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hi"}, {"type": "text", "text": "?"}],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Well."}]},
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
    },
    CALL,
    {**CALL, "call_id": "c2"},
    {"type": "function_call_output", "call_id": "c1", "output": "3"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
]


def request(**fields: Any) -> ResponsesRequest:
    return msgspec.convert({"model": "m", "input": "Hi", **fields}, ResponsesRequest)


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        chat_of_response(request(**fields))
    return error.value


def test_openai_s_client_reads_whole_answers_and_streams(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="x", metadata={"a": "b"}, extra_body={"seed": 0})
    assert (whole.output_text, whole.status, whole.metadata) == (REPLY_TEXT, "completed", {"a": "b"})
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(model=MODEL, input="x", extra_body={"seed": 0}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == REPLY_TEXT
    assert final.usage == whole.usage


def test_a_cut_answer_is_incomplete(client: openai.OpenAI) -> None:
    cut = client.responses.create(
        model=MODEL, input="x", max_output_tokens=3, extra_body={"seed": Behaviour.ENDLESS.value}
    )
    assert (cut.status, cut.output_text) == ("incomplete", " word" * 3)
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert [item.to_dict()["status"] for item in cut.output] == ["incomplete"]


def test_a_node_names_the_fields_that_it_does_not_know(node: NodeUnderTest) -> None:
    answer = post(f"{node.url}/v1/responses", {"model": MODEL, "input": "x", "seed": 0, "zebra": 1})
    assert (answer.status, answer.headers["x-pdserve-ignored"]) == (200, "zebra")


def space_of(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name} for name in names]
    return {"type": "namespace", "name": "n", "description": "d", "tools": tools}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [{}]}]}, "tools[0].tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "elf", "content": "x"}]}, "input[0].role"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "word " * 2_000}, "input"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name"),
        ({"tools": [space_of("a"), space_of("b", "c", "b")]}, "tools[1].tools[2].name"),
        ({"tools": [space_of("a", "b"), space_of("c", "b c")]}, "tools[1].tools[1].name"),
        ({"tools": [space_of("a.b"), {**space_of("b"), "name": "n.a"}]}, "tools[1].tools[0].name"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(change: dict[str, Any], param: str, node: NodeUnderTest) -> None:
    answer = post(f"{node.url}/v1/responses", {"model": MODEL, "input": "x", **change})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param)
    assert "function." not in error["message"]


def test_items_become_messages() -> None:
    chat = chat_of_response(request(input=ITEMS, instructions="Help."))
    function = {"name": "add", "arguments": '{"a":1}'}
    assert chat.messages == [
        {"role": "system", "content": "Help."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi\n?"},
        {
            "role": "assistant",
            "content": "Hello",
            "reasoning_content": "Well.",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]


def test_sampling_fields_have_the_same_names() -> None:
    chat = chat_of_response(request(max_output_tokens=7, temperature=0.5, seed=3, stop=["x"], stream=True))
    assert (chat.wanted_tokens, chat.temperature, chat.seed, chat.stops, chat.stream) == (7, 0.5, 3, ["x"], True)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]},
            },
        ),
    ],
)
def test_tools_are_those_of_a_chat(choice: Any, expected: Any) -> None:
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
    chat = chat_of_response(request(tools=[tool], tool_choice=choice, parallel_tool_calls=False))
    assert msgspec.to_builtins(chat.tool_choice) == expected
    assert [(each.function.name, each.function.strict) for each in chat.tools or ()] == [("add", True)]
    assert chat.parallel_tool_calls is False


def test_a_schema_of_the_answer_is_that_of_a_chat() -> None:
    wanted = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    asked = chat_of_response(request(text={"format": wanted}, reasoning={"effort": "low"}))
    assert asked.response_format is not None
    assert asked.response_format.json_schema is not None
    assert (asked.response_format.json_schema.schema, asked.reasoning_effort) == ({"type": "object"}, "low")


def test_text_of_any_kind_asks_for_nothing() -> None:
    for text in (None, {"verbosity": "low"}, {"format": {"type": "text"}}):
        assert cast("Any", chat_of_response(request(text=text))).messages == [{"role": "user", "content": "Hi"}]


def test_a_request_may_leave_the_model_out(client: openai.OpenAI) -> None:
    answer = client.responses.create(input="x", extra_body={"seed": 0})
    assert (answer.model, answer.output_text) == (MODEL, REPLY_TEXT)


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    """They are in the answer, and in the stream's pieces, as in a chat."""
    asked: dict[str, Any] = {"model": MODEL, "input": "x", "top_logprobs": 2, "extra_body": {"seed": 0}}
    whole = client.responses.create(include=["message.output_text.logprobs"], **asked)
    part = cast("Any", whole.output[0]).content[0]
    assert "".join(each.token for each in part.logprobs) == part.text == REPLY_TEXT
    assert [len(each.top_logprobs) for each in part.logprobs] == [2] * len(part.logprobs)
    assert whole.top_logprobs == 2
    pieces: list[Any] = []
    for event in client.responses.create(stream=True, **asked):
        if event.type == "response.output_text.delta":
            pieces += [each.to_dict() for each in event.logprobs]
        elif event.type == "response.completed":
            final = cast("Any", event.response.output[0]).content[0]
    assert pieces == [each.to_dict() for each in final.logprobs] == [each.to_dict() for each in part.logprobs]


NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "function", "name": "find", "description": "Finds one."}],
}


def test_a_function_of_a_namespace_has_both_names() -> None:
    call = {**CALL, "name": "find", "namespace": "crm"}
    chat = chat_of_response(request(tools=[NAMESPACE], input=[{"role": "user", "content": "x"}, call]))
    assert chat.tools is not None
    [tool] = chat.tools
    assert (tool.function.name, tool.function.description) == ("crm.find", "Customers.\nFinds one.")
    assert chat.messages[1]["tool_calls"][0]["function"]["name"] == "crm.find"


def test_the_items_of_earlier_responses_come_before_the_input() -> None:
    history = msgspec.json.encode([{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}])
    asked = request(input=[{"role": "assistant", "content": "Three"}], instructions="Help.", previous_response_id="r")
    assert chat_of_response(asked, history).messages == [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two\nThree"},
    ]


def test_a_call_that_the_limit_of_tokens_has_cut_is_not_shown_to_the_model() -> None:
    cut = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a', "status": "incomplete"}
    history = msgspec.json.encode([{"role": "user", "content": "One"}, cut])
    asked = request(input="Two", previous_response_id="r")
    assert chat_of_response(asked, history).messages == [
        {"role": "user", "content": "One"},
        {"role": "user", "content": "Two"},
    ]
