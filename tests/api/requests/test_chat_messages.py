"""Tests that conversations with tools are checked, and reach templates as transformers gives them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from pdserve.api.dialects.messages_request import MessagesRequest, chat_of_messages
from pdserve.api.dialects.responses_request import ResponsesRequest, chat_of_response
from pdserve.api.requests.chat_messages import plain_messages, render_chat, spelled_out, unheeded_fields
from pdserve.api.requests.openai_request import ChatRequest
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.errors import InvalidRequest
from tests.cpu_time import least_cpu_s

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says <how> it is",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 1e1}}},
    },
}
ARGUMENTS = {"city": "Köln", "days": [1, 2.0]}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "Weather?"}]},
    {"role": "assistant", "content": None, "refusal": None, "function_call": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "assistant", "content": "Sunny.", "reasoning": "Easy.", "tool_calls": None},
    {"role": "narrator", "content": "It rains."},
]
TEMPLATE = """{#- Its roles are those of every chat, and 'narrator'. #}
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}[{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}]
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls %}{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}{% if message.tool_calls is defined %}!{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% if not enable_thinking | default(true) %}-{% endif %}{% endif %}"""


def with_template(model_dir: Path, folder: Path, template: str) -> Tokenizer:
    shutil.copytree(model_dir, folder)
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"model": "m", "messages": CONVERSATION, **fields}, ChatRequest)


def test_a_template_with_tools_gets_what_transformers_gives_it(model_dir: Path, tmp_path: Path) -> None:
    tokenizer = with_template(model_dir, tmp_path / "tools", TEMPLATE)
    text = render_chat(chat(tools=[TOOL]), tokenizer, 0)
    plain = [dict(message) for message in CONVERSATION]
    plain[0]["role"] = "system"
    plain[1]["content"] = "Weather?"
    plain[2] = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {**CALL["function"]}}]}  # type: ignore[dict-item]
    plain[2]["tool_calls"][0]["function"]["arguments"] = ARGUMENTS
    plain[4] = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Easy."}
    reference = AutoTokenizer.from_pretrained(tmp_path / "tools")
    assert text == reference.apply_chat_template(plain, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert '[system]Be brief.[user Ann]Weather?[assistant]c1 get_weather {"city": "Köln", "days": [1, 2.0]}!' in text
    assert "[assistant]<think>Easy.</think>Sunny.[narrator]" in text
    assert "get_weather" not in render_chat(
        chat(tools=[TOOL], tool_choice="none", messages=CONVERSATION[:2]), tokenizer, 0
    )


@pytest.mark.parametrize(
    ("fields", "off"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "high"}, False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, True),
    ],
    ids=str,
)
def test_reasoning_effort_reaches_a_template_that_can_switch_it_off(
    fields: dict[str, Any], off: bool, model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(model_dir, tmp_path / "switch", TEMPLATE)
    assert render_chat(chat(**fields), tokenizer, 0).endswith("[assistant]-" if off else "[assistant]")


def test_reasoning_effort_without_effect_is_named() -> None:
    asked = chat(reasoning_effort="low")
    assert unheeded_fields(asked, "{{ content }}") == ("reasoning_effort",)
    assert not unheeded_fields(asked, "{{ reasoning_effort }}")
    assert not unheeded_fields(chat(), "{{ content }}")


def test_reasoning_effort_reaches_a_template_that_knows_it(model_dir: Path, tmp_path: Path) -> None:
    tokenizer = with_template(model_dir, tmp_path / "effort", "{{ reasoning_effort }}")
    assert render_chat(chat(reasoning_effort="low", messages=CONVERSATION[:2]), tokenizer, 0) == "low"


def test_a_template_that_knows_no_tools_gets_them_in_words(tokenizer: Tokenizer) -> None:
    text = render_chat(chat(tools=[TOOL], messages=CONVERSATION[:4]), tokenizer, 0)
    assert "<|im_start|>system\nBe brief.\n\nYou can call these functions." in text
    assert json.dumps(TOOL["function"]["description"]) in text  # type: ignore[index]
    assert '<tool_call>\n{"name":"get_weather","arguments":{"city":"Köln","days":[1,2.0]}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>" in text
    alone = render_chat(chat(tools=[TOOL], messages=CONVERSATION[1:2]), tokenizer, 0)
    assert alone.startswith("<|im_start|>system\nYou can call these functions.")


STRICT = """{%- set first = 1 if messages[0].role == "system" else 0 %}
{%- if first %}[{{ messages[0].content }}]{% endif %}
{%- for message in messages[first:] %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{%- if message.role not in ("user", "assistant") %}{{ raise_exception("no such role") }}{% endif %}
{{- "\\n" + message.role + ": " + message.content }}
{%- endfor %}"""
"""As Gemma's: one system message, and turns that alternate."""
USER = {"role": "user", "content": "Weather?"}
CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, {**CALL, "id": "c2"}]}
RESULTS = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in (("c1", "sunny"), ("c2", "warm"))]

SAID = [f"<tool_response>\n{one['content']}\n</tool_response>" for one in RESULTS]


@pytest.fixture(scope="module")
def strict(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_template(model_dir, tmp_path_factory.mktemp("strict") / "model", STRICT)


@pytest.mark.parametrize(
    ("messages", "ending"),
    [
        ([USER, CALLED, *RESULTS], "user: " + "\n".join(SAID)),
        ([USER, CALLED, *RESULTS, {"role": "user", "content": "And?"}], "user: " + "\n".join([*SAID, "And?"])),
        ([USER, CALLED, *RESULTS, {"role": "assistant", "content": "Fine."}, USER], "user: Weather?"),
        ([USER, {"role": "assistant", "content": "Hm."}, {**CALLED, "content": None}, *RESULTS], "\n".join(SAID)),
        ([{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, USER], "[A\n\nB]\nuser: Weather?"),
        ([{"role": "developer", "content": "A"}, {"role": "system", "content": "B"}, USER], "[A\n\nB]\nuser: Weather?"),
    ],
    ids=["two results", "results and text", "a later turn", "text and calls", "system, developer", "developer, system"],
)
def test_what_pdserve_puts_in_other_words_is_joined_for_strict_templates(
    messages: list[dict[str, Any]], ending: str, strict: Tokenizer
) -> None:
    assert render_chat(chat(messages=messages), strict, 0).endswith(ending)
    render_chat(chat(messages=messages, tools=[TOOL]), strict, 0)


@pytest.mark.parametrize(
    "messages",
    [
        [USER, USER],
        [USER, {"role": "system", "content": "A"}],
        [{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, USER],
        [*RESULTS, {"role": "assistant", "content": "Fine."}, USER, {"role": "developer", "content": "A"}],
    ],
)
def test_what_a_template_refuses_by_its_own_rule_stays_refused(
    messages: list[dict[str, Any]], strict: Tokenizer
) -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        render_chat(chat(messages=messages), strict, 0)


def test_long_messages_that_are_joined_are_not_copied_with_each_neighbour() -> None:
    """A join with each of them would copy more than 10 GB: 16 s in which huge bodies of all clients wait."""

    def joined_s(count: int) -> tuple[float, float]:
        texts = ["x" * 4_000_000, *["y"] * count]
        results = [{"role": "tool", "tool_call_id": "c1", "content": text} for text in texts]
        turns = [{"role": "user", "content": text} for text in texts]
        body = msgspec.convert({"model": "m", "max_tokens": 9, "messages": turns}, MessagesRequest)
        [user] = spelled_out(results, [])
        [translated] = list(chat_of_messages(body).messages or ())
        assert user["content"].count("y") == count
        assert translated["content"] == "\n".join(texts)
        return least_cpu_s(lambda: spelled_out(results, [])), least_cpu_s(lambda: chat_of_messages(body))

    for few_s, many_s in zip(joined_s(1), joined_s(1_000), strict=True):
        assert many_s < 100 * few_s


def test_a_conversation_of_codex_reaches_a_strict_template(strict: Tokenizer) -> None:
    """It begins each turn with instructions, a developer's message and what it says in the user's name."""
    said = [("developer", "Be careful."), ("user", "I am in /work."), ("user", "Go.")]
    items = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]} for role, text in said
    ]
    for system in ([], [{"role": "system", "content": "Short."}]):
        body = {"model": "m", "instructions": "Help.", "input": [*system, *items]}
        text = render_chat(chat_of_response(msgspec.convert(body, ResponsesRequest)), strict, 0)
        told = ["Help.", *(one["content"] for one in system), "Be careful."]
        assert text == "[" + "\n\n".join(told) + "]\nuser: I am in /work.\nGo."


def test_a_conversation_of_anthropic_s_clients_reaches_a_strict_template(strict: Tokenizer) -> None:
    """Neighbours of one role are one turn there, and results come with the user's text."""
    result = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in (("t", "3"), ("u", "4"))]
    use: list[dict[str, Any]] = [{"type": "tool_use", "id": name, "name": "add", "input": {}} for name in ("t", "u")]
    turns = [
        {"role": "system", "content": "Short."},
        *({"role": "user", "content": text} for text in ("Hi.", "Add.")),
        {"role": "assistant", "content": [{"type": "text", "text": "I add."}]},
        {"role": "assistant", "content": use},
        {"role": "user", "content": [*result, {"type": "text", "text": "And?"}]},
    ]
    body = {"model": "m", "max_tokens": 9, "system": "Help.", "messages": turns}
    text = render_chat(chat_of_messages(msgspec.convert(body, MessagesRequest)), strict, 0)
    assert text.startswith("[Help.\nShort.]\nuser: Hi.\nAdd.\nassistant: I add.\n<tool_call>")
    assert text.endswith(
        "</tool_call>\nuser: <tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>\nAnd?"
    )


def call(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, **fields}]}


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": CALL}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0]"),
        (call(type="custom"), "messages[0].tool_calls[0]"),
        (call(id=7), "messages[0].tool_calls[0].id"),
        (call(function={"name": ""}), "messages[0].tool_calls[0].function.name"),
        *(
            (call(function={"name": "f", "arguments": wrong}), "messages[0].tool_calls[0].function.arguments")
            for wrong in ("[1]", "nothing", 7)
        ),
        ({"role": "tool", "tool_call_id": 7, "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "name": {}, "content": "x"}, "messages[0].name"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "tool", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_is_wrong_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        plain_messages([message])
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("role", "known"), [("narrator", True), ("tool", True), ("Narrator", False), ("observer" * 20, False)]
)
def test_a_role_that_neither_chats_nor_the_template_know_is_refused(
    role: str, known: bool, model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = with_template(model_dir, tmp_path / "roles", TEMPLATE)
    request = chat(messages=[USER, {"role": role, "content": "It rains.", "tool_call_id": "c1"}])
    if known:
        assert f"[{role}]It rains." in render_chat(request, tokenizer, 0)
        return
    with pytest.raises(InvalidRequest, match="must be one of system, developer, user, assistant, tool") as raised:
        render_chat(request, tokenizer, 0)
    assert raised.value.param == "messages[1].role"
    assert role[:64] in str(raised.value)
    assert len(str(raised.value)) < 200


TEXT_ONLY = "must be '{}': this model reads text only"


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file", "input_file", "video_url"])
def test_a_chat_reads_text_only(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=TEXT_ONLY.format("text")) as raised:
        plain_messages([{"role": "user", "content": [{"type": kind, kind: {}}]}])
    assert raised.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio", "image_url"])
def test_responses_read_text_only_and_say_it_in_a_chats_words(kind: str) -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": kind}]}
    for place, item in (("content", {"role": "user", "content": [{"type": kind}]}), ("output", output)):
        with pytest.raises(InvalidRequest, match=TEXT_ONLY.format("input_text")) as raised:
            chat_of_response(msgspec.convert({"input": [item]}, ResponsesRequest))
        assert raised.value.param == f"input[0].{place}[0].type"


@pytest.mark.parametrize("kind", ["image", "document"])
def test_messages_read_text_only_and_say_it_in_a_chats_words(kind: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": kind}]}
    for where, block in (("content[0]", {"type": kind}), ("content[0].content[0]", result)):
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
        with pytest.raises(InvalidRequest, match=TEXT_ONLY.format("text")) as raised:
            chat_of_messages(msgspec.convert(body, MessagesRequest))
        assert raised.value.param == f"messages[0].{where}.type"


def test_the_other_dialects_name_their_roles_too() -> None:
    said = [{"role": "narrator", "content": "It rains."}]
    with pytest.raises(InvalidRequest, match=r"'input\[0\]\.role' must be one of user, assistant, system, developer"):
        chat_of_response(msgspec.convert({"input": said}, ResponsesRequest))
    with pytest.raises(InvalidRequest, match=r"'messages\[0\]\.role' must be one of user, assistant, system"):
        chat_of_messages(msgspec.convert({"max_tokens": 1, "messages": said}, MessagesRequest))


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": "x\ny", "b": "\\d"}', {"a": "x\ny", "b": "\\d"}),
        ('{"a": "x', {"INVALID_JSON": '{"a": "x'}),
        ("{'a': 1}", {"INVALID_JSON": "{'a': 1}"}),
        (DEEP, {"INVALID_JSON": DEEP}),
    ],
    ids=["control characters", "cut", "no JSON", "deep"],
)
def test_arguments_that_an_answer_may_have_had_are_taken(arguments: str, read: dict[str, Any]) -> None:
    [message] = plain_messages([call(function={"name": "f", "arguments": arguments})])
    assert message["tool_calls"][0]["function"]["arguments"] == read


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_calls_without_arguments(arguments: Any) -> None:
    [message] = plain_messages([call(function={"name": "f", "arguments": arguments})])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
