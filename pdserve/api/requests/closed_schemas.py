"""Makes of a client's JSON Schema the one that an answer follows.

An object of a schema that names properties has no others, unless its ``additionalProperties`` says so. JSON Schema
would allow any, but a client that lists properties wants these, and vLLM has it so as well. A schema that puts objects
together out of several parts is left as it is, because no part of it knows the properties of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.errors import InvalidRequest

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
