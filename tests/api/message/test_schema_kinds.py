"""Tests that schemas cost what their size says, however often their parts are referred to."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.api.call_grammars.rules import MarkerTokens, no_token
from pdserve.api.call_grammars.tool_grammar import xml_form
from pdserve.api.message.tool_schemas import KINDS, MAX_VALUES, NULL, STRING, SchemaKinds, ToolSchema

REFERENCES = 2_000
ITEMS = 20_000
DOUBLED: dict[str, Any] = {
    **{f"a{depth}": {"anyOf": [{"$ref": f"#/$defs/a{depth + 1}"}] * 2} for depth in range(64)},
    "a64": {"type": "string"},
}


@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        ({"enum": ["x"] * ITEMS}, {STRING}),
        ({"type": ["string"] * ITEMS}, {STRING}),
        ({"not": {"anyOf": [{"type": "string"}] * (ITEMS // 10)}}, KINDS - {STRING}),
        ({"not": {"type": "string", **{f"x{number}": 0 for number in range(ITEMS)}}}, KINDS),
    ],
    ids=["enum", "type", "not", "keywords"],
)
@pytest.mark.parametrize("in_circle", [False, True])
def test_a_part_that_many_refer_to_is_looked_at_once(part: Any, kinds: frozenset[str], in_circle: bool) -> None:
    reference = {"$ref": "#/$defs/a"}
    looped = {"anyOf": [part, *[{"$ref": "#/$defs/loop"}] * REFERENCES]}
    root = {"$defs": {"a": part, "loop": looped}}
    asked = looped if in_circle else {"anyOf": [reference] * REFERENCES}
    assert SchemaKinds(root).of(asked) in (kinds, KINDS)


def test_references_that_double_with_each_level_are_followed_once() -> None:
    kinds = SchemaKinds({"$defs": DOUBLED})
    assert kinds.of({"$ref": "#/$defs/a0"}) == {STRING}


def test_the_steps_of_all_parameters_are_counted_together() -> None:
    circle: dict[str, Any] = {f"a{depth}": {"anyOf": [{"$ref": f"#/$defs/a{depth + 1}"}] * 2} for depth in range(64)}
    circle["a64"] = {"$ref": "#/$defs/a0"}
    parameters = {str(number): {"anyOf": [{"$ref": "#/$defs/a0"}, {"type": "null"}]} for number in range(REFERENCES)}
    tool = ToolSchema("f", {"properties": parameters, "$defs": circle})
    assert {tool.kinds(name) for name in parameters} <= {KINDS, frozenset({NULL})}


def test_a_terminal_of_many_values_is_written_once() -> None:
    choices = {"type": "string", "enum": [f"value {number}" for number in range(MAX_VALUES)]}
    reference = {"$ref": "#/$defs/choices"}
    optional = {"anyOf": [reference, {"type": "null"}]}
    properties = {str(number): reference if number % 2 else optional for number in range(REFERENCES)}
    tool = ToolSchema("f", {"type": "object", "properties": properties, "$defs": {"choices": choices}})
    form = xml_form([tool], MarkerTokens(lambda _: None, no_token), forced=True)
    assert sum(rule.count('value 17"') for rule in form.rules) == 2


def test_a_string_of_too_many_values_is_json() -> None:
    values = [str(number) for number in range(MAX_VALUES + 1)]
    assert SchemaKinds({}).plain_string({"enum": values}) is None
    assert SchemaKinds({}).plain_string({"enum": values[1:]}) is not None
