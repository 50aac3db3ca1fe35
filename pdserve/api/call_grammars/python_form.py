"""The grammars of calls that are written as in Python: Llama 3.2 and 4, Gemma.

Arguments have their names before them. Where they cannot, because of the names or because the schema says more than a
list of parameters, they are one dictionary in JSON: ``f(**{"a b": 1})``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pdserve.api.call_grammars.call_form import CallForm, MarkerTokens, marker, triggers_of
from pdserve.api.call_grammars.python_literals import PythonLiterals, any_literal
from pdserve.api.call_grammars.rules import SPACES, RuleBook, one_of, quoted
from pdserve.api.call_grammars.schema_parts import SchemaParts, argument_schema, members
from pdserve.api.message.python_calls import GEMMA, PYTHONIC
from pdserve.api.message.tool_schemas import ToolSchema

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
