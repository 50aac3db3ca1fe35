"""Makes a grammar of the fields by which clients of OpenAI, vLLM, SGLang and llama.cpp ask for a structured answer.

An object of a schema that names properties has no others, unless its ``additionalProperties`` says so. JSON Schema
would allow any, but a client that lists properties wants these, and vLLM has it so as well. A schema that puts objects
together out of several parts is left as it is, because no part of it knows the properties of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.api.requests.grammar_check import WantedGrammar
from pdserve.errors import InvalidRequest
from pdserve.wire.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, GrammarTrial

MAX_CHOICES = 10_000
MAX_DEPTH = 64
"""How deeply the lists and objects of a schema may be nested, its own subschemas included."""

GrammarText: TypeAlias = Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]
Schema: TypeAlias = dict[str, Any] | GrammarText
"""A JSON Schema, or the text of one."""
Choices: TypeAlias = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]

_JOINING = frozenset({"$ref", "$dynamicRef", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"})
"""Keywords that add properties to those of the object that they stand in."""
_CLOSING = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""Keywords that say which other properties an object has."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that have a schema under each name."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords that have values, and no schemas."""


class JsonSchemaFormat(msgspec.Struct):
    """``response_format.json_schema``."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Whether the answer follows the whole schema. Otherwise, keywords that are not supported are passed over."""


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's field of that name."""

    json: Schema | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None


class StructuredFields(msgspec.Struct, kw_only=True):
    """The fields of both routes that ask for a structured answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: Schema | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    grammar: GrammarText | None = None


def wanted_grammar(request: StructuredFields) -> WantedGrammar | None:
    """Returns the grammar that a request asks for, or None. Raises InvalidRequest if it asks for several."""
    wanted = [*_of_response_format(request.response_format), *_of_structured_outputs(request.structured_outputs)]
    for param, schema in (("guided_json", request.guided_json), ("json_schema", request.json_schema)):
        if schema is not None and (schema != "" or param == "guided_json"):
            wanted.append(_of_schema(schema, param))
    if request.guided_regex is not None:
        wanted.append(_of_text(GrammarKind.REGEX, request.guided_regex, "guided_regex"))
    if request.guided_grammar is not None:
        wanted.append(_of_text(GrammarKind.LARK, request.guided_grammar, "guided_grammar"))
    # Clients of SGLang and llama.cpp leave these fields empty where they ask for nothing.
    if request.regex:
        wanted.append(_of_text(GrammarKind.REGEX, request.regex, "regex"))
    for param, text in (("ebnf", request.ebnf), ("grammar", request.grammar)):
        if text:
            wanted.append(_of_text(GrammarKind.LARK, text, param))
    if request.guided_choice:
        wanted.append(_of_choices(request.guided_choice, "guided_choice"))
    if len(wanted) > 1:
        names = ", ".join(repr(one.param) for one in wanted)
        raise InvalidRequest(f"an answer can have one structure, and {names} ask for several", param=wanted[1].param)
    return wanted[0] if wanted else None


def wanted_calls(calls: Grammar, structure: WantedGrammar | None, *, forced: bool) -> WantedGrammar:
    """Returns the grammar of an answer that calls functions. An answer that has to call some has no other structure.

    Raises InvalidRequest if calls that may come have to be strict, and other answers to have a structure.
    """
    if structure is not None and not forced:
        raise InvalidRequest(
            f"functions with 'strict' and {structure.param!r} cannot go together, unless 'tool_choice' forces a call",
            param=structure.param,
        )
    return WantedGrammar(GrammarTrial(calls), "tools")


def _of_response_format(asked: ResponseFormat | None) -> Iterator[WantedGrammar]:
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        yield _any_object("response_format")
        return
    if asked.json_schema is None:
        raise InvalidRequest(
            "'response_format.json_schema' is required", param="response_format.json_schema", code="missing_schema"
        )
    yield _of_schema(
        asked.json_schema.schema, "response_format.json_schema.schema", lenient=not asked.json_schema.strict
    )


def _of_structured_outputs(asked: StructuredOutputs | None) -> Iterator[WantedGrammar]:
    if asked is None:
        return
    for name, value in (("structural_tag", asked.structural_tag), ("whitespace_pattern", asked.whitespace_pattern)):
        if value is not None:
            param = f"structured_outputs.{name}"
            raise InvalidRequest(f"{param!r} is not supported by pdserve", param=param, code="unsupported_parameter")
    compact = bool(asked.disable_any_whitespace)
    if asked.json is not None:
        yield _of_schema(asked.json, "structured_outputs.json", compact=compact)
    if asked.json_object:
        yield _any_object("structured_outputs.json_object", compact=compact)
    if asked.regex is not None:
        yield _of_text(GrammarKind.REGEX, asked.regex, "structured_outputs.regex")
    if asked.choice:
        yield _of_choices(asked.choice, "structured_outputs.choice")
    if asked.grammar is not None:
        yield _of_text(GrammarKind.LARK, asked.grammar, "structured_outputs.grammar")


def _of_text(kind: GrammarKind, text: str, param: str) -> WantedGrammar:
    if not text:
        raise InvalidRequest(f"{param!r} is empty, and no answer could follow it", param=param)
    return _wanted(kind, text, param, ebnf=kind is GrammarKind.LARK)


def _wanted(kind: GrammarKind, text: str, param: str, *, ebnf: bool = False) -> WantedGrammar:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{param!r} has a grammar of {len(text)} characters; at most {MAX_GRAMMAR_BYTES} are allowed",
            param=param,
            code="grammar_too_long",
        )
    return WantedGrammar(GrammarTrial(Grammar(kind, text), ebnf), param)


def _any_object(param: str, *, compact: bool = False) -> WantedGrammar:
    return _of_schema({"type": "object"}, param, compact=compact)


def _of_choices(choices: Choices, param: str) -> WantedGrammar:
    """Returns a grammar of one terminal, which takes thousands of choices where a rule would take hundreds."""
    terminal = " | ".join(_quoted(choice) for choice in choices)
    return _wanted(GrammarKind.LARK, f"start: CHOICE\nCHOICE: {terminal}\n", param)


def _quoted(choice: str) -> str:
    """Returns the text as Lark reads it: like JSON, but a delete character has to be escaped."""
    return msgspec.json.encode(choice).decode().replace("\x7f", "\\u007f")


def _of_schema(asked: Schema, param: str, *, lenient: bool = False, compact: bool = False) -> WantedGrammar:
    if isinstance(asked, str):
        try:
            decoded = msgspec.json.decode(asked)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"{param!r} is no JSON: {exc}", param=param) from exc
        if not isinstance(decoded, dict):
            raise InvalidRequest(f"{param!r} is no JSON Schema: it takes an object", param=param)
        asked = decoded
    subschemas = check_depth(asked, param)
    closes = not any("allOf" in one or ("properties" in one and _JOINING & one.keys()) for one in subschemas)
    schema = _closed(asked) if closes else dict(asked)
    # A client's own options of the compiler have no place here.
    schema.pop("x-guidance", None)
    options = {
        **({"lenient": True, "coerce_one_of": True} if lenient else {}),
        **({"whitespace_flexible": False, "whitespace_pattern": None} if compact else {}),
    }
    if options:
        schema["x-guidance"] = options
    return _wanted(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), param)


def check_depth(schema: Mapping[str, Any], param: str) -> list[Mapping[str, Any]]:
    """Returns all objects of a schema. Raises InvalidRequest if it is nested too deeply."""
    objects: list[Mapping[str, Any]] = []
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{param!r} is nested too deeply: at most {MAX_DEPTH} levels are allowed", param=param)
        if isinstance(value, Mapping):
            objects.append(value)
            waiting += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            waiting += [(inner, depth + 1) for inner in value]
    return objects


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema, which is not nested too deeply, with objects that have no other properties than it names."""
    inner = {key: _closed_part(key, value) for key, value in schema.items()}
    properties, required = schema.get("properties"), schema.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list) and not _CLOSING & schema.keys():
        known = [isinstance(name, str) and name in properties for name in required]
        inner |= {"additionalProperties": False} if all(known) else {}
    return inner


def _closed_part(keyword: str, value: Any) -> Any:
    match value:
        case dict() if keyword in _NAMED:
            return {name: _closed(part) if isinstance(part, dict) else part for name, part in value.items()}
        case dict() if keyword not in _VALUES:
            return _closed(value)
        case list() if keyword not in _VALUES:
            return [_closed(part) if isinstance(part, dict) else part for part in value]
        case _:
            return value
