"""The grammar of calls in Qwen3-Coder's form, whose arguments have tags of their own.

A plain string stands there as it is, and any other value as JSON. Where parameters cannot have tags, because of their
names or because the schema says more than a list of parameters, the arguments are one JSON object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdserve.api.call_grammars.rules import CallForm, MarkerTokens, RuleBook, quoted, tagged_form
from pdserve.api.call_grammars.schema_parts import Member, SchemaParts, argument_schema, members
from pdserve.api.message.tool_schemas import PlainString, SchemaKinds, ToolSchema
from pdserve.api.message.xml_calls import FUNCTION_END, PARAMETER_END, PARAMETER_NAME, QWEN_XML, plain_text

_VALUE_END = quoted(f"\n{PARAMETER_END}\n")
_ANY_NAME = r"/[^<>\s]{1,64}/"


def xml_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    book = RuleBook()
    book.define("call", " | ".join(_call(tool, book, forced=forced) for tool in tools))
    form = tagged_form(QWEN_XML, tuple(book.lines), tokens)
    # The parser takes it for the beginning of a call also without a marker before it.
    shut_out = (*form.triggers.shut_out, quoted(QWEN_XML.unwrapped))
    return replace(form, triggers=replace(form.triggers, shut_out=shut_out))


def _call(tool: ToolSchema, book: RuleBook, *, forced: bool) -> str:
    schema = argument_schema(tool, forced=forced)
    parts = SchemaParts(schema, lenient=not tool.strict)
    head = quoted(f"<function={tool.name}>\n")
    return f"{head} {_arguments(schema, parts, book)} {quoted(FUNCTION_END)}"


def _arguments(schema: dict[str, Any], parts: SchemaParts, book: RuleBook) -> str:
    if schema == {"type": "object"}:
        return rf'("<parameter=" {_ANY_NAME} ">\n" {book.terminal(_text("(?s:.*)"))})*'
    listed = members(schema)
    if listed is not None and parts.divisible and all(PARAMETER_NAME.fullmatch(member.name) for member in listed):
        texts = _PlainTexts(schema)
        return " ".join(_parameter(member, texts, parts, book) for member in listed)
    return f'{parts.whole()} "\\n"'


class _PlainTexts:
    """The terminals of plain strings. Many parameters may refer to one that has thousands of values."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        """``root`` is the schema of the parameters' function."""
        self._kinds = SchemaKinds(root)
        self._known: dict[tuple[int, bool], str | None] = {}
        """By the ``id`` of the keywords of a string, which ``_kinds`` keeps, and whether it may be null."""

    def of(self, schema: object) -> str | None:
        """Returns the terminal of a string that stands there as it is, with its end; None for other values."""
        string = self._kinds.plain_string(schema)
        if string is None:
            return None
        key = id(string.schema), string.nullable
        if key not in self._known:
            plain = plain_text(schema, self._kinds)
            self._known[key] = None if plain is None else _plain(plain)
        return self._known[key]


def _parameter(member: Member, texts: _PlainTexts, parts: SchemaParts, book: RuleBook) -> str:
    value = texts.of(member.schema)
    written = f"{book.rule(parts.part(member.schema))} {_VALUE_END}" if value is None else book.terminal(value)
    head = quoted(f"<parameter={member.name}>\n")
    return f"{head} {written}" if member.required else f"({head} {written})?"


def _plain(string: PlainString) -> str | None:
    """Returns the terminal of a string, or null, with its end; None if no string fits, or the schema is none."""
    schema = string.schema
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    counts = [least] if most is None else [least, most]
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts):
        return None
    if most is not None and most < least:
        return None
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        fitting = [
            value
            for value in values
            if schema.get("const", value) == value and least <= len(value) <= (len(value) if most is None else most)
        ]
        fitting += ["null"] if string.nullable else []
        return f"({' | '.join(map(quoted, fitting))}) {_VALUE_END}" if fitting else None
    text = _text(f"(?s:.{{{least},{'' if most is None else most}}})" if counts != [0] else "(?s:.*)")
    return f'{text} | "null" {_VALUE_END}' if string.nullable else text


def _text(regex: str) -> str:
    """Returns the terminal of a text that does not end before its end."""
    return f"(/{regex}/ & ~(/(?s:.*)/ {quoted(PARAMETER_END)} /(?s:.*)/)) {_VALUE_END}"
