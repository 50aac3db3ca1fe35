"""Tests what a trial says about a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from pdserve.grammars.trial import try_grammar
from pdserve.wire.grammar import Grammar, GrammarKind, GrammarTrial
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
