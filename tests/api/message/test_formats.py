"""Tests that a chat template shows which forms its model writes."""

from __future__ import annotations

import pytest

from pdserve.api.message.formats import MessageFormats, formats_of
from pdserve.api.message.reasoning import ReasoningStart
from pdserve.config import MessageConfig, ReasoningFormat, ToolFormat
from pdserve.errors import ConfigError

TEMPLATES = {
    'return a json object within <tool_call></tool_call>: {"name": <function-name>}': ToolFormat.HERMES,
    "<tool_call>\n<function=example>\n<parameter=one>": ToolFormat.QWEN_XML,
    'Respond in the format {"name": function name, "parameters": dictionary of names}.': ToolFormat.LLAMA_JSON,
    "{{- '<|python_tag|>' + tool_call.name }}": ToolFormat.LLAMA_JSON,
    "[func_name1(params_name1=params_value1)]": ToolFormat.PYTHONIC,
    "{{ '[TOOL_CALLS]' }}": ToolFormat.MISTRAL,
    "{{ '<TOOLCALL>[' }}": ToolFormat.NEMOTRON,
    "{{ '<start_of_turn>' + role }}": ToolFormat.GEMMA,
    "{{ '<|tool_call>call:' + function.name }}": ToolFormat.GEMMA4,
    "{{ message.content }}": ToolFormat.HERMES,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_form_of_calls(template: str) -> None:
    assert formats_of(template, MessageConfig()).calls is TEMPLATES[template]
    named = formats_of(template, MessageConfig(ToolFormat.GEMMA, ReasoningFormat.MISTRAL))
    assert named == MessageFormats(ToolFormat.GEMMA, ReasoningFormat.MISTRAL)


def test_the_form_of_reasoning() -> None:
    def form(template: str) -> ReasoningFormat:
        return formats_of(template, MessageConfig()).reasoning

    assert form("{{ content.split('</think>')[-1] }}") is ReasoningFormat.THINK
    assert form("[THINK]Your thoughts[/THINK]") is ReasoningFormat.MISTRAL
    assert form("{{ '<|channel>thought\n' + message.reasoning }}") is ReasoningFormat.GEMMA4
    assert form("{{ content }}") is ReasoningFormat.NONE


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|im_start|>assistant\n", ReasoningStart.BEFORE),
        ("<|im_start|>assistant\n<think>\n", ReasoningStart.INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ReasoningStart.BEHIND),
        ("What is <think>?<|im_end|>", ReasoningStart.BEFORE),
    ],
)
def test_the_prompt_says_where_the_answer_begins(prompt: str, start: ReasoningStart) -> None:
    assert MessageFormats(ToolFormat.NONE, ReasoningFormat.THINK).reasoning_start(prompt) is start
    assert MessageFormats(ToolFormat.NONE, ReasoningFormat.NONE).reasoning_start(prompt) is ReasoningStart.BEFORE


HARMONY = "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"


def test_harmony_is_a_format_of_reasoning_and_calls() -> None:
    assert formats_of(HARMONY, MessageConfig()) == MessageFormats(ToolFormat.HARMONY, ReasoningFormat.HARMONY)
    none = formats_of(HARMONY, MessageConfig(reasoning_parser=ReasoningFormat.NONE))
    assert none == MessageFormats(ToolFormat.HARMONY, ReasoningFormat.NONE)
    assert not formats_of(HARMONY, MessageConfig(ToolFormat.NONE, ReasoningFormat.NONE)).harmony
    for config in (MessageConfig(ToolFormat.HERMES), MessageConfig(reasoning_parser=ReasoningFormat.THINK)):
        with pytest.raises(ConfigError, match="Harmony is a format of complete answers"):
            formats_of(HARMONY, config)
