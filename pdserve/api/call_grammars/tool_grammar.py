"""Makes the grammar of answers that have to call functions, and of calls that have to follow a schema.

The grammar has the form that the model writes by itself, so that a forced call reads to the model as its own. What the
parser would take for a call is one in the grammar as well, wherever it stands in an answer that need not be calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdserve.api.call_grammars.python_form import gemma_form, pythonic_form
from pdserve.api.call_grammars.rules import (
    SPACES,
    CallForm,
    MarkerTokens,
    RuleBook,
    SpecialId,
    TextToken,
    marker,
    no_token,
    one_of,
    quoted,
    tagged_form,
    triggers_of,
)
from pdserve.api.call_grammars.schema_parts import SchemaParts, argument_schema
from pdserve.api.call_grammars.xml_form import xml_form
from pdserve.api.message.json_calls import HERMES, LLAMA_JSON, MISTRAL
from pdserve.api.message.reasoning import ReasoningMarkers, ReasoningStart
from pdserve.api.message.tool_schemas import ToolSchema
from pdserve.api.requests.answer_reading import AnswerReading
from pdserve.config import ToolFormat
from pdserve.errors import InvalidRequest
from pdserve.wire.sampling_params import MAX_GRAMMAR_BYTES, Grammar, GrammarKind


def hermes_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    return tagged_form(HERMES, _json_rules(tools, "arguments", forced=forced), tokens)


def llama_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    return CallForm(
        _json_rules(tools, "parameters", forced=forced),
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
        rules = _json_rules(tools, "arguments", forced=forced)
        return CallForm(rules, triggers, opening, '"["', '", "', '"]"', text_follows=False)
    rules = _json_rules(tools, "", forced=forced, between=marker(MISTRAL.inner[0], tokens))
    return CallForm(rules, triggers, opening, between=opening, text_follows=False)


def _json_rules(tools: Sequence[ToolSchema], arguments: str, *, forced: bool, between: str = "") -> tuple[str, ...]:
    """Returns the rules of calls. ``between`` stands between a name and its arguments where these have no names."""
    book = RuleBook()
    book.define("call", " | ".join(_json_call(tool, arguments, between, forced=forced) for tool in tools))
    return tuple(book.lines)


def _json_call(tool: ToolSchema, arguments: str, between: str, *, forced: bool) -> str:
    parts = SchemaParts(argument_schema(tool, forced=forced), lenient=not tool.strict)
    if between:
        return f"{quoted(tool.name)} {between} {parts.whole()}"
    head = f'{{"name": {quoted(tool.name)}, "{arguments}": '
    return f'{quoted(head)} {parts.whole()} "}}"'


_FORMS = {
    ToolFormat.HERMES: hermes_form,
    ToolFormat.QWEN_XML: xml_form,
    ToolFormat.LLAMA_JSON: llama_form,
    ToolFormat.PYTHONIC: pythonic_form,
    ToolFormat.MISTRAL: mistral_form,
    ToolFormat.GEMMA: gemma_form,
}


def tool_grammar(
    reading: AnswerReading, prompt_ending: str, special_id: SpecialId, is_text: TextToken = no_token
) -> Grammar | None:
    """Returns the grammar of the answers to a prompt that ends so; None if calls may be anything.

    ``special_id`` and ``is_text`` tell of the tokens that the vocabulary has for markers, as ``MarkerTokens`` says.
    Raises InvalidRequest if the functions take more room than a grammar may have.
    """
    tools, make = reading.tools, _FORMS.get(reading.formats.calls)
    functions = list(tools.callable.values())
    if make is None or not (tools.forced or any(function.strict for function in functions)):
        return None
    tokens = MarkerTokens(special_id, is_text)
    form = make(functions, tokens, forced=tools.forced)
    markers, start = reading.formats.reasoning_markers, reading.formats.reasoning_start(prompt_ending)
    thinking = [] if markers is None or start is ReasoningStart.BEHIND else _thinking(markers, start, tokens)
    if tools.forced:
        answer = [f"answer: {form.opening} {form.entry} {form.calls('call', parallel=tools.parallel)}"]
    else:
        opening = markers.opening if markers is not None and start is ReasoningStart.BEFORE else None
        answer = list(_free_answer(form, opening, parallel=tools.parallel))
    text = "\n".join([f"start: {'thinking ' if thinking else ''}answer", *thinking, *answer, *form.rules, ""])
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"'tools' that have to be called as they say may have {MAX_GRAMMAR_BYTES} bytes together", param="tools"
        )
    return Grammar(GrammarKind.LARK, text)


def _free_answer(form: CallForm, thinking: str | None, *, parallel: bool) -> Iterator[str]:
    """Yields the rules of an answer that need not call a function, perhaps with text before, between and behind calls.

    No text has a trigger in it, and the first one has nothing at its beginning that the parsers would see there:
    ``thinking``, the marker of reasoning, if that may begin the answer, and calls without a marker.
    """
    yield "ANY: /(?s:.*)/"
    yield f"TEXT: ANY & ~(ANY {one_of((*form.triggers.letters, *form.triggers.shut_out))} ANY)"
    starts = [form.not_first] if form.not_first else []
    starts += [] if thinking is None else [f"{SPACES} {quoted(thinking)}"]
    yield f"FIRST: TEXT{f' & ~({one_of(starts)} ANY)' if starts else ''}"
    choices, calls = ["FIRST"], f"{form.entry} {form.calls('call', parallel=parallel)}"
    if form.triggers.tokens or form.triggers.letters:
        yield from _head("first_head", "FIRST", form)
        yield from _head("head", "TEXT", form)
        yield f"more: head {calls}"
        behind = f" {'more* ' if parallel else ''}TEXT" if form.text_follows else ""
        choices.append(f"first_head {calls}{behind}")
    if form.bare_call:
        choices.append(form.calls(form.bare_call, parallel=parallel))
    yield f"answer: {' | '.join(choices)}"


def _head(name: str, text: str, form: CallForm) -> Iterator[str]:
    """Yields the rule of a text up to a trigger, and with it."""
    triggers = form.triggers
    choices = [f"{text} {token}" for token in triggers.tokens]
    if triggers.letters:
        choices.append(f"{name}_letters")
        yield f"{name}_letters[lazy]: {text} {one_of(triggers.letters)}"
    yield f"{name}: {' | '.join(choices)}"


def _thinking(markers: ReasoningMarkers, start: ReasoningStart, tokens: MarkerTokens) -> list[str]:
    """Returns the rules of reasoning, which may have any text but its end."""
    opening, closing = marker(markers.opening, tokens), marker(markers.closing, tokens)
    if closing == quoted(markers.closing):
        thoughts = [f"thoughts[suffix={closing}]: /(?s:.*)/"]
    else:
        thoughts = [
            f"THOUGHTS: /(?s:.*)/ & ~(/(?s:.*)/ {quoted(markers.closing)} /(?s:.*)/)",
            f"thoughts: THOUGHTS {closing}",
        ]
    inside = r"thoughts /\s{0,4}/"
    return [f"thinking: {f'({opening} {inside})?' if start is ReasoningStart.BEFORE else inside}", *thoughts]
