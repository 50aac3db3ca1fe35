"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's forms, and which chat a request becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.api.dialects.messages_request import MessagesRequest, chat_of_messages
from tests.api.behaviour import REPLY_TEXT, Behaviour
from tests.api.dialects.sse import events_in
from tests.api.node import MODEL, NodeUnderTest
from tests.api.plain_http import Answer, post, send

BODY = {"model": MODEL, "max_tokens": 99, "seed": 0, "messages": [{"role": "user", "content": "Hi"}]}


def ask(node: NodeUnderTest, path: str = "/v1/messages", **change: Any) -> Answer:
    return post(f"{node.url}{path}", {**BODY, **change}, x_request_id="r-1")


def chat(messages: list[dict[str, Any]], **fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    return chat_of_messages(msgspec.convert(body, MessagesRequest))


def test_a_whole_message(node: NodeUnderTest) -> None:
    answer = ask(node).json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": REPLY_TEXT, "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 15,
            "output_tokens": 9,
            "cache_creation_input_tokens": 13,
            "cache_read_input_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("change", "reason", "sequence"),
    [
        ({"stop_sequences": ["world"]}, "stop_sequence", "world"),
        ({"seed": Behaviour.ENDLESS, "max_tokens": 3}, "max_tokens", None),
    ],
)
def test_why_a_message_stops(change: dict[str, Any], reason: str, sequence: str | None, node: NodeUnderTest) -> None:
    whole = ask(node, **change).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    events = events_in(ask(node, stream=True, **change).body)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_tokens_are_counted_as_the_prompt_has_them(node: NodeUnderTest) -> None:
    """Nothing is generated for it, and neither ``max_tokens`` nor a signature of the whole request is needed."""
    body = {"model": MODEL, "system": "Be brief.", "messages": BODY["messages"]}
    with node.new_submits() as submits:
        counted = post(f"{node.url}/v1/messages/count_tokens", body)
        assert submits() == []
    usage = ask(node, system="Be brief.").json()["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert counted.json() == {"input_tokens": sum(usage[part] for part in parts)}


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "x"}, 404, "not_found_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "system", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"seed": Behaviour.ERROR}, 500, "api_error"),
        ({"seed": Behaviour.DEADLINE}, 504, "timeout_error"),
    ],
)
def test_errors_have_anthropic_s_form(change: dict[str, Any], status: int, kind: str, node: NodeUnderTest) -> None:
    for stream in (False, True):
        answer = ask(node, **{"stream": stream, **change})
        error = answer.json()
        assert answer.status == status
        assert error["error"].pop("message")
        assert error == {"type": "error", "error": {"type": kind}, "request_id": "r-1"}


def test_other_methods_and_bodies_too(node: NodeUnderTest) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for answer in (send("GET", node.url + path), send("POST", node.url + path, content=b"{")):
            assert answer.json()["error"]["type"] == "invalid_request_error"


def test_blocks_become_messages() -> None:
    asked = chat(
        [
            {"role": "user", "content": [{"type": "text", "text": "Add."}, {"type": "text", "text": "Now."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["x"],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add.\nNow."},
        {"role": "assistant", "content": "I add.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
        {"role": "user", "content": "And?"},
    ]
    assert (asked.wanted_tokens, asked.stops, asked.continue_final_message) == (9, ["x"], None)


@pytest.mark.parametrize("content", ["In French.", [{"type": "text", "text": "In French."}]], ids=["text", "blocks"])
def test_a_conversation_may_have_system_messages(content: Any) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "system", "content": content}]
    assert chat([*said, {"role": "user", "content": "Go on"}], system="Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "In French."},
        {"role": "user", "content": "Go on"},
    ]


def test_an_answer_goes_on_with_an_assistant_s_message() -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    assert chat(said).continue_final_message


def test_a_schema_of_the_answer_is_that_of_a_chat() -> None:
    said = [{"role": "user", "content": "Hi"}]
    asked = chat(said, output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"})
    assert (asked.response_format.json_schema.schema, asked.response_format.json_schema.strict) == (
        {"type": "object"},
        True,
    )
    assert asked.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_tools_are_those_of_a_chat(choice: dict[str, Any], expected: Any) -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
    asked = chat([{"role": "user", "content": "Hi"}], tools=[tool], tool_choice=choice)
    assert msgspec.to_builtins(asked.tool_choice) == expected
    assert [(each.function.name, each.function.parameters) for each in asked.tools] == [("add", {"type": "object"})]
    assert asked.parallel_tool_calls is (False if "disable_parallel_tool_use" in choice else None)


def test_thinking_is_an_argument_of_the_template() -> None:
    said = [{"role": "user", "content": "Hi"}]
    for kind, thinks in (("enabled", True), ("adaptive", True), ("disabled", False)):
        asked = chat(said, thinking={"type": kind, "budget_tokens": 1024})
        assert asked.chat_template_kwargs == {"enable_thinking": thinks}
    assert chat(said).chat_template_kwargs is None
    assert chat(said).include_reasoning is None
    assert chat(said, thinking={"type": "adaptive", "display": "omitted"}).include_reasoning is False


@pytest.mark.parametrize("depth", [100, 990, 5_000])
def test_a_body_of_any_depth_is_answered(depth: int, node: NodeUnderTest) -> None:
    nested = b"[" * depth + b"]" * depth
    use = b'{"type":"tool_use","id":"a","name":"b","input":{"a":%b}}' % nested
    body = b'{"model":"%b","max_tokens":1,"seed":0,"messages":[{"role":"assistant","content":[%b]}]}'
    assert send("POST", f"{node.url}/v1/messages", content=body % (MODEL.encode(), use)).status in (200, 400)


def test_a_field_is_named_as_the_client_wrote_it(node: NodeUnderTest) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2_000}
    assert ask(node, thinking=thinking).headers["x-pdserve-ignored"] == "thinking.budget_tokens"
    answer = ask(node, output_config={"effort": "huge"})
    assert answer.status == 400
    assert "'output_config.effort' is not acceptable" in answer.json()["error"]["message"]
