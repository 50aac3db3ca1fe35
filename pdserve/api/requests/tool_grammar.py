"""Makes the grammar of answers that have to call functions, and of calls that have to follow a schema.

The grammar has the form that the model writes by itself, so that a forced call reads to the model as its own. Names
come from clients and are plain words; schemas go into the grammar as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.api.message.json_calls import HERMES, LLAMA_JSON, MISTRAL
from pdserve.api.message.reasoning import ReasoningMarkers, ReasoningStart
from pdserve.api.message.tool_schemas import ToolSchema
from pdserve.api.requests.answer_reading import AnswerReading
from pdserve.config import ToolFormat
from pdserve.errors import InvalidRequest
from pdserve.wire.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

SpecialId = Callable[[str], int | None]
"""Returns the id of the special token that has a text; None if no special token has it."""

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How the arguments are written: as Python's json does, which models are trained on."""


@dataclass(frozen=True, slots=True)
class _CallForm:
    """What stands around the calls of a format. Each part is an expression of the grammar."""

    opening: str
    """What stands before the first call."""
    between: str
    closing: str
    trigger: str
    """The marker that begins ``opening`` where text comes before it; empty if there is none."""
    arguments: str = "arguments"
    named: str = ""
    """What stands between a name and its arguments, in the format that has names without quotes."""


def tool_grammar(reading: AnswerReading, prompt_ending: str, special_id: SpecialId) -> Grammar | None:
    """Returns the grammar of the answers to a prompt that ends so; None if calls may be anything.

    Raises InvalidRequest if the functions take more room than a grammar may have.
    """
    tools = reading.tools
    strict = any(schema.strict for schema in tools.callable.values())
    form = _form(reading.formats.calls, special_id)
    if form is None or not (tools.forced or strict):
        return None
    lines = [*_start(form, forced=tools.forced, parallel=tools.parallel), *_calls(reading, form)]
    markers = reading.formats.reasoning_markers
    thinking = [] if markers is None else _thinking(markers, reading.formats.reasoning_start(prompt_ending), special_id)
    text = "\n".join([f"start: {'thinking ' if thinking else ''}answer", *thinking, *lines, ""])
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"'tools' that have to be called as they say may have {MAX_GRAMMAR_BYTES} bytes together", param="tools"
        )
    return Grammar(GrammarKind.LARK, text)


def _form(calls: ToolFormat, special_id: SpecialId) -> _CallForm | None:
    def marker(text: str) -> str:
        token_id = special_id(text)
        return _quoted(text) if token_id is None else f"<[{token_id}]>"

    match calls:
        case ToolFormat.HERMES:
            opening, closing = marker(HERMES.openings[0]), marker(HERMES.closing)
            return _CallForm(f'{opening} "\\n"', f'"\\n" {closing} "\\n" {opening} "\\n"', f'"\\n" {closing}', opening)
        case ToolFormat.LLAMA_JSON:
            tag = special_id(LLAMA_JSON.openings[0])
            return _CallForm("", '"; "', "", "" if tag is None else f"<[{tag}]>", arguments="parameters")
        case ToolFormat.MISTRAL:
            opening = marker(MISTRAL.openings[0])
            if special_id(MISTRAL.inner[0]) is not None:
                return _CallForm(opening, opening, "", opening, named=marker(MISTRAL.inner[0]))
            return _CallForm(f'{opening} "["', '", "', '"]"', opening)
    return None


def _start(form: _CallForm, *, forced: bool, parallel: bool) -> Iterator[str]:
    """Yields the rules of an answer. Where calls are not forced, text comes before, between and behind them."""
    calls = f"{form.opening} call {f'({form.between} call)* ' if parallel else ''}{form.closing}"
    if forced:
        yield f"answer: {calls}"
        return
    # An object at the beginning of the answer is a call, if none has a marker. So other text does not begin with one.
    yield "TEXT: /(?s:.*)/" if form.opening else r"TEXT: /(\s*[^{\s](?s:.*))?/"
    if not form.trigger:
        yield f"answer: TEXT | {calls}"
        return
    yield f"head: TEXT {form.trigger}" if form.trigger.startswith("<[") else f"head[lazy]: TEXT {form.trigger}"
    yield f"region: head {calls.removeprefix(form.trigger).lstrip()}"
    yield "answer: region* TEXT" if form.opening else f"answer: region* TEXT | {calls}"


def _calls(reading: AnswerReading, form: _CallForm) -> Iterator[str]:
    schemas = list(reading.tools.callable.values())
    yield "call: " + " | ".join(f"call_{number}" for number in range(len(schemas)))
    for number, schema in enumerate(schemas):
        arguments = f"%json {_arguments(schema, forced=reading.tools.forced)}"
        if form.named:
            yield f"call_{number}: {_quoted(schema.name)} {form.named} {arguments}"
        else:
            head = f'{{"name": {_quoted(schema.name)}, "{form.arguments}": '
            yield f'call_{number}: {_quoted(head)} {arguments} "}}"'


def _arguments(schema: ToolSchema, *, forced: bool) -> str:
    """Returns the schema of a call's arguments. A call that is neither forced nor strict may have any."""
    parameters: dict[str, Any] = dict(schema.parameters)
    if not (forced or schema.strict):
        parameters = {"type": "object"}
    elif not parameters:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    elif not parameters.keys() & {"type", "$ref", "anyOf", "allOf", "oneOf"}:
        parameters["type"] = "object"
    return json.dumps({**parameters, "x-guidance": {**_COMPACT, "lenient": not schema.strict}})


def _thinking(markers: ReasoningMarkers, start: ReasoningStart, special_id: SpecialId) -> list[str]:
    """Returns the rules of reasoning, which may have any text. There are none where the prompt has ended it."""
    if start is ReasoningStart.BEHIND:
        return []
    opening, closing = special_id(markers.opening), special_id(markers.closing)
    if closing is None:
        thoughts = [f"thoughts[suffix={_quoted(markers.closing)}]: /(?s:.*)/"]
    else:
        thoughts = [f"thoughts: /(?s:.*)/ <[{closing}]>"]
    inside = r"thoughts /\s{0,4}/"
    if start is ReasoningStart.BEFORE:
        inside = f"({_quoted(markers.opening) if opening is None else f'<[{opening}]>'} {inside})?"
    return [f"thinking: {inside}", *thoughts]


def _quoted(text: str) -> str:
    return json.dumps(text)
