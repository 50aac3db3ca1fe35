"""Tests that answers in the Harmony format are taken apart, however they are cut, and that their tokens are counted."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.api.message.formats import MessageFormats
from pdserve.api.message.harmony import (
    MARKERS,
    MAX_HEADER,
    HarmonyParser,
    HarmonyReasoningTokens,
    Section,
    is_harmony,
    section_of,
)
from pdserve.api.message.message_parser import MessageParser
from pdserve.api.message.parts import CallPiece, MessageParts, TextPiece, joined
from pdserve.api.message.tool_schemas import ToolSchema
from pdserve.config import ReasoningFormat, ToolFormat
from tests.examples import examples

TOOLS = {"f": ToolSchema("f"), "get_weather": ToolSchema("get_weather")}
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
BOTH = MessageFormats(ToolFormat.HARMONY, ReasoningFormat.HARMONY)
THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|>"
NEXT = "<|start|>assistant"
JSON = "<|constrain|>json<|message|>"
WEATHER = f'<|channel|>commentary to=functions.get_weather {JSON}{{"city": "Köln"}}'


def parser(
    *, prompt: str = PROMPT, parallel: bool = True, formats: MessageFormats = BOTH, show: bool = True
) -> MessageParser:
    whole = formats.harmony_parser(TOOLS, prompt[-64:], parallel=parallel)
    return MessageParser(None, whole, show_reasoning=show)


def parse(pieces: Sequence[str], reader: MessageParser | None = None) -> MessageParts:
    reader = parser() if reader is None else reader
    return joined([*map(reader.add, pieces), reader.finish()])


def calls(parts: MessageParts) -> list[tuple[str | None, str]]:
    return [(piece.name, piece.arguments) for piece in parts.calls]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "called"),
    [
        (f"{THOUGHT}{NEXT}<|channel|>final<|message|>Hello.", "Let me see.", "Hello.", []),
        ("<|channel|>final<|message|> Hello. <|return|>", "", " Hello. ", []),
        (THOUGHT, "Let me see.", "", []),
        ("<|channel|>analysis<|message|>Let me", "Let me", "", []),
        (f"{THOUGHT}{NEXT}{WEATHER}<|call|>", "Let me see.", "", [("get_weather", '{"city": "Köln"}')]),
        (f"{THOUGHT}{NEXT}{WEATHER}", "Let me see.", "", [("get_weather", '{"city": "Köln"}')]),
        (
            f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{WEATHER}<|call|>",
            "Let me see.",
            "I look.",
            [("get_weather", '{"city": "Köln"}')],
        ),
        (
            f"{WEATHER}<|end|>{NEXT}<|channel|>commentary to=functions.f{JSON}{{}}<|call|>",
            "",
            "",
            [("get_weather", '{"city": "Köln"}'), ("f", "{}")],
        ),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", "", [("f", '{"a": 1}')]),
        (
            f'{THOUGHT}{NEXT} to=functions.f<|channel|>analysis code<|message|>\n{{"a": 1}} <|call|>',
            "Let me see.",
            "",
            [("f", '{"a": 1}')],
        ),
        ("<|channel|>commentary to=f <|message|>{}", "", "", [("f", "{}")]),
        ("<|channel|>commentary to=functions.f<|message|><|call|>", "", "", [("f", "{}")]),
        ("<|channel|>commentary to=functions.f<|message|>", "", "", [("f", "{}")]),
        ('<|channel|>commentary to=functions.f<|message|>{"a": "x', "", "", [("f", '{"a": "x')]),
        ("<|channel|>commentary to=functions.f<|message|>{'a': 1}<|call|>", "", "", [("f", "{'a': 1}")]),
        (
            '<|channel|>commentary to=functions.f<|message|>{"a": "<|end|>\n<b>"}<|call|>',
            "",
            "",
            [("f", '{"a": "<|end|>\\n<b>"}')],
        ),
        (
            f"<|channel|>commentary to=functions.f<|message|>{{<|end|>{NEXT}<|channel|>final<|message|>x",
            "",
            "x",
            [("f", "{")],
        ),
        ("<|channel|>commentary to=functions.g <|message|>{}<|call|>", "", "{}", []),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", "", []),
        # What a model leaves out, or has too much of.
        (f"{THOUGHT}<|channel|>final<|message|>Hello.", "Let me see.", "Hello.", []),
        (f"{THOUGHT[:-7]}{NEXT}<|channel|>final<|message|>Hello.", "Let me see.", "Hello.", []),
        (f"{THOUGHT}\n{NEXT}\n<|channel|>final\n<|message|>Hello.<|end|><|end|>\n", "Let me see.", "Hello.", []),
        (f"{NEXT}<|channel|>final<|message|>Hello.", "", "Hello.", []),
        (f"{THOUGHT}{NEXT}{THOUGHT}", "Let me see.\n\nLet me see.", "", []),
        ("Hello, <|channel|>final<|message|>you.", "", "Hello, \n\nyou.", []),
        ("  total", "", "  total", []),
        ("<", "", "<", []),
        ("to", "", "to", []),
        ("<|channel|>final", "", "", []),
        ("<|start|>assistant<|end|>", "", "", []),
        (f"{WEATHER}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>5<|end|>", "", "", None),
        (f"<|channel|>final{'x' * MAX_HEADER}<|message|>y", "", None, []),
    ],
)
def test_answers(text: str, reasoning: str, content: str | None, called: list[tuple[str, str]] | None) -> None:
    parts = parse([text])
    assert parts.reasoning == reasoning
    if content is not None:
        assert parts.content == content
    if called is not None:
        assert calls(parts) == called
    assert parse(list(text)) == parts
    assert [piece.index for piece in parts.calls] == list(range(len(parts.calls)))


def test_the_pieces_have_the_order_of_the_answer() -> None:
    parts = parse([f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{WEATHER}"])
    assert parts.order == (
        TextPiece("Let me see.", thought=True),
        TextPiece("I look."),
        CallPiece(0, "get_weather", '{"city": "Köln"}'),
    )


def test_what_the_request_or_the_settings_leave_out() -> None:
    text = f"{THOUGHT}{NEXT}{WEATHER}<|end|>{NEXT}{WEATHER}"
    once = parse([text], parser(parallel=False))
    assert calls(once) == [("get_weather", '{"city": "Köln"}')]
    assert parse([text], parser(show=False)).reasoning == ""
    uncalled = parse([text], parser(formats=MessageFormats(ToolFormat.NONE, ReasoningFormat.HARMONY)))
    assert (uncalled.reasoning, uncalled.calls) == ("Let me see.", ())
    assert uncalled.content == '{"city": "Köln"}\n\n{"city": "Köln"}'
    plain = parse([text], parser(formats=MessageFormats(ToolFormat.HARMONY, ReasoningFormat.NONE)))
    assert (plain.reasoning, plain.content, len(plain.calls)) == ("", "Let me see.", 2)


@pytest.mark.parametrize(
    ("prompt", "section"),
    [
        ("", Section.HEADER),
        (PROMPT, Section.HEADER),
        (PROMPT + "\n", Section.HEADER),
        (PROMPT + "<|channel|>final<|message|>I say", Section.CONTENT),
        (PROMPT + "<|channel|>final<|message|>" + "I say " * 20, Section.CONTENT),
        (PROMPT + "<|channel|>analysis<|message|>I think", Section.REASONING),
        (PROMPT + "<|channel|>final<|message|>I said.<|end|>", Section.HEADER),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ends(prompt: str, section: Section) -> None:
    assert section_of(prompt[-64:]) is section
    reader = parser(prompt=prompt)
    said = parse([" more", "<|end|><|start|>assistant<|channel|>final<|message|>x"], reader)
    assert said.reasoning == (" more" if section is Section.REASONING else "")
    assert said.content == ("x" if section is Section.REASONING else " more\n\nx")


def test_no_template_but_harmonys_is_one() -> None:
    assert is_harmony("{{- '<|start|>assistant<|channel|>analysis<|message|>' }}")
    assert not is_harmony("<|start|>{{ role }}<|message|>{{ content }}<|end|>")
    assert not is_harmony("{{ '<|channel>thought\n<channel|>' }}")


FRAGMENTS = [
    *MARKERS,
    *(THOUGHT, NEXT, WEATHER, JSON, "<|channel|>final<|message|>", "<|channel|>commentary", " to=functions.f"),
    *("{", "}", '"', '{"a": ', "1}", "\\", "<", "<|", "|>", "\n", " ", "assistant", "analysis", "to=g", "Hi", "é"),
    *("x" * MAX_HEADER, " " * 70),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=10).map("".join)
PROMPTS = st.sampled_from([PROMPT, "", PROMPT + "<|channel|>final<|message|>I", PROMPT + THOUGHT[:-7]])


@settings(max_examples=examples(400))
@given(TEXTS, st.sets(st.integers(1, 200), max_size=12), PROMPTS, st.booleans())
def test_any_split_of_any_text_gives_the_same(text: str, cuts: set[int], prompt: str, parallel: bool) -> None:
    """Not only at the end: at each cut, what was told is what one call with the text up to there tells."""
    reader, told, start = parser(prompt=prompt, parallel=parallel), [], 0
    for end in [*sorted(cut for cut in cuts if cut < len(text)), len(text)]:
        told.append(reader.add(text[start:end]))
        at_once = parser(prompt=prompt, parallel=parallel)
        assert joined(told) == at_once.add(text[:end])
        assert (reader.called, reader.decided) == (at_once.called, at_once.decided)
        start = end
    whole = joined([*told, reader.finish()])
    assert whole == parse([text], parser(prompt=prompt, parallel=parallel))
    positions = parser(prompt=prompt, parallel=parallel)
    pieces = [*positions.content(text), *positions.rest_of_content()]
    assert "".join(piece.text for piece in pieces) == whole.content
    assert all(text.startswith(piece.text, piece.start) or piece.text == "\n\n" for piece in pieces)


MESSAGES = st.lists(
    st.sampled_from(
        [
            ("analysis", "Hm < 5. "),
            ("final", "Yes, a<b."),
            ("commentary", "I look."),
            ("commentary to=functions.f <|constrain|>json", '{"a": "<"}'),
        ]
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(80))
@given(MESSAGES, st.integers(1, 9))
def test_whole_messages_lose_nothing(messages: list[tuple[str, str]], size: int) -> None:
    text = "<|end|><|start|>assistant".join(f"<|channel|>{head}<|message|>{body}" for head, body in messages)
    parts = parse([text[at : at + size] for at in range(0, len(text), size)])
    assert parts.reasoning == "\n\n".join(body for head, body in messages if head == "analysis")
    assert parts.content == "\n\n".join(body for head, body in messages if head in ("final", "commentary"))
    assert [json.loads(piece.arguments) for piece in parts.calls] == [{"a": "<"}] * sum(
        "to=" in head for head, _ in messages
    )


@pytest.mark.parametrize("group", [1, 2, 20])
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["<|channel|>", "analysis", "<|message|>", "H", "m", "<|end|>", *"ab", "<|start|>"], 6),
        (["<|channel|>", "analysis", "<|message|>", "H"], 4),
        (["<|channel|>", "analysis"], 0),
        (["<|channel|>", "final", "<|message|>", "H", "<|end|>"], 0),
        (
            [
                *("<|channel|>", "analysis", "<|message|>", "a<", "b", "<|end|>", "<|start|>", "assistant"),
                *("<|channel|>", "analysis", "<|message|>", "c", "<|end|>", "<|start|>", "assistant"),
                *("<|channel|>", "commentary", " to=functions.f", "<|message|>", '{"a":', ' "<', 'analysis"}'),
            ],
            6 + 7,
        ),
        (["<", "|channel", "|>analysis", "<|mess", "age|>", "H", "<|", "end|>", "x"], 8),
    ],
)
def test_the_tokens_of_reasoning_are_counted_with_their_markers(tokens: list[str], expected: int, group: int) -> None:
    texts = [token.encode() for token in tokens]
    counter = HarmonyReasoningTokens(HarmonyParser(TOOLS, PROMPT), lambda token_id: texts[token_id])
    for first in range(0, len(tokens), group):
        counter.add(range(first, min(first + group, len(tokens))))
    assert counter.count == expected
