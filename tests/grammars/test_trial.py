"""Tests what a trial says about a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from pdserve.grammars.trial import try_grammar
from pdserve.wire.sampling_params import Grammar, GrammarKind, GrammarTrial, TriedGrammar
from tests.tiny_vocabulary import tiny_vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return tiny_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def text_of(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "duck"}, ""),
        ({"properties": {"a": {"type": "string"}, "b": text_of("(")}}, "properties.b"),
        (
            {"properties": {"a": {"items": {"anyOf": [{"type": "null"}, text_of("(?=a)")]}}}},
            "properties.a.items.anyOf[1]",
        ),
        ({"$defs": {"x": {"type": "duck"}}, "items": {"$ref": "#/$defs/x"}}, "$defs.x"),
        ({"$defs": {"x": {"type": "integer"}}, "items": {"$ref": "#/$defs/y"}}, "items"),
        ({"additionalProperties": {"prefixItems": [{}, {"uniqueItems": True}]}}, "additionalProperties.prefixItems[1]"),
    ],
)
def test_the_smallest_part_at_fault_is_named(vocabulary: LLTokenizer, schema: dict[str, Any], place: str) -> None:
    tried = try_grammar(GrammarTrial(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))), vocabulary)
    assert tried.refusal
    assert tried.place == place


@pytest.mark.parametrize(
    ("ebnf", "refusal"),
    [
        ('root ::= "a" b\nb ::= [0-9]+', ""),
        ('start: "a" B\nB: /[0-9]+/', ""),
        ('root ::= "a" (', "line"),
        ("root ::= " + "(" * 1_000 + '"a"' + ")" * 1_000, "recursion"),
    ],
)
def test_ebnf_becomes_lark_or_is_refused(vocabulary: LLTokenizer, ebnf: str, refusal: str) -> None:
    tried = try_grammar(GrammarTrial(Grammar(GrammarKind.LARK, ebnf), ebnf=True), vocabulary)
    assert refusal in tried.refusal
    assert bool(tried.refusal) is bool(refusal)
    if not refusal:
        assert "start:" in tried.grammar.text


WHOLE = {"type": "integer"}
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
NAMED = {**CLOSED, "properties": {"a": WHOLE, "b.c": WHOLE}, "required": ["a"]}


def embedded(schema: dict[str, Any]) -> Grammar:
    """A grammar with a schema in it, beside literals that look like one."""
    return Grammar(
        GrammarKind.LARK, f'start: "%json {{" | /%json [{{]/ | call // %json {{\ncall: %json {json.dumps(schema)}\n'
    )


@pytest.mark.parametrize("lark", [False, True])
@pytest.mark.parametrize(
    ("schema", "narrowed"),
    [
        ({**NAMED, "patternProperties": {"^a$": WHOLE}}, NAMED),
        ({**NAMED, "patternProperties": {"^(a|b[.]c)$": WHOLE}}, NAMED),
        ({"type": "array", "items": {**NAMED, "patternProperties": {"^a$": WHOLE}}}, {"type": "array", "items": NAMED}),
        ({**NAMED, "patternProperties": {"^a$": WHOLE, "^d": False}}, NAMED),
        ({**NAMED, "patternProperties": {"^a$": WHOLE, "^d": WHOLE}}, None),
        ({**NAMED, "patternProperties": {"^ab?$": WHOLE}}, None),
        ({"type": "object", "properties": {"a": WHOLE}, "patternProperties": {"^a$": WHOLE}}, None),
        ({**CLOSED, "patternProperties": {"^a$": WHOLE}}, None),
        ({**CLOSED, "properties": {"patternProperties": {**CLOSED, "properties": {"a": False}}}}, None),
    ],
    ids=str,
)
def test_patterns_that_match_listed_names_alone_are_left_out(
    vocabulary: LLTokenizer, schema: dict[str, Any], narrowed: dict[str, Any] | None, lark: bool
) -> None:
    """Behind a listed property there would be a comma, and no text after that."""
    grammar = embedded(schema) if lark else Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    tried = try_grammar(GrammarTrial(grammar), vocabulary)
    assert tried.refusal == ""
    if narrowed is None:
        assert tried.grammar == grammar
    else:
        assert tried.grammar == (embedded(narrowed) if lark else Grammar(grammar.kind, json.dumps(narrowed)))


NODE: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$defs": {"node": {**NODE, "required": ["next"]}}, "$ref": "#/$defs/node"}, "$defs.node"),
        ({"$defs": {"node": {**NODE, "required": ["next"]}}, **NODE}, "$defs.node"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ""),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "anyOf": [WHOLE, {"$ref": "#/$defs/a"}]}, "$defs.a"),
        (
            {"properties": {"a": {"type": "object", "patternProperties": {"^x": False}}}},
            "properties.a.patternProperties",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("lark", [False, True])
def test_a_schema_whose_texts_cannot_end_is_refused(
    vocabulary: LLTokenizer, schema: dict[str, Any], place: str, lark: bool
) -> None:
    grammar = embedded(schema) if lark else Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    tried = try_grammar(GrammarTrial(grammar), vocabulary)
    assert "end" in tried.refusal
    assert tried.place == place


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"type": "array", "items": {"$ref": "#"}},
        {"$defs": {"node": {"anyOf": [{**NODE, "required": ["next"]}, {"type": "null"}]}}, "$ref": "#/$defs/node"},
        {"$defs": {"node": {**NODE, "type": ["object", "null"], "required": ["next"]}}, "$ref": "#/$defs/node"},
        {
            "$defs": {"a": WHOLE, "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2}},
            "$ref": "#/$defs/b",
        },
    ],
    ids=str,
)
def test_a_schema_that_refers_to_itself_and_can_end_is_taken(vocabulary: LLTokenizer, schema: dict[str, Any]) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert try_grammar(GrammarTrial(grammar), vocabulary) == TriedGrammar(grammar)
