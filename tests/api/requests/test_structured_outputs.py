"""Tests which grammar each field of a request asks for."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdserve.api.call_grammars.schema_parts import MAX_DEPTH
from pdserve.api.requests.structured_outputs import StructuredFields, wanted_grammar
from pdserve.errors import InvalidRequest
from pdserve.wire.sampling_params import GrammarKind

OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**OBJECT, "additionalProperties": False}


def fields(asked: dict[str, Any]) -> StructuredFields:
    return msgspec.convert(asked, StructuredFields)


def schema_of(asked: dict[str, Any]) -> Any:
    wanted = wanted_grammar(fields(asked))
    assert wanted is not None
    assert wanted.trial.grammar.kind is GrammarKind.JSON_SCHEMA
    return json.loads(wanted.trial.grammar.text)


def strictly(schema: dict[str, Any], *, strict: bool | None = True) -> dict[str, Any]:
    wanted = {"name": "x", "schema": schema, "strict": strict}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"regex": "", "ebnf": "", "grammar": "", "json_schema": ""},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
    ],
    ids=str,
)
def test_nothing_is_asked_for(asked: dict[str, Any]) -> None:
    assert wanted_grammar(fields(asked)) is None


@pytest.mark.parametrize(
    "asked",
    [
        strictly(OBJECT),
        {"guided_json": OBJECT},
        {"guided_json": json.dumps(OBJECT)},
        {"json_schema": json.dumps(OBJECT)},
        {"structured_outputs": {"json": OBJECT}},
        {"guided_json": {**OBJECT, "x-guidance": {"lenient": True}}},
    ],
    ids=str,
)
def test_every_name_of_a_schema_asks_for_the_same(asked: dict[str, Any]) -> None:
    assert schema_of(asked) == CLOSED


@pytest.mark.parametrize("strict", [False, None])
def test_a_schema_that_is_not_strict_passes_over_what_is_not_supported(strict: bool | None) -> None:
    assert schema_of(strictly(OBJECT, strict=strict)) == {
        **CLOSED,
        "x-guidance": {"lenient": True, "coerce_one_of": True},
    }


def test_compact_json_has_no_spaces() -> None:
    asked = {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}
    assert schema_of(asked) == {
        "type": "object",
        "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
    }


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        ({"type": "object"}, {"type": "object"}),
        ({**OBJECT, "additionalProperties": True}, {**OBJECT, "additionalProperties": True}),
        ({**OBJECT, "required": ["b"]}, {**OBJECT, "required": ["b"]}),
        ({**OBJECT, "required": [["b"]]}, {**OBJECT, "required": [["b"]]}),
        ({"items": OBJECT}, {"items": CLOSED}),
        ({"anyOf": [OBJECT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$defs": {"properties": OBJECT}}, {"$defs": {"properties": CLOSED}}),
        (
            {"properties": {"properties": {"type": "string"}, "enum": OBJECT}},
            {"properties": {"properties": {"type": "string"}, "enum": CLOSED}, "additionalProperties": False},
        ),
        ({"enum": [OBJECT], "default": OBJECT}, {"enum": [OBJECT], "default": OBJECT}),
        ({"allOf": [OBJECT, OBJECT]}, {"allOf": [OBJECT, OBJECT]}),
        ({**OBJECT, "$ref": "#/$defs/x"}, {**OBJECT, "$ref": "#/$defs/x"}),
        ({**OBJECT, "anyOf": [OBJECT, {}]}, {**OBJECT, "anyOf": [OBJECT, {}]}),
    ],
    ids=str,
)
def test_an_object_that_names_properties_has_no_others(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    assert schema_of({"guided_json": schema}) == closed


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"guided_choice": ["a", 'b"\n']}, GrammarKind.LARK, 'start: CHOICE\nCHOICE: "a" | "b\\"\\n"\n'),
        ({"guided_choice": ["\x7f"]}, GrammarKind.LARK, 'start: CHOICE\nCHOICE: "\\u007f"\n'),
        ({"guided_json": {}}, GrammarKind.JSON_SCHEMA, "{}"),
        ({"json_schema": {}}, GrammarKind.JSON_SCHEMA, "{}"),
        ({"guided_grammar": "root ::= x"}, GrammarKind.LARK, "root ::= x"),
        ({"ebnf": "root ::= x"}, GrammarKind.LARK, "root ::= x"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, GrammarKind.LARK, "root ::= x"),
    ],
    ids=str,
)
def test_other_structures(asked: dict[str, Any], kind: GrammarKind, text: str) -> None:
    wanted = wanted_grammar(fields(asked))
    assert wanted is not None
    assert (wanted.trial.grammar.kind, wanted.trial.grammar.text) == (kind, text)
    assert wanted.trial.ebnf is text.startswith("root")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        (strictly(OBJECT) | {"ebnf": "root ::= x"}, "ebnf"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": ""}, "guided_json"),
        ({"guided_json": "[1"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": '{"a":' * 5_000}, "guided_json"),
        ({"json_schema": json.dumps({"enum": ["x" * 270_000]})}, "json_schema"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_does_not_fit_together_is_refused(asked: dict[str, Any], param: str) -> None:
    with pytest.raises((InvalidRequest, msgspec.ValidationError)) as refused:
        wanted_grammar(fields(asked))
    if isinstance(refused.value, InvalidRequest):
        assert refused.value.param == param


@pytest.mark.parametrize(("levels", "fits"), [(MAX_DEPTH - 1, True), (MAX_DEPTH, False)])
def test_a_schema_has_so_many_levels(levels: int, fits: bool) -> None:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    if fits:
        assert schema_of({"guided_json": schema}) == schema
    else:
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            wanted_grammar(fields({"guided_json": schema}))
