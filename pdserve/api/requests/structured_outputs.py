"""Makes a grammar of the fields by which clients of OpenAI, vLLM, SGLang and llama.cpp ask for a structured answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.api.call_grammars.rules import quoted
from pdserve.api.call_grammars.schema_parts import closed_schema, schema_parts
from pdserve.api.requests.grammar_check import GrammarPart, WantedGrammar
from pdserve.api.requests.request_fields import SharedFields
from pdserve.api.requests.structural_tags import Format, StructuralTag, Structures, Triggers, tag_grammar
from pdserve.api.requests.tools import ToolUse
from pdserve.errors import InvalidRequest
from pdserve.wire.sampling_params import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, GrammarTrial

MAX_CHOICES = 10_000
GrammarText: TypeAlias = Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]
Schema: TypeAlias = dict[str, Any] | GrammarText
"""A JSON Schema, or the text of one."""
TagOrText: TypeAlias = StructuralTag | GrammarText
"""A structural tag, or the text of one."""
Choices: TypeAlias = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)]

Parts: TypeAlias = Callable[[], Iterable[GrammarPart]]


class JsonSchemaFormat(msgspec.Struct):
    """``response_format.json_schema``."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Whether the answer follows all of the schema. Otherwise, keywords that are not supported are passed over."""


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Format | None = None
    """What a structural tag is made of."""
    structures: Structures | None = None
    triggers: Triggers | None = None


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
    structural_tag: TagOrText | None = None
    whitespace_pattern: str | None = None


class StructuredFields(SharedFields, kw_only=True):
    """The fields of both of OpenAI's older routes that ask for a structured answer."""

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
    structural_tag: TagOrText | None = None


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
    if request.structural_tag:
        wanted.append(_of_tag(request.structural_tag, "structural_tag"))
    if len(wanted) > 1:
        names = ", ".join(repr(one.param) for one in wanted)
        raise InvalidRequest(f"an answer can have one structure, and {names} ask for several", param=wanted[1].param)
    return wanted[0] if wanted else None


def wanted_calls(calls: Grammar, tools: ToolUse, structure: WantedGrammar | None) -> WantedGrammar:
    """Returns the grammar of an answer that calls functions. An answer that has to call some has no other structure.

    Raises InvalidRequest if calls that may come have to be strict, and other answers to have a structure.
    """
    if structure is not None and not tools.forced:
        raise InvalidRequest(
            f"functions with 'strict' and {structure.param!r} cannot go together, unless 'tool_choice' forces a call",
            param=structure.param,
        )
    return WantedGrammar(GrammarTrial(calls), "tools", lambda: schema_parts(tools))


def _of_response_format(asked: ResponseFormat | None) -> Iterator[WantedGrammar]:
    if asked is None or asked.type == "text":
        return
    if asked.type == "json_object":
        yield _any_object("response_format")
        return
    if asked.type == "structural_tag":
        tag = StructuralTag("structural_tag", asked.format, asked.structures, asked.triggers)
        yield _of_tag(tag, "response_format")
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
    if asked.whitespace_pattern is not None:
        param = "structured_outputs.whitespace_pattern"
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
    if asked.structural_tag is not None:
        yield _of_tag(asked.structural_tag, "structured_outputs.structural_tag")


def _of_tag(asked: TagOrText, param: str) -> WantedGrammar:
    if isinstance(asked, str):
        try:
            asked = msgspec.json.decode(asked, type=StructuralTag)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"{param!r} is no structural tag: {exc}", param=param) from exc
    made = tag_grammar(asked, param)
    return _wanted(GrammarKind.LARK, made.grammar.text, param, parts=lambda: made.parts)


def _of_text(kind: GrammarKind, text: str, param: str) -> WantedGrammar:
    if not text:
        raise InvalidRequest(f"{param!r} is empty, and no answer could follow it", param=param)
    return _wanted(kind, text, param, ebnf=kind is GrammarKind.LARK)


def _wanted(
    kind: GrammarKind, text: str, param: str, *, ebnf: bool = False, parts: Parts | None = None
) -> WantedGrammar:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{param!r} has a grammar of {len(text)} characters; at most {MAX_GRAMMAR_BYTES} are allowed",
            param=param,
            code="grammar_too_long",
        )
    return WantedGrammar(GrammarTrial(Grammar(kind, text), ebnf), param, parts)


def _any_object(param: str, *, compact: bool = False) -> WantedGrammar:
    return _of_schema({"type": "object"}, param, compact=compact)


def _of_choices(choices: Choices, param: str) -> WantedGrammar:
    """Returns a grammar of one terminal, which takes thousands of choices where a rule would take hundreds."""
    terminal = " | ".join(map(quoted, choices))
    return _wanted(GrammarKind.LARK, f"start: CHOICE\nCHOICE: {terminal}\n", param, parts=tuple)


def _of_schema(asked: Schema, param: str, *, lenient: bool = False, compact: bool = False) -> WantedGrammar:
    options = {
        **({"lenient": True, "coerce_one_of": True} if lenient else {}),
        **({"whitespace_flexible": False, "whitespace_pattern": None} if compact else {}),
    }
    schema = closed_schema(_schema_object(asked, param), param, options)
    return _wanted(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode(), param)


def _schema_object(asked: Schema, param: str) -> dict[str, Any]:
    """Returns a schema that may have come as its text. Raises InvalidRequest if it is no object."""
    if isinstance(asked, dict):
        return asked
    try:
        decoded = msgspec.json.decode(asked)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{param!r} is no JSON: {exc}", param=param) from exc
    if not isinstance(decoded, dict):
        raise InvalidRequest(f"{param!r} is no JSON Schema: it takes an object", param=param)
    return decoded
