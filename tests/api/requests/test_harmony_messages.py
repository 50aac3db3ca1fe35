"""Tests that conversations reach the chat templates of Harmony models whole, or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.api.requests.chat_messages import render_chat
from pdserve.api.requests.openai_request import ChatRequest
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.errors import InvalidRequest
from tests.api.harmony_model import save_harmony_model

ASK = {"role": "user", "content": "Weather?"}
START = "<|start|>system<|message|>Effort: medium<|end|>"
ASKED = "<|start|>user<|message|>Weather?<|end|>"
ANSWER = "<|start|>assistant"


@pytest.fixture(scope="module")
def harmony(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_harmony_model(model_dir, tmp_path_factory.mktemp("harmony") / "model"))


def call(call_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, **fields: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, **fields}


def rendered(tokenizer: Tokenizer, *messages: dict[str, Any], **fields: Any) -> str:
    request = msgspec.convert({"messages": list(messages), **fields}, ChatRequest)
    return render_chat(request, tokenizer, 0)


def shown_call(name: str, arguments: str = "{}") -> str:
    return f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"


def shown_result(name: str, content: str) -> str:
    return f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{content}"<|end|>'


def thought(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


def test_each_call_has_its_result_behind_it(harmony: Tokenizer) -> None:
    said = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Two calls.",
        "tool_calls": [call("a", "f", '{"x": 1}'), call("b", "g")],
    }
    text = rendered(harmony, ASK, said, result("of g", tool_call_id="b"), result("of f", tool_call_id="a"))
    calls = [shown_call("f", '{"x": 1}'), shown_result("f", "of f"), shown_call("g"), shown_result("g", "of g")]
    assert text == START + ASKED + thought("Two calls.\n\nI look.") + "".join(calls) + ANSWER


def test_results_without_ids_are_in_the_order_of_the_calls(harmony: Tokenizer) -> None:
    said = {"role": "assistant", "content": None, "thinking": "Hm.", "tool_calls": [call("a", "f"), call("b", "g")]}
    text = rendered(harmony, ASK, said, result("1"), result("2"), result("3"))
    calls = [shown_call("f"), shown_result("f", "1"), shown_call("g"), shown_result("g", "2"), shown_result("g", "3")]
    assert text == START + ASKED + thought("Hm.") + "".join(calls) + ANSWER


def test_reasoning_is_kept_between_calls_and_dropped_behind_answers(harmony: Tokenizer) -> None:
    first = {"role": "assistant", "content": "", "reasoning": "One.", "tool_calls": [call("a", "f")]}
    second = {"role": "assistant", "content": "", "reasoning": "Two.", "tool_calls": [call("b", "g")]}
    done = {"role": "assistant", "content": "Sunny.", "reasoning": "Three."}
    results = [result("x", tool_call_id="a"), result("y", tool_call_id="b")]
    text = rendered(harmony, ASK, first, results[0], second, results[1], done, ASK)
    assert text == "".join(
        [
            *(START, ASKED, thought("One."), shown_call("f"), shown_result("f", "x")),
            *(thought("Two."), shown_call("g"), shown_result("g", "y")),
            *("<|start|>assistant<|channel|>final<|message|>Sunny.<|end|>", ASKED, ANSWER),
        ]
    )


def test_leading_instructions_are_one_message_and_later_ones_are_refused(harmony: Tokenizer) -> None:
    told = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}]
    developer = "<|start|>developer<|message|>Be brief.\n\nBe kind.<|end|>"
    assert rendered(harmony, *told, ASK) == START + developer + ASKED + ANSWER
    with pytest.raises(InvalidRequest, match="instructions at the beginning alone") as refused:
        rendered(harmony, ASK, told[0])
    assert refused.value.param == "messages[1].role"


def test_functions_need_no_descriptions(harmony: Tokenizer) -> None:
    bare = {"type": "function", "function": {"name": "g"}}
    properties = {"a": {"type": "string"}, "b": True, "c": {"description": "the third"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    text = rendered(harmony, ASK, tools=[tool, bare])
    assert "<|start|>developer<|message|>[f: , a: , b: , c: the third][g: ]<|end|>" in text


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "max", "chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
    ],
)
def test_the_effort_reaches_the_template(fields: dict[str, Any], shown: str, harmony: Tokenizer) -> None:
    assert f"Effort: {shown}<" in rendered(harmony, ASK, **fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": "huge"}}, "chat_template_kwargs.reasoning_effort"),
        ({"chat_template_kwargs": {"reasoning_effort": [1]}}, "chat_template_kwargs.reasoning_effort"),
    ],
)
def test_an_effort_that_the_model_does_not_know_is_refused(
    fields: dict[str, Any], param: str, harmony: Tokenizer
) -> None:
    with pytest.raises(InvalidRequest, match="must be one of low, medium, high") as refused:
        rendered(harmony, ASK, **fields)
    assert refused.value.param == param


def test_an_answer_can_be_continued(harmony: Tokenizer) -> None:
    said = {"role": "assistant", "content": "It is"}
    text = rendered(harmony, ASK, said, continue_final_message=True, add_generation_prompt=False)
    assert text == START + ASKED + "<|start|>assistant<|channel|>final<|message|>It is"
