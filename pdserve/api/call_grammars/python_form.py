"""The grammars of calls that are written as in Python: Llama 3.2 and 4, Gemma.

Arguments have their names before them. Where they cannot, because of the names or because the schema says more than a
list of parameters, they are one dictionary in JSON: ``f(**{"a b": 1})``.

``PythonLiterals`` writes a schema as a grammar of Python's words, lists and dictionaries. A schema with other keywords
than those that are known here, such as ``oneOf`` or ``patternProperties``, is JSON. The parser of Python calls reads
JSON as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pdserve.api.call_grammars.rules import (
    NUMBER,
    SPACES,
    STRING,
    CallForm,
    MarkerTokens,
    RuleBook,
    marker,
    one_of,
    quoted,
    triggers_of,
)
from pdserve.api.call_grammars.schema_parts import Member, SchemaParts, argument_schema, members
from pdserve.api.message.python_calls import GEMMA, PYTHONIC
from pdserve.api.message.tool_schemas import ANNOTATIONS, ToolSchema

MAX_COUNT = 1_000_000
"""A list of more items is left to the compiler of JSON, which takes any number."""
_ARRAY_KEYS = ANNOTATIONS | {"type", "items", "minItems", "maxItems"}
_MAP_KEYS = ANNOTATIONS | {"type", "additionalProperties"}
_KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")


class PythonLiterals:
    """The literals of one function's arguments, whose schema is divisible."""

    def __init__(self, parts: SchemaParts, rules: RuleBook) -> None:
        self._parts = parts
        self._rules = rules
        self._definitions: dict[str, str] = {}
        """The names of the rules of definitions, by reference."""

    def value(self, schema: Any) -> str:
        """Returns the expression of a value."""
        if schema is True or (isinstance(schema, dict) and schema.keys() <= ANNOTATIONS):
            return any_literal(self._rules)
        if isinstance(schema, dict) and (native := self._native(schema)) is not None:
            return native
        if isinstance(schema, dict):
            schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        return self._rules.rule(self._parts.part(schema))

    def items(self, listed: Sequence[Member], keys: Sequence[str], closing: str) -> str:
        """Returns the expression of members in their order, those that are not required perhaps left out.

        ``keys`` has what stands before each value, and ``closing`` stands behind the last.
        """
        written = [f"{quoted(key)} {self.value(member.schema)}" for key, member in zip(keys, listed, strict=True)]
        first, later = quoted(closing), quoted(closing)
        for member, item in reversed(list(zip(listed, written, strict=True))):
            after = self._rules.rule(later)
            following = f'", " {item} {after}'
            beginning = f"{item} {after}"
            first = beginning if member.required else f"{beginning} | {self._rules.rule(first)}"
            later = following if member.required else f"{following} | {after}"
        return self._rules.rule(first)

    def _native(self, schema: dict[str, Any]) -> str | None:
        """Returns the expression in Python's own form; None if there is none."""
        keys = schema.keys() - ANNOTATIONS
        kinds = schema.get("type")
        if isinstance(kinds, list):
            # Each kind once. Two of the same would double the work at every level below.
            if not kinds or not all(kind in _KINDS for kind in kinds):
                return None
            kinds = [kind for kind in _KINDS if kind in kinds]
            schema = {**schema, "type": kinds}
        if keys == {"$ref"}:
            return self._definition(schema["$ref"])
        if keys == {"const"}:
            return quoted(_literal(schema["const"]))
        if keys == {"anyOf"} and isinstance(schema["anyOf"], list) and schema["anyOf"]:
            return self._rules.rule(" | ".join(map(self.value, schema["anyOf"])))
        if isinstance(schema.get("enum"), list) and schema["enum"] and keys <= {"enum", "type"}:
            return self._enumerated(schema["enum"], schema.get("type"))
        if isinstance(kinds, list):
            return self._rules.rule(" | ".join(self.value({**schema, "type": kind}) for kind in kinds))
        return self._of_type(kinds, schema)

    def _definition(self, reference: str) -> str:
        if reference not in self._definitions:
            name = self._definitions[reference] = self._rules.new_name()
            self._rules.define(name, self.value(self._parts.definition(reference)))
        return self._definitions[reference]

    def _enumerated(self, values: list[Any], kind: Any) -> str | None:
        kinds = kind if isinstance(kind, list) else [kind]
        fitting = [value for value in values if kind is None or any(_is_of(value, one) for one in kinds)]
        return self._rules.terminal(" | ".join(quoted(_literal(value)) for value in fitting)) if fitting else None

    def _of_type(self, kind: Any, schema: dict[str, Any]) -> str | None:
        match kind:
            case "boolean" if schema.keys() <= ANNOTATIONS | {"type"}:
                return '("True" | "False")'
            case "null" if schema.keys() <= ANNOTATIONS | {"type"}:
                return '"None"'
            case "array" if schema.keys() <= _ARRAY_KEYS:
                return self._array(schema)
            case "object" if schema.keys() <= _MAP_KEYS and schema.get("additionalProperties", True) is not False:
                inner = self.value(schema.get("additionalProperties", True))
                return self._rules.rule(_dictionary(inner, self._rules.rule(STRING)))
            case "object" if (listed := members(schema)) is not None:
                return f'"{{" {self.items(listed, [f"{_literal(member.name)}: " for member in listed], "}")}'
        return None

    def _array(self, schema: dict[str, Any]) -> str | None:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not _is_count(least) or not (most is None or (_is_count(most) and most >= max(least, 1))):
            return None
        if max(least, most or 0) > MAX_COUNT:
            return None
        item = self.value(schema.get("items", True))
        bounds = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        listed = f'{item} (", " {item}){bounds}'
        return self._rules.rule(f'"[" {listed} "]"' if least else f'"[" ({listed})? "]"')


def any_literal(rules: RuleBook) -> str:
    """Returns the expression of any literal."""
    literal = "any_literal"
    if not rules.has(literal):
        text, number = rules.rule(STRING), rules.rule(NUMBER)
        listed = f'"[" ({literal} (", " {literal})*)? "]"'
        choices = (text, number, '"True"', '"False"', '"None"', listed, _dictionary(literal, text))
        rules.define(literal, " | ".join(choices))
    return literal


def _dictionary(value: str, text: str) -> str:
    """Returns the expression of a dictionary of any keys, which are ``text``."""
    pair = f'{text} ": " {value}'
    return f'"{{" ({pair} (", " {pair})*)? "}}"'


def _literal(value: Any) -> str:
    """Returns the literal of a value that has been read from JSON."""
    match value:
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case dict():
            return f"{{{', '.join(f'{_literal(key)}: {_literal(inner)}' for key, inner in value.items())}}}"
        case str():
            return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _is_of(value: Any, kind: Any) -> bool:
    match kind:
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return _is_of(value, "number") and (isinstance(value, int) or value.is_integer())
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return False


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_ANY_KEYWORD = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_OPEN_LIST = r"/\s{0,8}\[/"
_LIST_START = r"/\[[ \t\r\n,;\[\]]*/"
"""What the parser passes over between the beginning of an answer and a call."""


def pythonic_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    book = _book(tools, forced=forced)
    for number, tool in enumerate(tools):
        book.define(f"OPENED_{number}", f"{_OPEN_LIST} {_head(tool)}")
    book.define("opened", " | ".join(f"OPENED_{number} arguments_{number}" for number in range(len(tools))))
    return CallForm(
        tuple(book.lines),
        triggers_of(PYTHONIC.openings, tokens, in_letters=False),
        entry='"["',
        between='", "',
        closing='"]"',
        bare_call="opened",
        not_first=_list_start(tools),
        text_follows=False,
    )


def gemma_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    return CallForm(
        tuple(_book(tools, forced=forced).lines),
        triggers_of(GEMMA.openings, tokens, in_letters=True),
        opening=marker(GEMMA.openings[0], tokens),
        entry='"\\n"',
        between='"\\n"',
        closing=f'"\\n" {marker(GEMMA.closing, tokens)}',
        not_first=_list_start(tools),
    )


def _book(tools: Sequence[ToolSchema], *, forced: bool) -> RuleBook:
    book = RuleBook()
    for number, tool in enumerate(tools):
        book.define(f"arguments_{number}", _arguments(tool, book, forced=forced))
    book.define("call", " | ".join(f"{_head(tool)} arguments_{number}" for number, tool in enumerate(tools)))
    return book


def _head(tool: ToolSchema) -> str:
    return quoted(f"{tool.name}(")


def _list_start(tools: Sequence[ToolSchema]) -> str:
    """Returns the terminal of what the parser takes for the beginning of calls where it begins an answer."""
    return f"{SPACES} {_LIST_START} {one_of(map(_head, tools))}"


def _arguments(tool: ToolSchema, book: RuleBook, *, forced: bool) -> str:
    """Returns the expression of what stands behind the opening bracket, the closing one included."""
    schema = argument_schema(tool, forced=forced)
    if schema == {"type": "object"}:
        argument = f'{_ANY_KEYWORD} "=" {any_literal(book)}'
        return f'({argument} (", " {argument})*)? ")"'
    parts = SchemaParts(schema, lenient=not tool.strict)
    listed = members(schema)
    if listed is not None and parts.divisible and all(_KEYWORD.fullmatch(member.name) for member in listed):
        return PythonLiterals(parts, book).items(listed, [f"{member.name}=" for member in listed], ")")
    return f'"**" {parts.whole()} ")"'
