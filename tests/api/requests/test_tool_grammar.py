"""Tests the grammars of calls with the compiler that engines use, and that parsers read what the grammars allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLTokenizer

from pdserve.api.message.formats import MessageFormats
from pdserve.api.message.parts import joined
from pdserve.api.requests.answer_reading import AnswerReading
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.api.requests.tool_grammar import tool_grammar
from pdserve.api.requests.tools import FunctionReference, NamedToolChoice, Tools, tool_use
from pdserve.config import ReasoningFormat, ToolFormat
from pdserve.errors import InvalidRequest
from pdserve.grammars.compiling import compile_grammar
from pdserve.grammars.vocabulary import load_vocabulary
from pdserve.wire.grammar import MAX_GRAMMAR_BYTES, Grammar
from tests.api.message.test_parsers import calls

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/small"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"small": {"enum": [1, 2]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "f_", "description": '"} %json start: "'}},
]
TWO = [("f", {"a": 1, "b": 'x"y'}), ("f_", {})]
WRITTEN = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x\\"y"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f_", "arguments": {}}\n</tool_call>',
    ToolFormat.LLAMA_JSON: '{"name": "f", "parameters": {"a": 1, "b": "x\\"y"}}; {"name": "f_", "parameters": {}}',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1, "b": "x\\"y"}}, '
    '{"name": "f_", "arguments": {}}]',
}
THOUGHTS = {
    (ReasoningFormat.NONE, ""): "",
    (ReasoningFormat.THINK, ""): "<think>\nf or <tool_call>?\n</think>\n\n",
    (ReasoningFormat.THINK, "<think>\n"): "f or <tool_call>?</think>",
    (ReasoningFormat.THINK, "</think>\n\n"): "",
}
"""What an answer may begin with, by the format of its reasoning and the end of its prompt."""


@pytest.fixture(scope="module")
def vocabulary(model_dir: Path) -> LLTokenizer:
    return load_vocabulary(model_dir, [EOS])


def no_special(_: str) -> None:
    return None


def reading(form: ToolFormat, reasoning: ReasoningFormat, choice: Any, tools: Any = TOOLS) -> AnswerReading:
    use = tool_use(msgspec.convert(tools, Tools), choice, None)
    return AnswerReading(MessageFormats(form, reasoning), use)


def allows(grammar: Grammar | None, text: str, tokenizer: Tokenizer, vocabulary: LLTokenizer) -> bool:
    assert grammar is not None
    matcher = compile_grammar(grammar, vocabulary)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


@pytest.mark.parametrize("form", WRITTEN, ids=str)
@pytest.mark.parametrize(("reasoning", "ending"), THOUGHTS)
def test_forced_calls(
    form: ToolFormat, reasoning: ReasoningFormat, ending: str, tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    """The grammar has the calls in the model's form, behind its reasoning, and nothing else; the parser reads them."""
    forced = reading(form, reasoning, "required")
    grammar = tool_grammar(forced, ending, no_special)
    text = THOUGHTS[reasoning, ending] + WRITTEN[form]
    assert allows(grammar, text, tokenizer, vocabulary)
    parser = forced.parser(ending)
    assert parser is not None
    parts = joined([parser.add(text), parser.finish()])
    assert (calls(parts), parts.content, parser.called) == (TWO, "", True)
    for wrong in ("Hello", text + " Hello", text.replace('"a": 1', '"a": 3'), text.replace('"f"', '"g"'), ""):
        assert not allows(grammar, wrong, tokenizer, vocabulary)


@pytest.mark.parametrize("form", WRITTEN, ids=str)
def test_strict_functions_are_called_as_they_say_where_no_call_is_forced(
    form: ToolFormat, tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    grammar = tool_grammar(reading(form, ReasoningFormat.NONE, "auto"), "", no_special)
    for text in ("", "Hello", 'Not {"name": "f"}', WRITTEN[form]):
        assert allows(grammar, text, tokenizer, vocabulary)
    assert not allows(grammar, WRITTEN[form].replace('"a": 1', '"a": 3'), tokenizer, vocabulary)
    if form is not ToolFormat.LLAMA_JSON:  # whose calls begin the answer
        assert allows(grammar, f"I call: {WRITTEN[form]} Done.", tokenizer, vocabulary)
    lax = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    assert tool_grammar(reading(form, ReasoningFormat.NONE, "auto", lax), "", no_special) is None


def test_one_call_where_one_is_named(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    named = NamedToolChoice(FunctionReference("f_"))
    grammar = tool_grammar(reading(ToolFormat.HERMES, ReasoningFormat.NONE, named), "", no_special)
    one = '<tool_call>\n{"name": "f_", "arguments": {}}\n</tool_call>'
    assert allows(grammar, one, tokenizer, vocabulary)
    assert not allows(grammar, f"{one}\n{one}", tokenizer, vocabulary)


def test_special_tokens_are_markers(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    """Where a marker is a special token, that token has to come, because letters never become it."""
    special = tokenizer.special_id("<jupyter_start>")
    assert special is not None
    grammar = tool_grammar(
        reading(ToolFormat.MISTRAL, ReasoningFormat.NONE, "required"),
        "",
        lambda text: special if text == "[TOOL_CALLS]" else None,
    )
    body = WRITTEN[ToolFormat.MISTRAL].removeprefix("[TOOL_CALLS]")
    assert allows(grammar, "<jupyter_start>" + body, tokenizer, vocabulary)
    assert not allows(grammar, WRITTEN[ToolFormat.MISTRAL], tokenizer, vocabulary)


def test_functions_beyond_the_largest_grammar() -> None:
    large = {"type": "object", "properties": {"a": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": large}}]
    with pytest.raises(InvalidRequest) as raised:
        tool_grammar(reading(ToolFormat.HERMES, ReasoningFormat.NONE, "required", tools), "", no_special)
    assert raised.value.param == "tools"
