"""Looks at the schema of a function's arguments: its parameters, and parts of it that stand alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.api.message.schema_kinds import ANNOTATIONS
from pdserve.api.message.tool_schemas import ToolSchema
from pdserve.api.requests.closed_schemas import check_depth
from pdserve.api.requests.grammar_check import GrammarPart
from pdserve.api.requests.tools import ToolUse
from pdserve.errors import InvalidRequest
from pdserve.wire.grammar import Grammar, GrammarKind

_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: as Python's json does, which models are trained on."""
_DEFINITION: Final = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_OBJECT_KEYS: Final = ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a function, or a property of an object."""

    name: str
    schema: Any
    required: bool


def argument_schema(tool: ToolSchema, *, forced: bool) -> dict[str, Any]:
    """Returns the schema that a call's arguments have to follow. A call that is neither forced nor strict may have any.

    Raises InvalidRequest if the schema is nested too deeply, or is not that of an object.
    """
    if not (forced or tool.strict):
        return {"type": "object"}
    check_depth(tool.parameters, "tools", _named(tool))
    parameters = {key: value for key, value in tool.parameters.items() if key != "x-guidance"}
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(
            f"the arguments of {tool.name!r} are an object: the 'type' of its schema can only be 'object'",
            param="tools",
        )
    return {**parameters, "type": "object"}


def members(schema: Mapping[str, Any]) -> list[Member] | None:
    """Returns what an object has, in order; None if the schema says more of it, or that it may have anything.

    An object that does not say whether it has others has none: a call with fewer arguments follows its schema too.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if schema.get("type") != "object" or not schema.keys() <= _OBJECT_KEYS:
        return None
    if schema.get("additionalProperties", False) is not False:
        return None
    if properties is None and "additionalProperties" in schema:
        properties = {}
    if not isinstance(properties, dict) or not isinstance(required, list):
        return None
    names = [name for name in required if isinstance(name, str) and name in properties]
    if len(names) < len(required):
        return None
    needed = frozenset(names)
    return [
        Member(name, part, name in needed)
        for name, part in properties.items()
        if part is not False or name in needed  # a property that nothing fits is one that the object lacks
    ]


def schema_parts(tools: ToolUse) -> Iterator[GrammarPart]:
    """Yields what each function's calls have to follow, by itself."""
    for tool in tools.callable.values():
        if tools.forced or tool.strict:
            parts = SchemaParts(argument_schema(tool, forced=tools.forced), lenient=not tool.strict)
            yield GrammarPart(_named(tool), Grammar(GrammarKind.JSON_SCHEMA, parts.text()))


def _named(tool: ToolSchema) -> str:
    return f"the schema of the function {tool.name!r}"


class SchemaParts:
    """The schema of one function's arguments, of which parts become JSON by themselves."""

    def __init__(self, schema: Mapping[str, Any], *, lenient: bool) -> None:
        """``lenient`` says whether keywords that the compiler does not know are passed over."""
        self._schema = schema
        self._options = {**_COMPACT, "lenient": lenient}
        self._written: dict[str, str] = {}
        """The parts that are written, by their own JSON. Many parameters may have the same, with all it refers to."""

    def text(self) -> str:
        """Returns the whole schema as the compiler gets it."""
        return json.dumps({**self._schema, "x-guidance": self._options})

    def whole(self) -> str:
        """Returns the expression of the arguments as JSON."""
        return f"%json {self.text()}"

    @property
    def divisible(self) -> bool:
        """Whether each part has a meaning by itself, because all that parts refer to are definitions."""
        return all(self._definition(reference) is not None for reference in _references(self._schema))

    def part(self, schema: Any) -> str:
        """Returns the expression of one part of a divisible schema as JSON."""
        own = json.dumps(schema)
        if own not in self._written:
            self._written[own] = self._write(schema)
        return self._written[own]

    def _write(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            return f"%json {json.dumps(schema)}"
        shared: dict[str, dict[str, Any]] = {}
        waiting = [schema]
        while waiting:
            for reference in _references(waiting.pop()):
                home, name = reference[2:].split("/")
                if name not in shared.setdefault(home, {}):
                    shared[home][name] = self.definition(reference)
                    waiting.append(shared[home][name])
        return f"%json {json.dumps({**schema, **shared, 'x-guidance': self._options})}"

    def definition(self, reference: str) -> Any:
        """Returns the schema that a ``$ref`` of a divisible schema means."""
        found = self._definition(reference)
        assert found is not None
        return found[0]

    def _definition(self, reference: Any) -> tuple[Any] | None:
        match = _DEFINITION.fullmatch(reference) if isinstance(reference, str) else None
        definitions = None if match is None else self._schema.get(match[1])
        if match is None or not isinstance(definitions, dict) or match[2] not in definitions:
            return None
        return (definitions[match[2]],)


def _references(schema: Any) -> Iterator[Any]:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
