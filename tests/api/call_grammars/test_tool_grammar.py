"""Tests the grammars of calls with the compiler that engines use, and that parsers read what the grammars allow."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import tokenizers
from llguidance import LLTokenizer

from pdserve.api.call_grammars.tool_grammar import tool_grammar
from pdserve.api.message.formats import MessageFormats
from pdserve.api.message.parts import joined
from pdserve.api.message.reasoning import GEMMA4_THINK, THINK
from pdserve.api.requests.answer_reading import AnswerReading
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.api.requests.tools import FunctionReference, NamedToolChoice, Tools, tool_use
from pdserve.config import ReasoningFormat, ToolFormat
from pdserve.errors import InvalidRequest
from pdserve.grammars.compiling import compile_grammar, load_vocabulary
from pdserve.wire.sampling_params import MAX_GRAMMAR_BYTES, Grammar
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
    ToolFormat.QWEN_XML: '<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx"y\n'
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f_>\n</function>\n</tool_call>",
    ToolFormat.PYTHONIC: '[f(a=1, b="x\\"y"), f_()]',
    ToolFormat.GEMMA: '```tool_code\nf(a=1, b="x\\"y")\nf_()\n```',
    ToolFormat.NEMOTRON: '<TOOLCALL>[{"name": "f", "arguments": {"a": 1, "b": "x\\"y"}}, '
    '{"name": "f_", "arguments": {}}]</TOOLCALL>',
    ToolFormat.GEMMA4: '<|tool_call>call:f{"a": 1, "b": "x\\"y"}<tool_call|><|tool_call>call:f_{}<tool_call|>',
}
BAD = {'"a": 1': '"a": 3', "a=1": "a=3", "a>\n1": "a>\n3"}
"""What makes calls wrong by their schema, in each form."""
UNNAMED = {'{"name": "f"': '{"name": "g"', "f(a": "g(a", "=f>": "=g>", "call:f{": "call:g{"}
THOUGHTS = {
    (ReasoningFormat.NONE, ""): "",
    (ReasoningFormat.THINK, ""): "<think>\nf or <tool_call>?\n</think>\n\n",
    (ReasoningFormat.THINK, "<think>\n"): "f or <tool_call>?</think>",
    (ReasoningFormat.THINK, "</think>\n\n"): "",
    (ReasoningFormat.GEMMA4, ""): "<|channel>thought\nf or <tool_call>?\n<channel|>",
    (ReasoningFormat.GEMMA4, "<|channel>thought\n<channel|>"): "",
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
    matcher = compile_grammar(grammar, vocabulary).matcher
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def replaced(text: str, replacements: Mapping[str, str]) -> str:
    for old, new in replacements.items():
        text = text.replace(old, new)
    return text


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
    for wrong in ("Hello", text + " Hello", replaced(text, BAD), replaced(text, UNNAMED), ""):
        assert not allows(grammar, wrong, tokenizer, vocabulary)


@pytest.mark.parametrize("form", WRITTEN, ids=str)
def test_strict_functions_are_called_as_they_say_where_no_call_is_forced(
    form: ToolFormat, tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    grammar = tool_grammar(reading(form, ReasoningFormat.NONE, "auto"), "", no_special)
    for text in ("", "Hello", 'Not {"name": "f"}', WRITTEN[form]):
        assert allows(grammar, text, tokenizer, vocabulary)
    assert not allows(grammar, replaced(WRITTEN[form], BAD), tokenizer, vocabulary)
    begins = form in (ToolFormat.LLAMA_JSON, ToolFormat.PYTHONIC)  # whose calls begin the answer
    if not begins:
        assert allows(grammar, f"I call: {WRITTEN[form]}", tokenizer, vocabulary)
        assert not allows(grammar, f"I call: {replaced(WRITTEN[form], BAD)}", tokenizer, vocabulary)
    ends = begins or form is ToolFormat.MISTRAL  # where nothing says that the calls are over
    assert allows(grammar, f"{WRITTEN[form]} Done.", tokenizer, vocabulary) is not ends
    lax = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    assert tool_grammar(reading(form, ReasoningFormat.NONE, "auto", lax), "", no_special) is None


MARKERS = sorted(
    {
        marker
        for form in WRITTEN
        for marker in (*MessageFormats(form, ReasoningFormat.NONE).call_markers, *THINK.tokens, *GEMMA4_THINK.tokens)
    }
)


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "special"])
def marked(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, LLTokenizer]:
    """A tokeniser with a token for each marker, as Qwen's and Mistral's files have them, special or not."""
    folder = shutil.copytree(model_dir, tmp_path_factory.mktemp("marked") / "model")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [tokenizers.AddedToken(text, special=request.param, normalized=False) for text in MARKERS]
    (backend.add_special_tokens if request.param else backend.add_tokens)(tokens)
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder), load_vocabulary(folder, [EOS])


@pytest.mark.parametrize("form", WRITTEN, ids=str)
@pytest.mark.parametrize("choice", ["required", "auto", "f"])
@pytest.mark.parametrize(
    "thought",
    ["", "<think>\nf or f_?\n</think>\n\n", "<|channel>thought\nf or f_?\n<channel|>"],
    ids=["", "thinking", "in a channel"],
)
def test_the_token_that_a_model_has_for_a_marker_is_the_marker(
    form: ToolFormat, choice: str, thought: str, marked: tuple[Tokenizer, LLTokenizer]
) -> None:
    """Whether the tokeniser says that it is a special one or not."""
    tokenizer, vocabulary = marked
    named = NamedToolChoice(FunctionReference("f"))
    thinks = ReasoningFormat.GEMMA4 if thought.startswith("<|channel>") else ReasoningFormat.THINK
    asked = reading(form, thinks, named if choice == "f" else choice)
    text = WRITTEN[form]
    if choice == "f":
        text = {
            ToolFormat.LLAMA_JSON: text.partition("; ")[0],
            ToolFormat.MISTRAL: text.partition(', {"name": "f_"')[0] + "]",
            ToolFormat.PYTHONIC: text.partition(", f_")[0] + "]",
            ToolFormat.GEMMA: text.replace("f_()\n", ""),
            ToolFormat.NEMOTRON: text.partition(', {"name": "f_"')[0] + "]</TOOLCALL>",
            ToolFormat.GEMMA4: text.partition("<|tool_call>call:f_")[0],
        }.get(form, text.partition("\n<tool_call>\n<function=f_>")[0].partition('\n<tool_call>\n{"name": "f_"')[0])
    if form is ToolFormat.MISTRAL:  # the vocabulary has [ARGS]
        text = '[TOOL_CALLS]f[ARGS]{"a": 1, "b": "x\\"y"}'
    grammar = tool_grammar(asked, "", tokenizer.special_id, tokenizer.is_text_token)
    assert grammar is not None
    matcher = compile_grammar(grammar, vocabulary).matcher
    written = tokenizer.encode(thought + text, add_special_tokens=False)
    for at, token_id in enumerate(written):
        mask = matcher.compute_bitmask()
        allowed = mask[token_id // 8] >> token_id % 8 & 1
        assert allowed, f"{tokenizer.token_strings(written[:at])} + {tokenizer.token_strings([token_id])}"
        assert matcher.consume_token(token_id), matcher.get_error()
    assert matcher.is_accepting()
    markers = {one for one in MARKERS if one in thought + text}
    assert markers <= set(tokenizer.token_strings(written)), "the markers are tokens of their own"


OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "color": {"$ref": "#/$defs/color"},
        "either": {"type": ["string", "integer"]},
    },
    "required": ["text", "color", "either"],
    "$defs": {"color": {"enum": ["red", "7"]}},
}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (("7", "7", "7"), {"text": "7", "color": "7", "either": 7}),
        (("null", "red", '"7"'), {"text": None, "color": "red", "either": "7"}),
        (('"null"', "red", "7"), {"text": '"null"', "color": "red", "either": 7}),
        (("a", '"red"', "7"), None),
        (("a", "7", "a"), None),
    ],
)
def test_strings_between_tags_are_written_as_they_are_read(
    written: tuple[str, str, str], read: dict[str, Any] | None, tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": OPTIONAL}}]
    forced = reading(ToolFormat.QWEN_XML, ReasoningFormat.NONE, "required", tools)
    values = zip(OPTIONAL["required"], written, strict=True)
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
    text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    assert allows(tool_grammar(forced, "", no_special), text, tokenizer, vocabulary) is (read is not None)
    if read is not None:
        parser = forced.parser("")
        assert parser is not None
        assert calls(joined([parser.add(text), parser.finish()])) == [("f", read)]


def test_a_strict_call_has_its_marker(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    """The parser would take one without it for a call, too."""
    grammar = tool_grammar(reading(ToolFormat.QWEN_XML, ReasoningFormat.NONE, "auto"), "", no_special)
    assert allows(grammar, "Use <function>.", tokenizer, vocabulary)
    assert not allows(grammar, "<function=f>\n</function>", tokenizer, vocabulary)


TREE = {"type": "object", "properties": {"leaf": {"type": "boolean"}, "down": {"$ref": "#/$defs/tree"}}}
RICH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "color": {"enum": ["red", None, 1.5, [True]]},
        "list": {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 1, "maxItems": 2},
        "text": {"type": "string", "maxLength": 4},
        "tree": {"$ref": "#/$defs/tree"},
        "day": {"type": "string", "format": "date"},
        "never": False,
        "choice": {"oneOf": [{"type": "boolean"}, {"type": "string", "pattern": "^a+$"}]},
    },
    "$defs": {"tree": TREE},
}
OPEN = {"type": "object", "properties": {"a b": {"type": "boolean"}}, "required": ["a b"]}
WHOLE = {
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/tree"}},
    "$defs": {"tree": {"type": "object", "properties": {"down": {"$ref": "#/$defs/tree"}, "up": {"$ref": "#"}}}},
}
"""A schema whose parts refer to the whole."""
MANY = {"type": "object", "properties": {"a": {"type": "array", "maxItems": 10**15}}}


def tagged(**values: str) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("form", "schema", "good", "bad"),
    [
        (
            ToolFormat.PYTHONIC,
            RICH,
            [
                "[f()]",
                '[f(on=True, color=None, list=[1, None], text="a\\"", tree={"leaf": False, "down": {"down": {}}})]',
                '[f(color=[True], choice=true), f(color=1.5, day="2026-01-31", choice="aa")]',
            ],
            [
                "[f(on=true)]",
                "[f(list=[])]",
                "[f(text='a')]",
                "[f(never=1)]",
                "[f(text=1)]",
                "[f(color=None, on=True)]",
            ],
        ),
        (
            ToolFormat.QWEN_XML,
            RICH,
            [
                tagged(),
                tagged(on="true", color="[true]", list="[1, null]", text='"\n\n"', tree='{"down": {"down": {}}}'),
                tagged(text="", day='"2026-01-31"', choice='"a"'),
                tagged(text="", choice="false"),
            ],
            [
                tagged(text="abcde"),
                tagged(never="1"),
                tagged(day="2026-01-31"),
                tagged(text="</parameter>"),
                tagged(on="1"),
            ],
        ),
        (ToolFormat.PYTHONIC, OPEN, ['[f(**{"a b": true})]'], ["[f()]", '[f(**{"a b": 1})]']),
        (ToolFormat.GEMMA, {"type": "object"}, ["```tool_code\nf(x=[{}], y_1=None)\n```"], ["```tool_code\nf(1)\n```"]),
        (
            ToolFormat.QWEN_XML,
            OPEN,
            ['<tool_call>\n<function=f>\n{"a b": true}\n</function>\n</tool_call>'],
            [tagged()],
        ),
        (ToolFormat.PYTHONIC, WHOLE, ['[f(**{"tree": {"down": {"up": {}}}})]'], ["[f(tree={})]"]),
        (ToolFormat.PYTHONIC, MANY, ["[f(a=[1, true])]"], ["[f(a=1)]"]),
    ],
)
def test_arguments_have_the_form_of_the_model(
    form: ToolFormat,
    schema: dict[str, Any],
    good: list[str],
    bad: list[str],
    tokenizer: Tokenizer,
    vocabulary: LLTokenizer,
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    forced = reading(form, ReasoningFormat.NONE, "required", tools)
    grammar = tool_grammar(forced, "", no_special)
    for text in good:
        assert allows(grammar, text, tokenizer, vocabulary), text
        parser = forced.parser("")
        assert parser is not None
        parts = joined([parser.add(text), parser.finish()])
        for _, arguments in calls(parts):
            jsonschema.validate(arguments, schema)
        assert (len(parts.calls), parts.content) == (text.count("f(") or 1, "")
    assert [text for text in bad if allows(grammar, text, tokenizer, vocabulary)] == []


@pytest.mark.parametrize("form", [ToolFormat.HERMES, ToolFormat.GEMMA], ids=str)
def test_one_call_where_calls_are_not_parallel(form: ToolFormat, tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    use = tool_use(msgspec.convert(TOOLS, Tools), "auto", False)
    grammar = tool_grammar(AnswerReading(MessageFormats(form, ReasoningFormat.NONE), use), "", no_special)
    one = {ToolFormat.HERMES: '<tool_call>\n{"name": "f_", "arguments": {}}\n</tool_call>'}.get(
        form, "```tool_code\nf_()\n```"
    )
    assert allows(grammar, f"I call {one} Done.", tokenizer, vocabulary)
    assert not allows(grammar, f"{one}\n{one}", tokenizer, vocabulary)
    assert not allows(grammar, WRITTEN[form], tokenizer, vocabulary)


@pytest.mark.parametrize("schema", [{"type": "array"}, {"type": ["string", "null"]}, {"type": 5}], ids=str)
def test_arguments_that_are_no_object(schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(InvalidRequest, match="the arguments of 'f' are an object"):
        tool_grammar(reading(ToolFormat.HERMES, ReasoningFormat.NONE, "required", tools), "", no_special)


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


@pytest.mark.parametrize("form", [ToolFormat.PYTHONIC, ToolFormat.GEMMA], ids=str)
def test_a_kind_that_is_named_twice_doubles_no_work(form: ToolFormat) -> None:
    """Otherwise this grammar of a few kilobytes would need two to the power of its depth."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(50):
        schema = {"type": ["array", "array"], "items": schema}
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": schema}}}
    read = reading(form, ReasoningFormat.NONE, "required", [{"type": "function", "function": function}])
    grammar = tool_grammar(read, "", no_special)
    assert grammar is not None
    assert len(grammar.text) < MAX_GRAMMAR_BYTES


@pytest.mark.parametrize("form", WRITTEN, ids=str)
def test_every_character_may_stand_in_a_name_or_an_enum(
    form: ToolFormat, tokenizer: Tokenizer, vocabulary: LLTokenizer
) -> None:
    schema = {"type": "object", "properties": {"a\x7fb": {"enum": ["\x7f"]}}, "additionalProperties": False}
    function = {"name": "f", "strict": True, "parameters": schema}
    read = reading(form, ReasoningFormat.NONE, "required", [{"type": "function", "function": function}])
    grammar = tool_grammar(read, "", no_special)
    assert grammar is not None
    assert compile_grammar(grammar, vocabulary).matcher.is_error() is False
