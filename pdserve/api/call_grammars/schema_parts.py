"""Looks at a client's JSON Schema: the parameters of a function, parts that stand alone, and the one an answer follows.

An object of a schema that names properties has no others, unless its ``additionalProperties`` says so. JSON Schema
would allow any, but a client that lists properties wants these, and vLLM has it so as well. A schema that puts objects
together out of several parts is left as it is, because no part of it knows the properties of the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.api.message.tool_schemas import ANNOTATIONS, ToolSchema
from pdserve.api.requests.grammar_check import GrammarPart
from pdserve.api.requests.tools import ToolUse
from pdserve.errors import InvalidRequest
from pdserve.wire.sampling_params import Grammar, GrammarKind

MAX_DEPTH = 64
"""How deeply the lists and objects of a schema may be nested, its own subschemas included."""

_JOINING = frozenset({"$ref", "$dynamicRef", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"})
"""Keywords that add properties to those of the object that they stand in."""
_CLOSING = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""Keywords that say which other properties an object has."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that have a schema under each name."""
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords that have values, and no schemas."""


def closed_schema(asked: dict[str, Any], param: str, options: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Returns the schema that an answer follows, with ``options`` of the compiler.

    Raises InvalidRequest if it is nested too deeply, which calls it ``name``.
    """
    subschemas = check_depth(asked, param, name)
    closes = not any("allOf" in one or ("properties" in one and _JOINING & one.keys()) for one in subschemas)
    schema = _closed(asked) if closes else dict(asked)
    # A client's own options of the compiler have no place here.
    schema.pop("x-guidance", None)
    if options:
        schema["x-guidance"] = dict(options)
    return schema


def check_depth(schema: Mapping[str, Any], param: str, name: str = "") -> list[Mapping[str, Any]]:
    """Returns all objects of a schema. Raises InvalidRequest if it is nested too deeply, which calls it ``name``."""
    objects: list[Mapping[str, Any]] = []
    waiting: list[tuple[Any, int]] = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise InvalidRequest(
                f"{name or repr(param)} is nested too deeply: at most {MAX_DEPTH} levels are allowed", param=param
            )
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
