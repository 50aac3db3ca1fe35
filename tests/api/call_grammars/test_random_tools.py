"""Tests that the parser of each form reads whatever the grammar of random functions lets a random model write.

The model is a random walk over the tokens that the grammar allows, or tries to write wrong calls.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pdserve.api.message.parts import MessageParts
from pdserve.api.requests.answer_reading import AnswerReading
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.config import ReasoningFormat, ToolFormat
from tests.api.call_grammars.random_model import RandomModel, read
from tests.api.call_grammars.test_tool_grammar import reading
from tests.api.message.test_parsers import FORMATS
from tests.examples import examples

pytestmark = pytest.mark.integration  # for the seconds that it takes

WALKS = examples(18)
"""How many random functions each test has, in each form."""
NAMES = ("f", "f_", "9-to.5", "-", "get_weather")
PARAMETERS = ("a", "from", "_", "days", "A_1")
ODD_PARAMETERS = (*PARAMETERS, "city name", "größe", 'x"y', "</parameter>", "b<", "c-d", "\\", "日本", "**", "")
TEXTS = ("red", "x\"y'z\\", "</parameter>", "a\nb", "</tool_call>", "\n", "", "é日🙂", "```", "[TOOL_CALLS]", "<think>")


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    """Returns the schema of one parameter."""
    flat = ["text", "bounded", "integer", "number", "boolean", "null", "enum", "const", "pattern", "date", "any", "all"]
    deep = ["object", "array", "map", "any_of", "types", "one_of", "reference", "tree"]
    match rng.choice(flat + deep * (2 if depth < 2 else 0)):
        case "text":
            return {"type": "string", "description": "a text"}
        case "bounded":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 9)}
        case "enum":
            return {"enum": rng.sample([*TEXTS, 1, -2.5, None, True, ["x"], {"k": None}], rng.randint(1, 4))}
        case "const":
            return {"type": "string", "const": rng.choice(TEXTS)}
        case "pattern":
            return {"type": "string", "pattern": "^[a-d</]{1,3}$"}
        case "date":
            return {"type": "string", "format": "date"}
        case "any":
            return {}
        case "all":
            return True
        case "integer":
            return {"type": "integer", "minimum": 0}
        case "object":
            return object_schema(rng, depth + 1)
        case "array":
            least = rng.randint(0, 2)
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": least, "maxItems": least + 2}
        case "map":
            return {"type": "object", "additionalProperties": random_schema(rng, depth + 1)}
        case "any_of":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "one_of":
            return {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}
        case "types":
            return {"type": ["string", "null", "array"], "maxLength": 4}
        case "reference":
            return {"$ref": "#/$defs/color"}
        case "tree":
            return {"$ref": "#/$defs/tree"}
        case other:
            return {"type": other}


def object_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(ODD_PARAMETERS if rng.random() < 0.2 else PARAMETERS, rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.5],
    }
    return schema | rng.choice(
        [{}, {"additionalProperties": False}, {"additionalProperties": False}, {"minProperties": 0}]
    )


def random_parameters(rng: random.Random) -> dict[str, Any]:
    schema = rng.choice([object_schema(rng), object_schema(rng), {"type": "object"}, {}])
    if not schema:
        return schema
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "leaf": {"type": "boolean"}}}
    return schema | {"$defs": {"color": {"enum": ["red", "a b"]}, "tree": tree}}


def random_tools(rng: random.Random, *, strict: bool) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": random_parameters(rng), "strict": strict}}
        for name in rng.sample(NAMES, rng.randint(1, 3))
    ]


@pytest.fixture(scope="module")
def model(model_dir: Path, tokenizer: Tokenizer) -> RandomModel:
    return RandomModel(tokenizer, model_dir)


def check_calls(asked: AnswerReading, parts: MessageParts, text: str) -> None:
    for call in parts.calls:
        assert call.name is not None
        assert call.name in asked.tools.callable, text
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict), text
        jsonschema.validate(arguments, dict(asked.tools.callable[call.name].parameters))


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_forced_calls_are_read_and_follow_their_schema(form: ToolFormat, strict: bool, model: RandomModel) -> None:
    whole = 0
    for seed in range(WALKS):
        rng = random.Random(seed)
        asked = reading(form, ReasoningFormat.NONE, "required", random_tools(rng, strict=strict))
        pieces, ended = model.write(asked, rng)
        text = "".join(pieces)
        parts = read(asked, [text])
        assert read(asked, pieces) == parts, text
        if ended:
            assert (parts.content, bool(parts.calls)) == ("", True), text
            check_calls(asked, parts, text)
            whole += 1
    assert whole >= WALKS // 2


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_calls_that_need_not_come_are_strict_where_they_come(form: ToolFormat, model: RandomModel) -> None:
    begun: dict[ToolFormat, str] = {
        ToolFormat.HERMES: "See <tool_call>",
        ToolFormat.QWEN_XML: "See <tool_call>",
        ToolFormat.LLAMA_JSON: "{",
        ToolFormat.MISTRAL: "See [TOOL_CALLS]",
        ToolFormat.PYTHONIC: "\n[{name}(",
        ToolFormat.GEMMA: "See ```tool_code",
        ToolFormat.NEMOTRON: "See <TOOLCALL>",
        ToolFormat.GEMMA4: "See <|tool_call>",
    }
    whole = 0
    for seed in range(WALKS):
        rng = random.Random(seed)
        tools = random_tools(rng, strict=True)
        asked = reading(form, ReasoningFormat.NONE, "auto", tools)
        start = begun[form].replace("{name}", tools[0]["function"]["name"])
        pieces, ended = model.write(asked, rng, start)
        text = "".join(pieces)
        parts = read(asked, [text])
        assert read(asked, pieces) == parts, text
        if ended:
            assert parts.calls, text
            check_calls(asked, parts, text)
            whole += 1
    assert whole >= WALKS // 2


SMALL = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"], "additionalProperties": False}
MIXED_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SMALL, "strict": True}},
    {"type": "function", "function": {"name": "g", "parameters": SMALL}},
]
WRONG = (
    *(
        '{"name": "f", "arguments": {"a": 9}}',
        '{"name": "f", "parameters": {}}',
        "[f(a=9)]",
        "f()",
        "f[ARGS]{}",
        "[ f(",
    ),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "```tool_code", "```tool_call", "```", "<|python_tag|>"),
    *("<|python_start|>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<think>", "</think>", "{"),
    *("Hello", "\n", " ", "\x1c", "\t", ";", ",", "]", "g(a=2)", '{"name": "g", "arguments": {"b": 1}}', "x", "1"),
)
RIGHT: dict[ToolFormat, str] = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    ToolFormat.QWEN_XML: "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ToolFormat.LLAMA_JSON: '{"name": "f", "parameters": {"a": 1}}',
    ToolFormat.PYTHONIC: "[f(a=1)]",
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    ToolFormat.GEMMA: "```tool_code\nf(a=1)\n```",
    ToolFormat.NEMOTRON: '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>',
    ToolFormat.GEMMA4: '<|tool_call>call:f{"a": 1}<tool_call|>',
}
BEGUN: dict[ToolFormat, str] = {
    **dict.fromkeys(FORMATS, "Hi "),
    ToolFormat.LLAMA_JSON: "<|python_tag|>",
    ToolFormat.PYTHONIC: "Hi <|python_start|>",
}
"""What may stand before a call that does not begin the answer."""
MARKERS = {
    "<tool_call>": "<jupyter_start>",
    "[TOOL_CALLS]": "<jupyter_text>",
    "<|python_tag|>": "<jupyter_code>",
    "<|python_start|>": "<jupyter_output>",
    "<think>": "<empty_output>",
    "</think>": "<issue_start>",
}
"""Special tokens of the demo model that stand for those of other models."""


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("reasoning_format", [ReasoningFormat.NONE, ReasoningFormat.THINK])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_no_call_escapes_its_schema(
    form: ToolFormat, reasoning_format: ReasoningFormat, choice: str, model: RandomModel, tokenizer: Tokenizer
) -> None:
    """Not even for a model that tries to write wrong calls, whether it has special tokens for markers or not."""
    ids = {marker: tokenizer.special_id(name) for marker, name in MARKERS.items()}
    specials = {marker: token_id for marker, token_id in ids.items() if token_id is not None}
    assert specials.keys() == MARKERS.keys()
    asked = reading(form, reasoning_format, choice, MIXED_TOOLS)
    called = 0
    for seed in range(WALKS):
        rng = random.Random(seed)
        wrong = (
            "".join(rng.choice(WRONG) for _ in range(seed % 9))
            + BEGUN[form] * (seed % 2)
            + RIGHT[form].replace("1", "9")
        )
        script = f"{wrong}{'</think>' * (seed % 2)}{RIGHT[form]}"
        text = model.mimic(asked, script, rng, specials if seed % 3 else {})
        if text is not None:
            parts = read(asked, [text])
            assert choice == "auto" or (parts.calls and not parts.content.strip()), text
            for call in parts.calls:
                assert call.name in ("f", "g"), text
                if call.name == "f" or choice == "required":
                    jsonschema.validate(json.loads(call.arguments), SMALL)
            called += len(parts.calls)
    assert called
