"""Chats with tools and reasoning, from the request's body to the answer's bytes, on one node and on two."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdserve.api.message.formats import MessageFormats
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.config import ReasoningFormat, ToolFormat
from pdserve.control.journal import AnswerReader, cut
from tests.api.message.test_parsers import CASES, TOOLS
from tests.api.node import MODEL
from tests.api.scripted_engine import EOS
from tests.api.stepped_node import SteppedNode, stepped_node
from tests.api.test_resumed_answers import by_choice, events_of, journal_of
from tests.examples import examples

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": schema.parameters}}
        for name, schema in TOOLS.items()
    ],
}
MAX_ANSWER_BYTES = 2**20
THOUGHT = "<think>\nWhich <tool_call>?\n</think>\n\n"


def scripted(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of an answer that says ``text``."""
    return [*tokenizer.encode(text, add_special_tokens=False), EOS]


def assembled(stream: bytes) -> list[dict[str, Any]]:
    """The messages that clients put together from the chunks, as OpenAI's does, with their finish reasons."""
    messages: dict[int, dict[str, Any]] = {}
    for event in cut(stream)[0].split(b"\n\n")[:-2]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            delta, message = choice["delta"], messages.setdefault(choice["index"], {"calls": {}, "finish": None})
            for name in ("role", "content", "reasoning_content", "reasoning"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for piece in delta.get("tool_calls", ()):
                if piece["index"] not in message["calls"]:
                    message["calls"][piece["index"]] = piece
                    assert piece.keys() == {"index", "id", "type", "function"}
                else:
                    assert piece.keys() == {"index", "function"}
                    assert piece["function"].keys() == {"arguments"}
                    message["calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            message["finish"] = choice["finish_reason"] or message["finish"]
    return [messages[index] for index in sorted(messages)]


def whole_messages(body: bytes) -> list[dict[str, Any]]:
    messages = []
    if body.startswith(b":"):  # the answer was not ready soon, and has a journal before it
        reader = AnswerReader(MAX_ANSWER_BYTES)
        reader.feed(body)
        body = reader.body()
    for choice in json.loads(body)["choices"]:
        message = {name: value for name, value in choice["message"].items() if value and name != "refusal"}
        calls = {index: {"index": index, **call} for index, call in enumerate(message.pop("tool_calls", ()))}
        messages.append({**message, "calls": calls, "finish": choice["finish_reason"]})
    return messages


def without_nothing(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in message.items() if value != "" or name == "calls"} for message in messages]


@pytest.mark.integration
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=st.sampled_from(CASES),
    thought=st.sampled_from(["", THOUGHT]),
    behind=st.sampled_from(["", " Done. ", "<tool_call>"]),
    group=st.integers(2, 5),
    resumed_after=st.sets(st.integers(0, 60), max_size=3),
    fields=st.fixed_dictionaries(
        {
            "n": st.integers(1, 2),
            "logprobs": st.booleans(),
            "stop": st.sampled_from([[], ["Köln"], ["}}"], ["</tool", "ne"], ["Which"], ["D", "all>"]]),
            "max_tokens": st.sampled_from([7, 100]),
            "parallel_tool_calls": st.booleans(),
            "include_reasoning": st.booleans(),
            "return_token_ids": st.booleans(),
        }
    ),
)
@example(
    case=CASES[2],
    thought=THOUGHT,
    behind="",
    group=2,
    resumed_after=set(range(60)),
    fields={"logprobs": True, "stop": ["}}"]},
)
@example(case=CASES[2], thought=THOUGHT, behind="", group=3, resumed_after=set(range(60)), fields={})
def test_calls_and_reasoning_of_streams_whole_answers_and_resumed_ones_are_the_same(
    case: tuple[ToolFormat, str],
    thought: str,
    behind: str,
    group: int,
    resumed_after: set[int],
    fields: dict[str, Any],
    tokenizer: Tokenizer,
) -> None:
    form, text = case
    script = scripted(tokenizer, thought + text + behind)
    formats = MessageFormats(form, ReasoningFormat.THINK)
    body = {**BODY, "seed": 3, **fields}

    async def scenario() -> None:
        async with (
            stepped_node(tokenizer, script, group, script=script, formats=formats) as first,
            stepped_node(tokenizer, script, group, script=script, formats=formats) as second,
        ):
            stream = await first.begin(CHAT, {**body, "stream": True})
            assert stream.status == 200, stream.body
            whole = await first.begin(CHAT, body)
            assert without_nothing(assembled(stream.body)) == whole_messages(whole.body)
            events = events_of(stream.body)
            for count in sorted(count for count in resumed_after if count <= len(events)):
                rest = await second.resume(CHAT, {**body, "stream": True}, journal_of(events[:count]))
                assert by_choice(events[:count] + events_of(rest.body)) == by_choice(events), f"after {count}"

    asyncio.run(scenario())


async def ask(node: SteppedNode, **fields: Any) -> dict[str, Any]:
    reply = await node.begin(CHAT, {**BODY, **fields})
    assert reply.status == 200, reply.body
    [choice] = json.loads(reply.body)["choices"]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


CALL = '<tool_call>\n{"name": "f", "arguments": {"text": "x"}}\n</tool_call>'


async def test_whole_answers(tokenizer: Tokenizer) -> None:
    script = scripted(tokenizer, "<think>\nHm.</think>\n\nI call. " + CALL)
    formats = MessageFormats(ToolFormat.HERMES, ReasoningFormat.THINK)
    async with stepped_node(tokenizer, script, script=script, formats=formats) as node:
        message = await ask(node)
        [call] = message.pop("tool_calls")
        assert message == {
            "content": "I call. ",
            "role": "assistant",
            "refusal": None,
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "finish_reason": "tool_calls",
        }
        assert call.pop("id").startswith("call_")
        assert call == {"type": "function", "function": {"name": "f", "arguments": '{"text": "x"}'}}
        none = await ask(node, tool_choice="none", include_reasoning=False)
        assert (none["content"], none["finish_reason"]) == ("I call. " + CALL, "stop")
        assert not none.keys() & {"tool_calls", "reasoning"}
        cut_off = await ask(node, max_tokens=len(script) - 9)
        assert (cut_off["finish_reason"], cut_off["tool_calls"][0]["function"]["name"]) == ("length", "f")
        others = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
        other = await ask(node, tool_choice={"type": "allowed_tools", "allowed_tools": others})
        assert (other["content"], other["finish_reason"]) == ("I call. " + CALL, "stop")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (CALL.replace('"x"', '"a\nb\\d"'), '{"text": "a\\nb\\\\d"}'),
        (CALL.replace('"x"', "'x'"), "{\"text\": 'x'}"),
        (CALL.partition('"x"')[0] + '"a', '{"text": "a'),
    ],
    ids=["control characters", "no JSON", "cut"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_conversation_takes_every_call_that_an_answer_has(
    text: str, arguments: str, stream: bool, tokenizer: Tokenizer
) -> None:
    script = scripted(tokenizer, text)
    formats = MessageFormats(ToolFormat.HERMES, ReasoningFormat.NONE)
    async with stepped_node(tokenizer, script, script=script, formats=formats) as node:
        reply = await node.begin(CHAT, {**BODY, "stream": stream})
        [message] = assembled(reply.body) if stream else whole_messages(reply.body)
        calls = [{name: value for name, value in call.items() if name != "index"} for call in message["calls"].values()]
        assert [call["function"]["arguments"] for call in calls] == [arguments]
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "no JSON"}
        again = await node.begin(CHAT, {**BODY, "messages": [*BODY["messages"], said, result]})
        assert again.status == 200, again.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "content", "finish"),
    [
        ("Hm", "I call. Done.", "tool_calls"),
        ("text", "I call. Done.", "tool_calls"),
        ("<tool_call>", "I call. Done.", "tool_calls"),
        ("all", "I c", "stop"),
        ("one", "I call. D", "tool_calls"),
    ],
)
async def test_stop_strings_end_what_is_shown_as_content(
    stop: str, content: str, finish: str, stream: bool, tokenizer: Tokenizer
) -> None:
    script = scripted(tokenizer, f"<think>\nHm.</think>\n\nI call. {CALL}Done.")
    formats = MessageFormats(ToolFormat.HERMES, ReasoningFormat.THINK)
    async with stepped_node(tokenizer, script, script=script, formats=formats) as node:
        reply = await node.begin(CHAT, {**BODY, "stop": stop, "stream": stream})
        [message] = assembled(reply.body) if stream else whole_messages(reply.body)
    assert (message["reasoning"], message["content"], message["finish"]) == ("Hm.", content, finish)
    assert len(message["calls"]) == (finish == "tool_calls")


async def test_content_is_null_beside_a_call(tokenizer: Tokenizer) -> None:
    script = scripted(tokenizer, CALL)
    formats = MessageFormats(ToolFormat.HERMES, ReasoningFormat.NONE)
    async with stepped_node(tokenizer, script, script=script, formats=formats) as node:
        assert (await ask(node))["content"] is None


async def test_mistral_ids_are_short(tokenizer: Tokenizer) -> None:
    script = scripted(tokenizer, "[TOOL_CALLS]f{}[TOOL_CALLS]f{}")
    formats = MessageFormats(ToolFormat.MISTRAL, ReasoningFormat.NONE)
    async with stepped_node(tokenizer, script, script=script, formats=formats) as node:
        ids = [call["id"] for call in (await ask(node))["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


async def test_a_marker_that_is_a_special_token_reaches_the_parser(tokenizer: Tokenizer) -> None:
    """Where no call is looked for, it is left out of the text as all special tokens are."""
    special = tokenizer.special_id("<jupyter_start>")
    assert special is not None
    shown = tokenizer.detokenizer(skip_special_tokens=True, shown=["<jupyter_start>", "no token"])
    hidden = tokenizer.detokenizer(skip_special_tokens=True)
    assert (shown.add([special, 1]), hidden.add([special, 1])) == ("<jupyter_start>", "")


@pytest.mark.integration
async def test_forced_calls_have_a_grammar(tokenizer: Tokenizer, model_dir: Path) -> None:
    script = scripted(tokenizer, '```tool_code\nf(text="x")\n```')
    formats = MessageFormats(ToolFormat.GEMMA, ReasoningFormat.NONE)
    async with stepped_node(tokenizer, script, script=script, formats=formats, model_dir=model_dir) as node:
        forced = await ask(node, tool_choice="required")
        named = await ask(node, tool_choice={"type": "function", "function": {"name": "f"}})
        assert (named["finish_reason"], len(named["tool_calls"])) == ("stop", 1)
        await ask(node, tool_choice="auto")
        grammars = [prompts[0].sampling.grammar for prompts in node.engine.opened]
    assert forced["finish_reason"] == "tool_calls"
    assert grammars[0] is not None
    assert "get_weather(" in grammars[0].text
    assert grammars[1] is not None
    assert "get_weather" not in grammars[1].text
    assert grammars[2] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "g"}}}, "tool_choice"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
                }
            },
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
    ids=str,
)
async def test_choices_that_cannot_be_kept(fields: dict[str, Any], param: str, tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, [33], script=[33, EOS]) as node:  # a node that reads no calls
        reply = await node.begin(CHAT, {**BODY, **fields})
        assert (reply.status, reply.error["param"].startswith(param)) == (400, True), reply.error
        assert not node.engine.opened


@pytest.mark.integration
async def test_a_structured_answer_is_content_though_the_prompt_begins_reasoning(
    model_dir: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "thinking")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<think>\n")
    tokenizer = load_tokenizer(folder)
    formats = MessageFormats(ToolFormat.HERMES, ReasoningFormat.THINK)
    script = scripted(tokenizer, '{"a": 1}')
    async with stepped_node(tokenizer, script, script=script, formats=formats, model_dir=folder) as node:
        assert (await ask(node))["reasoning"] == '{"a": 1}'
        assert (await ask(node, response_format={"type": "json_object"}))["content"] == '{"a": 1}'
