"""Finds which kinds of JSON values a schema admits, and which schemas admit plain strings alone.

A schema that cannot be followed, such as a reference to nothing, admits every kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.grammars.references import referred

STRING, INTEGER, FRACTION, BOOLEAN, NULL, ARRAY, OBJECT = (
    *("string", "integer", "fraction", "boolean", "null"),
    *("array", "object"),
)
KINDS: Final = frozenset({STRING, INTEGER, FRACTION, BOOLEAN, NULL, ARRAY, OBJECT})
"""A number is an integer or a fraction."""
_NUMBER: Final = frozenset({INTEGER, FRACTION})
_TYPES: Final = {**{kind: frozenset({kind}) for kind in KINDS - {FRACTION}}, "number": _NUMBER}
_NOTHING: Final[frozenset[str]] = frozenset()
ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment"}
)
"""Keywords that say nothing about what a value may be."""
MAX_STEPS: Final = 10_000
"""How many schemas are looked at for one parameter. Of what has more, every kind is admitted."""
_PLAIN_KEYS: Final = ANNOTATIONS | {"type", "nullable", "minLength", "maxLength", "enum", "const"}


def kind_of(value: Any) -> str:
    """Returns the kind of a value that was read from JSON."""
    match value:
        case bool():
            return BOOLEAN
        case int():
            return INTEGER
        case float():
            return INTEGER if value.is_integer() else FRACTION
        case str():
            return STRING
        case list():
            return ARRAY
        case dict():
            return OBJECT
    return NULL


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the kinds that ``schema`` admits. ``root`` is what its references are in."""
    try:
        return _Kinds(root).of(schema) or KINDS
    except (_TooMuch, RecursionError):
        return KINDS


class _TooMuch(Exception):
    """A schema has more parts than are looked at."""


class _Kinds:
    """Looks at one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._followed: list[str] = []
        """The references that lead to where it looks now. One that leads to itself admits nothing more."""
        self._steps = 0

    def of(self, schema: Any) -> frozenset[str]:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooMuch
        if schema is False:
            return _NOTHING
        if not isinstance(schema, dict):
            return KINDS
        kinds = _types(schema.get("type"))
        if schema.get("nullable") is True:
            kinds |= {NULL}
        if "const" in schema:
            kinds &= {kind_of(schema["const"])}
        if isinstance(values := schema.get("enum"), list):
            kinds &= set(map(kind_of, values))
        if isinstance(reference := schema.get("$ref"), str):
            kinds &= self._referred(reference)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(keyword), list):
                kinds &= _union(map(self.of, choices))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                kinds &= self.of(part)
        if "if" in schema:
            then = self.of(schema["if"]) & self.of(schema.get("then", True))
            kinds &= then | self.of(schema.get("else", True))
        return kinds - _ruled_out(schema.get("not"))

    def _referred(self, reference: str) -> frozenset[str]:
        if reference in self._followed:
            return _NOTHING
        self._followed.append(reference)
        try:
            return self.of(referred(reference, self._root))
        finally:
            self._followed.pop()


def _union(kinds: Iterable[frozenset[str]]) -> frozenset[str]:
    return _NOTHING.union(*kinds)


def _types(names: Any) -> frozenset[str]:
    if names is None:
        return KINDS
    listed = names if isinstance(names, list) else [names]
    return _union(_TYPES.get(name, _NOTHING) if isinstance(name, str) else _NOTHING for name in listed)


def _ruled_out(schema: Any) -> frozenset[str]:
    """Returns the kinds of which ``schema`` admits every value, so that its negation admits none."""
    if schema is True:
        return KINDS
    if not isinstance(schema, dict):
        return _NOTHING
    match {key: value for key, value in schema.items() if key not in ANNOTATIONS}:
        case {"type": names, **rest} if not rest:
            return _types(names)
        case {"const": None, **rest} | {"enum": [None], **rest} if not rest:
            return frozenset({NULL})
        case {"anyOf": list(choices), **rest} if not rest:
            return _union(map(_ruled_out, choices))
        case {**rest} if not rest:
            return KINDS
    return _NOTHING


@dataclass(frozen=True, slots=True)
class PlainString:
    """What a schema says that admits strings, and perhaps null, and nothing that a text cannot show."""

    schema: Mapping[str, Any]
    """The keywords of the strings: bounds of their length, and their values."""
    nullable: bool = False


def plain_string(schema: Any, root: Mapping[str, Any]) -> PlainString | None:
    """Returns what a schema says of strings; None if it admits other kinds, or says more than a text shows."""
    return _plain(schema, root, 0)


def _plain(schema: Any, root: Mapping[str, Any], depth: int) -> PlainString | None:
    if not isinstance(schema, dict) or depth > len(KINDS):
        return None
    match {key: value for key, value in schema.items() if key not in ANNOTATIONS}:
        case {"$ref": str(reference), **rest} if not rest:
            return _plain(referred(reference, root), root, depth + 1)
        case {"allOf": [part], **rest} | {"anyOf": [part], **rest} | {"oneOf": [part], **rest} if not rest:
            return _plain(part, root, depth + 1)
        case {"anyOf": [first, second], **rest} | {"oneOf": [first, second], **rest} if not rest:
            options = [part for part in (first, second) if not _is_null(part)]
            found = _plain(options[0], root, depth + 1) if len(options) == 1 else None
            return None if found is None else PlainString(found.schema, nullable=True)
    kinds = kinds_of(schema, root)
    if STRING not in kinds or not kinds <= {STRING, NULL} or not schema.keys() <= _PLAIN_KEYS:
        return None
    own = {key: value for key, value in schema.items() if key not in ("type", "nullable")}
    if not isinstance(own.get("enum", []), list):
        return None
    if "enum" in own:
        own["enum"] = [value for value in own["enum"] if value is not None]
    values = [*own.get("enum", []), *([own["const"]] if "const" in own else [])]
    return PlainString(own, NULL in kinds) if all(isinstance(value, str) for value in values) else None


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and (schema.get("type") == "null" or schema.get("const", 0) is None)
