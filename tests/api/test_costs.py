"""What is done for each token of an answer, or for each tool, costs the same however many there are.

Each test compares the CPU time of one thing with that of twice as much, both in the same run: something quadratic takes
4 times as long. The shortest of several tries counts. Where other programs lengthen even that, there are more tries.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from pdserve.api.answers.detokenizer import (
    BytesDetokenizer,
    Detokenizer,
    TokenBytes,
    WindowDetokenizer,
    byte_level_bytes,
)
from pdserve.api.answers.stop_strings import ContentStops, StopStrings, StopTable
from pdserve.api.answers.text_generation import ChoiceText
from pdserve.api.call_grammars.tool_grammar import tool_grammar
from pdserve.api.message.formats import MessageFormats
from pdserve.api.message.tool_schemas import ToolSchema
from pdserve.api.requests.answer_reading import AnswerReading
from pdserve.api.requests.structural_tags import JsonSchemaPart, StructuralTag, Tag, TriggeredTags, tag_grammar
from pdserve.api.requests.tools import ToolUse
from pdserve.config import ReasoningFormat, ToolFormat
from pdserve.wire.engine import RequestOutput
from pdserve.wire.sampling_params import TokenLogprobs

MOST = 2.5
"""Twice as much takes at most so many times as long."""
TRIES, MOST_TRIES = 3, 20
Work = Callable[[], object]


def check_linear(make: Callable[[int], Work], size: int) -> None:
    """Fails unless the work for ``2 * size`` takes about twice as long as that for ``size``."""
    shortest = dict.fromkeys((size, 2 * size), float("inf"))
    for number in range(MOST_TRIES):
        for much in shortest:
            work = make(much)
            began_s = time.thread_time()
            work()
            shortest[much] = min(shortest[much], time.thread_time() - began_s)
        once_s, twice_s = shortest.values()
        if number + 1 >= TRIES and twice_s <= MOST * once_s:
            return
    raise AssertionError(f"{twice_s / once_s:.2f} times as long: {once_s * 1e3:.1f} ms, {twice_s * 1e3:.1f} ms")


def test_the_form_of_these_tests_finds_what_is_quadratic() -> None:
    def make(size: int) -> Work:
        return lambda: [index for index in range(size) for _ in range(size)]

    with pytest.raises(AssertionError, match="times as long"):
        check_linear(make, 300)


def words(chars: int) -> str:
    return "word " * (chars // 5)


LONG: dict[str, Callable[[int], str]] = {
    "content": words,
    "half markers": lambda chars: "<tool_cal " * (chars // 10),
    "openings": lambda chars: "<tool_call>[TOOL_CALLS]" * (chars // 23),
    "spaces": lambda chars: " \n" * (chars // 2),
    "reasoning": lambda chars: f"<think>{words(chars)}</think>",
    "hermes argument": lambda chars: (
        f'<tool_call>{{"name": "f", "arguments": {{"text": {json.dumps(words(chars))}}}}}</tool_call>'
    ),
    "hermes calls": lambda chars: '<tool_call>{"name": "f", "arguments": {"text": "a"}}</tool_call>\n' * (chars // 66),
    "unknown calls": lambda chars: '<tool_call>{"name": "g", "arguments": {"text": "a"}}</tool_call>\n' * (chars // 66),
    "llama calls": lambda chars: '{"name": "f", "parameters": {"text": "a"}}; ' * (chars // 45),
    "mistral calls": lambda chars: '[TOOL_CALLS]f[ARGS]{"text": "a"}' * (chars // 32),
    "xml text": lambda chars: f"<tool_call>\n<function=f>\n<parameter=text>\n{words(chars)}\n</parameter>\n</function>",
    "xml value": lambda chars: (
        f"<tool_call>\n<function=f>\n<parameter=value>\nx{words(chars)}\n</parameter>\n</function>"
    ),
    "xml parameters": lambda chars: (
        "<tool_call>\n<function=f>\n" + "<parameter=value>\n1\n</parameter>\n" * (chars // 33) + "</function>"
    ),
    "python argument": lambda chars: f"[f(text={json.dumps(words(chars))})]",
    "python calls": lambda chars: "[" + ", ".join(['f(text="a")'] * (chars // 13)) + "]",
}
"""Texts of so many characters."""

OF_FORMAT = {
    ToolFormat.HERMES: (
        "content",
        "half markers",
        "openings",
        "spaces",
        "reasoning",
        "hermes argument",
        "hermes calls",
    ),
    ToolFormat.LLAMA_JSON: ("unknown calls", "llama calls"),
    ToolFormat.MISTRAL: ("openings", "mistral calls"),
    ToolFormat.QWEN_XML: ("content", "xml text", "xml value", "xml parameters"),
    ToolFormat.PYTHONIC: ("python argument", "python calls"),
    ToolFormat.GEMMA: ("content", "python calls"),
}
FUNCTION = ToolSchema(
    "f", {"type": "object", "properties": {"text": {"type": "string"}, "value": {"type": "array"}}}, strict=True
)


def reading(calls: ToolFormat, *tools: ToolSchema) -> AnswerReading:
    known = {tool.name: tool for tool in tools}
    return AnswerReading(MessageFormats(calls, ReasoningFormat.THINK), ToolUse((), known, forced=True))


@pytest.mark.parametrize("stops", [False, True], ids=["", "stops"])
@pytest.mark.parametrize(
    ("calls", "kind"), [(calls, kind) for calls, kinds in OF_FORMAT.items() for kind in kinds], ids=str
)
def test_an_answer_that_is_taken_apart_token_by_token(calls: ToolFormat, kind: str, stops: bool) -> None:
    reads = reading(calls, FUNCTION)

    def make(chars: int) -> Work:
        text, parser, ahead = LONG[kind](chars), reads.parser(""), reads.parser("")
        assert parser is not None
        assert ahead is not None
        looks = ContentStops(StopTable(("\n\nQuestion:", "<|never|>")), ahead) if stops else None

        def work() -> None:
            for start in range(0, len(text), 3):
                piece = text[start : start + 3]
                parser.add(piece if looks is None else looks.add(piece))
            parser.finish()

        return work

    # A value is looked for in all that waits, so the cost of that shows in long ones alone.
    check_linear(make, 30_000 if kind == "xml value" else 6_000)


def byte_tokens() -> Detokenizer:
    texts = ["Ġa", "b", "Ã", "ðŁĺ"]
    return BytesDetokenizer(TokenBytes(lambda token_id: texts[token_id % 4], byte_level_bytes), frozenset())


def window_of(piece: str) -> Callable[[], Detokenizer]:
    return lambda: WindowDetokenizer(lambda ids: piece * len(ids), frozenset())


@pytest.mark.parametrize("make", [byte_tokens, window_of("ab "), window_of(""), window_of("\ufffd")])
def test_detokenising(make: Callable[[], Detokenizer]) -> None:
    def of(tokens: int) -> Work:
        detokenizer = make()

        def work() -> None:
            for token_id in range(tokens):
                detokenizer.add((token_id,))
            detokenizer.flush()

        return work

    check_linear(of, 4_000)


def choice_text(number: int, *, stops: bool, resumable: bool) -> ChoiceText:
    strings = StopStrings(StopTable(("a" * 500 + "b",) if stops else ()))
    return ChoiceText(number, window_of("a")(), strings, frozenset(), resumable=resumable)


@pytest.mark.parametrize("resumable", [False, True], ids=["", "resumable"])
@pytest.mark.parametrize("logprobs", [False, True], ids=["", "logprobs"])
@pytest.mark.parametrize("stops", [False, True], ids=["", "stops"])
def test_the_text_of_a_long_choice(stops: bool, logprobs: bool, resumable: bool) -> None:
    def make(tokens: int) -> Work:
        choice = choice_text(0, stops=stops, resumable=resumable)
        own = [TokenLogprobs(-1.0, 1, ((1, -1.0),))] if logprobs else None
        return lambda: [choice.add(RequestOutput(0, [token_id], logprobs=own)) for token_id in range(tokens)]

    check_linear(make, 1_500)


def test_the_choices_of_one_request() -> None:
    def make(number: int) -> Work:
        choices = [choice_text(index, stops=True, resumable=True) for index in range(number)]
        return lambda: [choice.add(RequestOutput(0, [step])) for step in range(30) for choice in choices]

    check_linear(make, 64)


def schema(properties: int, values: int = 2) -> dict[str, object]:
    names = [f"p{index}" for index in range(properties)]
    return {
        "type": "object",
        "properties": {name: {"type": "string", "enum": [f"v{index}" for index in range(values)]} for name in names},
        "required": names,
    }


@pytest.mark.parametrize("calls", OF_FORMAT)
@pytest.mark.parametrize("what", ["tools", "properties", "values"])
def test_the_grammar_of_calls(calls: ToolFormat, what: str) -> None:
    def make(number: int) -> Work:
        sizes = {"tools": (number, 3, 2), "properties": (1, 4 * number, 2), "values": (1, 1, 40 * number)}
        tools, properties, values = sizes[what]
        functions = [ToolSchema(f"f{index}", schema(properties, values), strict=True) for index in range(tools)]
        reads = reading(calls, *functions)
        return lambda: tool_grammar(reads, "", lambda token: None)

    check_linear(make, 30)


@pytest.mark.parametrize("own_triggers", [False, True], ids=["one trigger", "a trigger each"])
def test_the_grammar_of_structural_tags(own_triggers: bool) -> None:
    def make(number: int) -> Work:
        begins = [f"<{index:06d}>" if own_triggers else f"<tag n={index}>" for index in range(number)]
        tags = [Tag(begin, JsonSchemaPart(schema(2)), "</tag>") for begin in begins]
        asked = StructuralTag("structural_tag", TriggeredTags(begins if own_triggers else ["<tag"], tags))
        return lambda: tag_grammar(asked, "structural_tag")

    check_linear(make, 32 if own_triggers else 64)
