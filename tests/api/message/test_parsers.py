"""Tests that an answer's text is taken apart in the same way however it is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.api.message.call_parser import MAX_HELD
from pdserve.api.message.formats import MessageFormats
from pdserve.api.message.message_parser import MessageParser
from pdserve.api.message.parts import MessageParts, joined
from pdserve.api.message.python_calls import PYTHONIC, PythonCallParser
from pdserve.api.message.reasoning import ReasoningParser, ReasoningStart
from pdserve.api.message.tool_schemas import SchemaKinds, ToolSchema
from pdserve.api.message.xml_calls import plain_text
from pdserve.config import ReasoningFormat, ToolFormat
from tests.examples import examples

TOOLS = {
    "f": ToolSchema("f", {"type": "object", "properties": {"text": {"type": "string"}}}),
    "get_weather": ToolSchema("get_weather"),
    "-1.a": ToolSchema("-1.a"),
}


def parser(form: ToolFormat, *, reasoning: bool = False, parallel: bool = True) -> MessageParser:
    formats = MessageFormats(form, ReasoningFormat.THINK)
    markers = formats.reasoning_markers
    assert markers is not None
    return MessageParser(
        ReasoningParser(markers, ReasoningStart.BEFORE) if reasoning else None,
        formats.call_parser(TOOLS, parallel=parallel),
    )


def parse(pieces: Sequence[str], form: ToolFormat, *, reasoning: bool = False, parallel: bool = True) -> MessageParts:
    reader = parser(form, reasoning=reasoning, parallel=parallel)
    return joined([*map(reader.add, pieces), reader.finish()])


def calls(parts: MessageParts) -> list[tuple[str | None, object]]:
    return [(piece.name, json.loads(piece.arguments)) for piece in parts.calls]


Call = tuple[str, dict[str, object]]
WEATHER: Call = ("get_weather", {"city": 'Köln "am" Rhein', "days": 3, "deep": {"a": [1, {"b": None}], "c": True}})
PLAIN: Call = ("f", {"text": "x"})
EMPTY: Call = ("f", {})
TAGGED: Call = ("get_weather", {"city": "</parameter>", "deep": ["a</parameter>\n<", {"b": "\\"}]})
EXACT = "12345678901234567890.10"
"""A number that no float is equal to."""
ARGS = json.dumps(WEATHER[1])
GOOD: dict[ToolFormat, dict[str, list[Call]]] = {
    ToolFormat.HERMES: {
        '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGS + "}\n</tool_call>": [WEATHER],
        ' \n<tool_call>{"arguments": ' + ARGS + ', "name": "get_weather"}</tool_call>\n': [WEATHER],
        '<tool_call>{"name":"f"}</tool_call>\n<tool_call>{"id": 1, "name":"f","parameters":{"text":"x"},"z":[{}]}'
        "</tool_call>": [EMPTY, PLAIN],
        '<tool_call>{"name": "f", "arguments": "{\\"text\\": \\"x\\"}"}</tool_call>': [PLAIN],
        '<tool_call>{"name": "f", "arguments": {}}': [EMPTY],
    },
    ToolFormat.LLAMA_JSON: {
        '{"name": "get_weather", "parameters": ' + ARGS + "}": [WEATHER],
        '\n<|python_tag|>{"type": "function", "name": "f", "parameters": {"text": "x"}}; {"name": "f"}': [PLAIN, EMPTY],
    },
    ToolFormat.MISTRAL: {
        '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + ARGS + '}, {"name": "f", "arguments": {}}]': [
            WEATHER,
            EMPTY,
        ],
        "[TOOL_CALLS] get_weather[ARGS]" + ARGS + '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"text": "x"}': [
            WEATHER,
            PLAIN,
        ],
        "[TOOL_CALLS]f{}": [EMPTY],
    },
    ToolFormat.QWEN_XML: {
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>": [PLAIN],
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
        f"{WEATHER[1]['city']}\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=deep>\n"
        f"{json.dumps(WEATHER[1]['deep'])}\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call><function=f></function></tool_call>": [WEATHER, EMPTY],
        "<tool_call>\n<function=get_weather>\n" + ARGS + "\n</function>\n</tool_call>": [WEATHER],
        "<tool_call><function=get_weather><parameter=city>\n"
        f"{json.dumps(TAGGED[1]['city'])}\n</parameter><parameter=deep>{json.dumps(TAGGED[1]['deep'])}"
        "</parameter></function></tool_call>": [TAGGED],
        "<function=f>\n<parameter=text>\nx\n</parameter>\n</function>": [PLAIN],
        "\n<function=f>\n</function>\n</tool_call>\n<function=f>\n</function>\n<tool_call>\n<function=f>\n"
        "<parameter=text>x</parameter></function></tool_call>": [EMPTY, EMPTY, PLAIN],
    },
    ToolFormat.PYTHONIC: {
        "[get_weather(city='Köln \"am\" Rhein', days=3, deep={'a': [1, {\"b\": None}], 'c': True}), f()]": [
            WEATHER,
            EMPTY,
        ],
        '<|python_start|>[f(text="x",)]<|python_end|>': [PLAIN],
        f"[get_weather(**{ARGS}), f(text='x', **{{}})]": [WEATHER, PLAIN],
        '[-1.a(text="x"), get_weather(days=-.5e1)]': [("-1.a", {"text": "x"}), ("get_weather", {"days": -5.0})],
    },
    ToolFormat.NEMOTRON: {
        '<TOOLCALL>[{"name": "get_weather", "arguments": ' + ARGS + '}, {"name": "f", "arguments": {}}]</TOOLCALL>': [
            WEATHER,
            EMPTY,
        ],
        '<TOOLCALL>{"name": "f", "arguments": {"text": "x"}}': [PLAIN],
    },
    ToolFormat.GEMMA4: {
        '<|tool_call>call:get_weather{city:<|"|>Köln "am" Rhein<|"|>,days:3,deep:{a:[1,{b:null}],c:true}}<tool_call|>'
        '<|tool_call>call:f{text:<|"|>x<|"|>}<tool_call|>': [WEATHER, PLAIN],
        f"<|tool_call>call:get_weather{ARGS}<tool_call|>": [WEATHER],
        '<|tool_call>call:f{}<tool_call|>\n<|tool_call> call:get_weather{city:<|"|></parameter><|"|>, '
        'deep:[<|"|>a</parameter>\n<<|"|>,{"b":<|"|>\\<|"|>},],}': [EMPTY, TAGGED],
        "<|tool_call>call:f{text:x}": [PLAIN],
    },
    ToolFormat.GEMMA: {'```tool_code\nf(text="x")\nf()\n```': [PLAIN, EMPTY], '[f(text="\\u0078")]': [PLAIN]},
}
FORMATS = [*GOOD]
TEXT_SCHEMAS: dict[str, Any] = {"plain": {"type": "string"}, "dated": {"type": "string", "format": "date"}, "any": {}}
CASES = [(form, text) for form, texts in GOOD.items() for text in texts]


@pytest.mark.parametrize(("form", "text"), CASES)
def test_calls_of_every_format(form: ToolFormat, text: str) -> None:
    parts = parse([text], form)
    assert calls(parts) == GOOD[form][text]
    assert parts.content == ""
    assert [piece.index for piece in parts.calls] == list(range(len(parts.calls)))


@pytest.mark.parametrize(("form", "text"), CASES)
def test_content_and_reasoning_stand_around_calls(form: ToolFormat, text: str) -> None:
    if not text.startswith(("{", "[f", "[g", "[-")):  # these are calls only where the answer begins with them
        parts = parse([f"I look.\n{text} Done. "], form)
        assert parts.content.startswith("I look.\n")
        assert calls(parts) == GOOD[form][text]
    parts = parse([f"<think>\nIs it <tool_call>? [TOOL_CALLS]</think>\n\n{text}"], form, reasoning=True)
    assert parts.reasoning == "Is it <tool_call>? [TOOL_CALLS]"
    assert (calls(parts), parts.content) == (GOOD[form][text], "")


@pytest.mark.parametrize(("form", "text"), CASES)
def test_only_the_first_call_counts_where_calls_are_not_parallel(form: ToolFormat, text: str) -> None:
    parts = parse([text], form, parallel=False)
    assert (calls(parts), parts.content) == (GOOD[form][text][:1], "")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("12", {"plain": "12", "dated": "12", "any": 12}),
        ('"12"', {"plain": '"12"', "dated": "12", "any": "12"}),
        ('"a', {"plain": '"a', "dated": '"a', "any": '"a'}),
        ("True", {"plain": "True", "dated": "True", "any": True}),
        ("[1, 2", {"plain": "[1, 2", "dated": "[1, 2", "any": "[1, 2"}),
    ],
)
def test_values_between_tags_are_read_by_their_schema(written: str, read: dict[str, object]) -> None:
    tools = {"f": ToolSchema("f", {"type": "object", "properties": TEXT_SCHEMAS})}
    body = "".join(f"<parameter={name}>\n{written}\n</parameter>\n" for name in TEXT_SCHEMAS)
    formats = MessageFormats(ToolFormat.QWEN_XML, ReasoningFormat.NONE)
    reader = MessageParser(None, formats.call_parser(tools, parallel=True))
    parts = joined([reader.add(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"), reader.finish()])
    assert calls(parts) == [("f", read)]


STRING = {"type": "string"}
EVERY: dict[str, object] = {
    "7": 7,
    "7.5": 7.5,
    "true": True,
    "TRUE": True,
    "null": None,
    "None": None,
    "[7]": [7],
    '{"a": 7}': {"a": 7},
}
DEFINED = {"text": STRING, "color": {"enum": ["red", "7"]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, STRING]}}


@pytest.mark.parametrize(
    ("schema", "read"),
    [
        (STRING, {}),
        ({"type": ["string"]}, {}),
        ({"enum": ["red", "7"]}, {}),
        ({"const": "7", "description": "seven"}, {}),
        ({"$ref": "#/$defs/color", "title": "Color"}, {}),
        ({"allOf": [{"$ref": "#/$defs/text"}], "default": "7"}, {}),
        ({"$ref": "#/$defs/loop"}, {}),
        ({"not": {"type": ["number", "boolean", "null", "array", "object"]}}, {}),
        ({"if": {"type": "null"}, "then": STRING, "else": {"type": "string", "pattern": "^"}}, {}),
        ({"anyOf": [STRING, {"type": "null"}], "default": None}, {"null": None, "None": None}),
        ({"type": ["string", "null"]}, {"null": None, "None": None}),
        ({"type": "string", "nullable": True}, {"null": None, "None": None}),
        ({"enum": ["7", None]}, {"null": None, "None": None}),
        ({"oneOf": [{"$ref": "#/$defs/color"}, {"const": None}]}, {"null": None, "None": None}),
        ({"type": ["string", "integer"]}, {"7": 7}),
        ({"anyOf": [{"type": "number"}, STRING]}, {"7": 7, "7.5": 7.5}),
        ({"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 1}]}, {"true": True, "TRUE": True}),
        ({"anyOf": [{"type": "array", "items": STRING}, STRING]}, {"[7]": [7]}),
        ({"type": ["string", "object"]}, {'{"a": 7}': {"a": 7}}),
        ({"not": STRING}, EVERY),
        ({"type": "boolean"}, EVERY),
        ({"$ref": "#/$defs/gone"}, EVERY),
    ],
    ids=str,
)
def test_a_value_is_of_a_kind_that_its_schema_admits(schema: dict[str, Any], read: dict[str, object]) -> None:
    tool = ToolSchema("f", {"type": "object", "properties": {"a": schema}, "$defs": DEFINED})
    for text in ("7", "7.5", "true", "TRUE", "null", "None", "[7]", '{"a": 7}', "nul", "nulls"):
        formats = MessageFormats(ToolFormat.QWEN_XML, ReasoningFormat.NONE)
        written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
        for pieces in ([written], list(written)):
            reader = MessageParser(None, formats.call_parser({"f": tool}, parallel=True))
            parts = joined([*map(reader.add, pieces), reader.finish()])
            assert calls(parts) == [("f", {"a": read.get(text, text)})]


@pytest.mark.parametrize("text", ["<function=g>\n</function>", "Say <function=f", "<function=>", "a <function=f\n>x"])
def test_an_unwrapped_call_is_one_of_a_function_of_the_request(text: str) -> None:
    for pieces in ([text], list(text)):
        parts = parse(pieces, ToolFormat.QWEN_XML)
        assert (parts.content, parts.calls) == (text, ())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ToolFormat.PYTHONIC, f"[f(text={EXACT})]"),
        (ToolFormat.QWEN_XML, f"<tool_call><function=get_weather><parameter=text>{EXACT}</parameter></function>"),
        (ToolFormat.HERMES, '<tool_call>{"name": "f", "arguments": {"text": ' + EXACT + "}}"),
        (ToolFormat.GEMMA4, "<|tool_call>call:f{text:" + EXACT + "}"),
    ],
)
def test_no_digit_of_a_number_is_lost(form: ToolFormat, text: str) -> None:
    [call] = parse([text], form).calls
    assert EXACT in call.arguments


RAW = '"line\nbreak\t\\d \\\'"'
"""A string as models write it, which is no JSON."""
READ = "line\nbreak\t\\d '"
BROKEN = "{'a': \"} </x\", 7: [1,}"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ToolFormat.HERMES, '<tool_call>\n{"name": "f", "arguments": {"text": ' + RAW + "}}\n</tool_call>"),
        (ToolFormat.HERMES, '<tool_call>\n{"arguments": {"text": ' + RAW + '}, "name": "f"}\n</tool_call>'),
        (
            ToolFormat.HERMES,
            '<tool_call>{"id": ' + RAW + ', "name": "f", "arguments": {"text": ' + RAW + "}}</tool_call>",
        ),
        (ToolFormat.HERMES, '<tool_call>{"name": "f", "arguments": "{\\"text\\": ' + RAW.replace('"', '\\"') + '}"}'),
        (ToolFormat.LLAMA_JSON, '{"name": "f", "parameters": {"text": ' + RAW + "}}"),
        (ToolFormat.MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"text": ' + RAW + "}}]"),
        (ToolFormat.MISTRAL, '[TOOL_CALLS]f[ARGS]{"text": ' + RAW + "}"),
        (ToolFormat.QWEN_XML, '<tool_call><function=f>{"text": ' + RAW + "}</function></tool_call>"),
        (ToolFormat.PYTHONIC, "[f(text=" + RAW + ")]"),
        (ToolFormat.GEMMA, "```tool_code\nf(text=" + RAW + ")\n```"),
    ],
)
def test_control_characters_and_escapes_of_arguments_are_written_as_json(form: ToolFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        parts = parse(pieces, form)
        assert (calls(parts), parts.content) == ([("f", {"text": READ})], "")


@pytest.mark.parametrize("behind", ["", "Done."])
@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        (ToolFormat.HERMES, '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
        (ToolFormat.LLAMA_JSON, '<|python_tag|>{"name": "f", "parameters": ', "}<|python_tag|>"),
        (ToolFormat.MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": ', "}]\n[TOOL_CALLS]"),
        (ToolFormat.MISTRAL, "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]"),
        (ToolFormat.QWEN_XML, "<tool_call><function=f>", "\n</function>\n</tool_call>"),
        (ToolFormat.NEMOTRON, '<TOOLCALL>[{"name": "f", "arguments": ', "}]\n</TOOLCALL>"),
    ],
)
def test_arguments_that_are_no_json_come_through_whole(form: ToolFormat, before: str, after: str, behind: str) -> None:
    text = before + BROKEN + after + behind
    for pieces in ([text], list(text)):
        parts = parse(pieces, form)
        assert [(piece.name, piece.arguments) for piece in parts.calls] == [("f", BROKEN)]
        assert parts.content.endswith(behind)
    [call] = parse([before + BROKEN + after[:1].replace("[", "")], form).calls
    assert call.arguments == BROKEN
    [call] = parse([before + '{"a": x' + "\n" * MAX_HELD], form).calls
    assert call.arguments.startswith('{"a": x')


def test_values_between_tags_may_have_control_characters() -> None:
    written = '{"a": ' + RAW + "}"
    text = f"<tool_call><function=get_weather><parameter=deep>{written}</parameter></function></tool_call>"
    assert calls(parse([text], ToolFormat.QWEN_XML)) == [("get_weather", {"deep": {"a": READ}})]


@pytest.mark.parametrize(("form", "text"), CASES)
def test_calls_that_come_character_by_character(form: ToolFormat, text: str) -> None:
    assert parse(list(text), form) == parse([text], form)


FRAGMENTS = [
    RAW,
    BROKEN,
    *("<function=g>", "null", "No"),
    *(text for _, text in CASES),
    *("<TOOLCALL>", "</TOOLCALL>"),
    *("<|tool_call>", "<tool_call|>", "call:f{", '<|"|>', "text:"),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```tool_code\n", "```", "<think>"),
    *(
        "</think>",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        '{"name": "f", "arguments": {',
        '"text": ',
        "f(",
        "f",
        ")",
        "x=",
        "1,",
    ),
    *('<parameter=b>\n"a</parameter>', '**{"a": 1}', "<function=f>\n{"),
    *("<function=f>", "<parameter=text>", "\n</parameter>", "</function>", "<parameter=b>", " ", "\n", "é", "-0.5e3"),
    *('{"name": "unknown", "arguments": {}}', "unknown(a=1)", " " * 70, "null", ",", ";", "'", "\x00"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=9).map("".join)


def test_a_long_end_of_broken_arguments_is_passed_on_as_it_comes() -> None:
    text = '<function=f>\n{"a" ' + '"b" ' * 40
    reader, at_once = (parser(ToolFormat.QWEN_XML, reasoning=False, parallel=False) for _ in range(2))
    told = [reader.add(text[:40]), reader.add(text[40:])]
    assert joined(told) == at_once.add(text)


@settings(max_examples=examples(150))
@given(st.sampled_from(FORMATS), TEXTS, st.sets(st.integers(1, 200), max_size=12), st.booleans(), st.booleans())
def test_any_split_of_any_text_gives_the_same(
    form: ToolFormat, text: str, cuts: set[int], reasoning: bool, parallel: bool
) -> None:
    """Not only at the end: at each cut, what was told is what one call with the text up to there tells."""
    reader, told, start = parser(form, reasoning=reasoning, parallel=parallel), [], 0
    for end in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        told.append(reader.add(text[start:end]))
        at_once = parser(form, reasoning=reasoning, parallel=parallel)
        assert joined(told) == at_once.add(text[:end])
        assert reader.called == at_once.called
        start = end
    assert joined([*told, reader.finish()]) == parse([text], form, reasoning=reasoning, parallel=parallel)


@settings(max_examples=examples(80))
@given(st.sampled_from(FORMATS), TEXTS)
def test_what_is_no_call_becomes_text(form: ToolFormat, text: str) -> None:
    """Without functions there are no calls, and no character is lost."""
    reader = MessageParser(None, MessageFormats(form, ReasoningFormat.NONE).call_parser({}, parallel=True))
    parts = joined([reader.add(text), reader.finish()])
    assert (parts.content, parts.calls) == (text, ())


class CountingParser(PythonCallParser):
    """Counts how many characters it follows."""

    followed = 0

    def _follow(self, char: str) -> bool:
        self.followed += 1
        return super()._follow(char)


@pytest.mark.parametrize("ending", ["", "')"])
def test_a_text_of_many_beginnings_of_calls_is_followed_once(ending: str) -> None:
    calls = CountingParser(PYTHONIC, TOOLS, parallel=True)
    reader = MessageParser(None, calls)
    text = "<|python_start|>f(\\'" * 1_000 + ending
    parts = joined([reader.add(text), reader.finish()])
    assert (parts.content, parts.calls) == (text, ())
    assert calls.followed <= len(text)


@pytest.mark.parametrize("form", FORMATS)
def test_no_more_is_held_back_before_a_call_than_is_allowed(form: ToolFormat) -> None:
    marker = MessageFormats(form, ReasoningFormat.NONE).call_markers[0]
    assert parser(form).add(marker + "\n" * MAX_HELD).content


@pytest.mark.parametrize(
    "schema", [{"enum": 5, "const": "a"}, {"enum": None, "const": "a"}, {"enum": [5]}, {"const": 5}]
)
def test_a_parameter_whose_schema_is_odd_is_no_plain_text(schema: dict[str, Any]) -> None:
    assert plain_text({"type": "string", **schema}, SchemaKinds({})) is None
