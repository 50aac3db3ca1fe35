"""The grammars of calls that are JSON objects: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.api.call_grammars.rules import SPACES, CallForm, MarkerTokens, RuleBook, marker, quoted, triggers_of
from pdserve.api.call_grammars.schema_parts import SchemaParts, argument_schema
from pdserve.api.message.call_parser import CallMarkers
from pdserve.api.message.json_calls import HERMES, LLAMA_JSON, MISTRAL
from pdserve.api.message.tool_schemas import ToolSchema


def hermes_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    return tagged_form(HERMES, _rules(tools, "arguments", forced=forced), tokens)


def tagged_form(markers: CallMarkers, rules: tuple[str, ...], tokens: MarkerTokens) -> CallForm:
    """Returns the form of calls each of which has lines with tags around it."""
    opening, closing = marker(markers.openings[0], tokens), marker(markers.closing, tokens)
    return CallForm(
        rules,
        triggers_of(markers.openings, tokens, in_letters=True),
        opening,
        entry='"\\n"',
        between=f'"\\n" {closing} "\\n" {opening} "\\n"',
        closing=f'"\\n" {closing}',
    )


def llama_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    return CallForm(
        _rules(tools, "parameters", forced=forced),
        triggers_of(LLAMA_JSON.openings, tokens, in_letters=False),
        between='"; "',
        bare_call="call",
        not_first=f"{SPACES} {quoted(LLAMA_JSON.bare)}",
        text_follows=False,
    )


def mistral_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    """Returns the form of models whose vocabulary has a token between name and arguments, or the older one."""
    opening = marker(MISTRAL.openings[0], tokens)
    triggers = triggers_of(MISTRAL.openings, tokens, in_letters=True)
    if not tokens.has(MISTRAL.inner[0]):
        rules = _rules(tools, "arguments", forced=forced)
        return CallForm(rules, triggers, opening, '"["', '", "', '"]"', text_follows=False)
    rules = _rules(tools, "", forced=forced, between=marker(MISTRAL.inner[0], tokens))
    return CallForm(rules, triggers, opening, between=opening, text_follows=False)


def _rules(tools: Sequence[ToolSchema], arguments: str, *, forced: bool, between: str = "") -> tuple[str, ...]:
    """Returns the rules of calls. ``between`` stands between a name and its arguments where these have no names."""
    book = RuleBook()
    book.define("call", " | ".join(_call(tool, arguments, between, forced=forced) for tool in tools))
    return tuple(book.lines)


def _call(tool: ToolSchema, arguments: str, between: str, *, forced: bool) -> str:
    parts = SchemaParts(argument_schema(tool, forced=forced), lenient=not tool.strict)
    if between:
        return f"{quoted(tool.name)} {between} {parts.whole()}"
    head = f'{{"name": {quoted(tool.name)}, "{arguments}": '
    return f'{quoted(head)} {parts.whole()} "}}"'
