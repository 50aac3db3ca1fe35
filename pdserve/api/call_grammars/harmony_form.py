"""The grammars of answers in the Harmony format: what they bind is one message, behind the reasoning.

A call that is forced, or has to follow its schema, is a message to the function. An answer with a structure of its own
has that in the message of the channel ``final``. Reasoning is free: as many messages of the channel ``analysis`` as the
model writes. Where a vocabulary has a token for a marker, no text has its letters, as the parser would see it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.api.call_grammars.rules import MarkerTokens, marker, one_of, quoted
from pdserve.api.call_grammars.schema_parts import SchemaParts, argument_schema
from pdserve.api.message.harmony import (
    ANALYSIS,
    ASSISTANT,
    BODY_ENDS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    RECIPIENT,
    START,
    Section,
    begun,
    section_of,
)
from pdserve.api.message.tool_schemas import ToolSchema
from pdserve.wire.sampling_params import STRUCTURE


def forced_calls(tools: Sequence[ToolSchema], prompt: str, tokens: MarkerTokens, *, parallel: bool) -> str:
    """Returns the grammar of an answer to ``prompt`` that calls functions."""
    more = f" ({_next(tokens)} thoughts call)*" if parallel else ""
    answer = f"start: {_opening(prompt, tokens)} thoughts call{more}"
    return _lines([answer, *_free(tokens, ANALYSIS), *_calls(tools, tokens, forced=True)])


def strict_calls(tools: Sequence[ToolSchema], prompt: str, tokens: MarkerTokens, *, parallel: bool) -> str:
    """Returns the grammar of an answer to ``prompt`` that may call functions, and if it does, as they say."""
    more = f" ({_next(tokens)} thoughts call)*" if parallel else ""
    said = f"{marker(CHANNEL, tokens)} {quoted(FINAL)} {marker(MESSAGE, tokens)} TEXT"
    message = f"thoughts ({said} | call{more})"
    if section_of(prompt) is Section.CONTENT:
        answer = f"start: TEXT | said {_next_role(tokens)} {message}"
    else:
        answer = f"start: {_opening(prompt, tokens)} {message}"
    return _lines([answer, *_free(tokens, ANALYSIS, COMMENTARY), *_calls(tools, tokens, forced=False)])


def before_structure(prompt: str, tokens: MarkerTokens) -> str:
    """Returns the rules of an answer to ``prompt`` with a structure.

    They are empty if the prompt ends within the message that has it.
    """
    if section_of(prompt) is Section.CONTENT:
        return ""
    head = f"{marker(CHANNEL, tokens)} {quoted(FINAL)} {marker(MESSAGE, tokens)}"
    answer = f"start: {_opening(prompt, tokens)} thoughts {head} @{STRUCTURE}"
    return _lines([answer, *_free(tokens, ANALYSIS)])


def _lines(rules: Sequence[str]) -> str:
    return "\n".join([*rules, ""])


def _next_role(tokens: MarkerTokens) -> str:
    """Returns the expression of what stands between the end of one message and the channel of the next."""
    return f"{marker(START, tokens)} {quoted(ASSISTANT)}"


def _next(tokens: MarkerTokens) -> str:
    return f"{marker(END, tokens)} {_next_role(tokens)}"


def _opening(prompt: str, tokens: MarkerTokens) -> str:
    """Returns the expression of what stands before the first channel that the answer names."""
    match section_of(prompt):
        case Section.REASONING:
            return f"said {_next_role(tokens)}"
        case Section.HEADER:
            return "" if begun(prompt) else _next_role(tokens)
    return _next(tokens)


def _free(tokens: MarkerTokens, *channels: str) -> Iterator[str]:
    """Yields the rules of any number of messages in one of these channels."""
    head = f"{marker(CHANNEL, tokens)} {one_of(map(quoted, channels))} {marker(MESSAGE, tokens)}"
    end = marker(END, tokens)
    yield "ANY: /(?s:.*)/"
    yield f"TEXT: ANY & ~(ANY {one_of(map(quoted, BODY_ENDS))} ANY)"
    yield f"said{'[lazy]' if end == quoted(END) else ''}: TEXT {end}"
    yield f"thoughts: ({head} said {_next_role(tokens)})*"


def _calls(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> Iterator[str]:
    """Yields the rules of one call. The models have learned both places of the recipient."""
    channel, message, json = marker(CHANNEL, tokens), marker(MESSAGE, tokens), quoted("json")
    tail = f'" "? ({marker(CONSTRAIN, tokens)})? {json} {message}'
    yield "call: " + " | ".join(f"call_{number}" for number in range(len(tools)))
    for number, tool in enumerate(tools):
        recipient = f" {RECIPIENT}{FUNCTIONS}{tool.name}"
        parts = SchemaParts(argument_schema(tool, forced=forced), lenient=not tool.strict)
        heads = f"{channel} {quoted(COMMENTARY + recipient)} | {quoted(recipient)} {channel} {quoted(COMMENTARY)}"
        yield f"call_{number}: ({heads}) {tail} {parts.whole()}"
