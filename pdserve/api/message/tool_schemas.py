"""The functions that an answer may call, as the parsers and the grammars of calls see them.

``SchemaKinds`` finds which kinds of JSON values the schema of an argument admits, and which schemas admit plain strings
alone. A schema that cannot be followed, such as a reference to nothing, admits every kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pdserve.grammars import referred

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
"""How many schemas are looked at for all parameters of one function. Of what is behind them, every kind is admitted."""
STEP_ITEMS: Final = 16
"""So many values or keywords of a schema take the time of one step."""
MAX_VALUES: Final = 4_096
"""A string with more values than these is written as JSON."""
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


@dataclass(frozen=True, slots=True)
class PlainString:
    """What a schema says that admits strings, and perhaps null, and nothing that a text cannot show."""

    schema: Mapping[str, Any]
    """The keywords of the strings: bounds of their length, and their values."""
    nullable: bool = False


class _TooMuch(Exception):
    """A schema has more parts than are looked at."""


class SchemaKinds:
    """Looks at the schemas of one function.

    Any number of parameters may refer to one part, and a part to itself. So what is known of a part is cached, and the
    steps are counted for all parameters together.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        """``root`` has all schemas that are asked for, and what their references are in. It must not change."""
        self._root = root
        self._followed: list[str] = []
        """The references that lead to where it looks now. One that leads to itself admits nothing more."""
        self._cuts = 0
        """How many references led to themselves."""
        self._steps = 0
        self._known: dict[int, frozenset[str]] = {}
        """The kinds of schemas, by their ``id``, which do not depend on where a reference to them came from."""
        self._plain: dict[int, PlainString | None] = {}

    def of(self, schema: Any) -> frozenset[str]:
        """Returns the kinds that ``schema`` admits."""
        try:
            return self._of(schema) or KINDS
        except (_TooMuch, RecursionError):
            return KINDS

    def plain_string(self, schema: Any) -> PlainString | None:
        """Returns what a schema says of strings; None if it admits other kinds, or says more than a text shows."""
        try:
            return self._plain_string(schema)
        except RecursionError:
            return None

    def _step(self, items: int) -> None:
        self._steps += 1 + items // STEP_ITEMS
        if self._steps > MAX_STEPS:
            raise _TooMuch

    def _of(self, schema: Any) -> frozenset[str]:
        if schema is False:
            return _NOTHING
        if not isinstance(schema, dict):
            return KINDS
        kinds = self._known.get(id(schema))
        if kinds is None:
            cuts = self._cuts
            kinds = self._find(schema)
            if self._cuts == cuts:
                self._known[id(schema)] = kinds
        return kinds

    def _find(self, schema: dict[str, Any]) -> frozenset[str]:
        values, names = schema.get("enum"), schema.get("type")
        self._step(sum(len(listed) for listed in (values, names) if isinstance(listed, list)))
        kinds = _types(names)
        if schema.get("nullable") is True:
            kinds |= {NULL}
        if "const" in schema:
            kinds &= {kind_of(schema["const"])}
        if isinstance(values, list):
            kinds &= set(map(kind_of, values))
        if isinstance(reference := schema.get("$ref"), str):
            kinds &= self._referred(reference)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(keyword), list):
                kinds &= _union(map(self._of, choices))
        if isinstance(parts := schema.get("allOf"), list):
            for part in parts:
                kinds &= self._of(part)
        if "if" in schema:
            then = self._of(schema["if"]) & self._of(schema.get("then", True))
            kinds &= then | self._of(schema.get("else", True))
        return kinds - self._ruled_out(schema.get("not"))

    def _referred(self, reference: str) -> frozenset[str]:
        if reference in self._followed:
            self._cuts += 1
            return _NOTHING
        self._followed.append(reference)
        try:
            return self._of(referred(reference, self._root))
        finally:
            self._followed.pop()

    def _ruled_out(self, schema: Any) -> frozenset[str]:
        """Returns the kinds of which ``schema`` admits every value, so that its negation admits none."""
        if schema is True:
            return KINDS
        if not isinstance(schema, dict):
            return _NOTHING
        names = schema.get("type")
        self._step(len(schema) + (len(names) if isinstance(names, list) else 0))
        match _keywords(schema):
            case {"type": names, **rest} if not rest:
                return _types(names)
            case {"const": None, **rest} | {"enum": [None], **rest} if not rest:
                return frozenset({NULL})
            case {"anyOf": list(choices), **rest} if not rest:
                return _union(map(self._ruled_out, choices))
            case {**rest} if not rest:
                return KINDS
        return _NOTHING

    def _plain_string(self, schema: Any) -> PlainString | None:
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._plain:
            self._plain[id(schema)] = None  # what refers to itself alone says nothing
            self._plain[id(schema)] = self._find_plain(schema)
        return self._plain[id(schema)]

    def _find_plain(self, schema: dict[str, Any]) -> PlainString | None:
        match _keywords(schema):
            case {"$ref": str(reference), **rest} if not rest:
                return self._plain_string(referred(reference, self._root))
            case {"allOf": [part], **rest} | {"anyOf": [part], **rest} | {"oneOf": [part], **rest} if not rest:
                return self._plain_string(part)
            case {"anyOf": [first, second], **rest} | {"oneOf": [first, second], **rest} if not rest:
                options = [part for part in (first, second) if not _is_null(part)]
                found = self._plain_string(options[0]) if len(options) == 1 else None
                return None if found is None else PlainString(found.schema, nullable=True)
        kinds = self.of(schema)
        if STRING not in kinds or not kinds <= {STRING, NULL} or not schema.keys() <= _PLAIN_KEYS:
            return None
        own = {key: value for key, value in schema.items() if key not in ("type", "nullable")}
        values = own.get("enum", [])
        if not isinstance(values, list) or len(values) > MAX_VALUES:
            return None
        if "enum" in own:
            own["enum"] = [value for value in values if value is not None]
        values = [*own.get("enum", []), *([own["const"]] if "const" in own else [])]
        return PlainString(own, NULL in kinds) if all(isinstance(value, str) for value in values) else None


def _keywords(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in ANNOTATIONS}


def _union(kinds: Iterable[frozenset[str]]) -> frozenset[str]:
    return _NOTHING.union(*kinds)


def _types(names: Any) -> frozenset[str]:
    if names is None:
        return KINDS
    listed = names if isinstance(names, list) else [names]
    return _union(_TYPES.get(name, _NOTHING) if isinstance(name, str) else _NOTHING for name in listed)


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and (schema.get("type") == "null" or schema.get("const", 0) is None)


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """One function."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The JSON Schema of its arguments, which are an object."""
    strict: bool = False
    """Whether every call has to follow the schema."""
    values: SchemaKinds = field(init=False, repr=False, compare=False)
    """What the parameters' schemas admit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", SchemaKinds(self.parameters))

    def __deepcopy__(self, memo: dict[int, object]) -> ToolSchema:
        """Returns itself: nobody changes a schema."""
        return self

    def parameter(self, name: str) -> Any:
        """Returns the schema of a parameter; None if the function's schema has none for it."""
        properties = self.parameters.get("properties")
        return properties.get(name) if isinstance(properties, dict) else None

    def kinds(self, parameter: str) -> frozenset[str]:
        """Returns the kinds of values that a parameter may have."""
        return self.values.of(True if (schema := self.parameter(parameter)) is None else schema)
