"""Makes the grammar of answers that have to call functions, and of calls that have to follow a schema.

The grammar has the form that the model writes by itself, so that a forced call reads to the model as its own. What the
parser would take for a call is one in the grammar as well, wherever it stands in an answer that need not be calls.

An answer in the Harmony format is messages. What is bound is one of them, behind the reasoning. A call that is forced,
or has to follow its schema, is a message to the function. An answer with a structure of its own has that in the message
of the channel ``final``. Reasoning is free: as many messages of the channel ``analysis`` as the model writes. Where a
vocabulary has a token for a marker, no text has its letters, as the parser would see it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from pdserve.api.call_grammars.schema_parts import Member, SchemaParts, argument_schema, members
from pdserve.api.message.gemma4_calls import GEMMA4
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
from pdserve.api.message.json_calls import HERMES, LLAMA_JSON, MISTRAL, NEMOTRON
from pdserve.api.message.reasoning import ReasoningMarkers, ReasoningStart
from pdserve.api.message.tool_schemas import PlainString, SchemaKinds, ToolSchema
from pdserve.api.message.xml_calls import FUNCTION_END, PARAMETER_END, PARAMETER_NAME, QWEN_XML, plain_text
from pdserve.api.requests.answer_reading import AnswerReading
from pdserve.config import ToolFormat
from pdserve.errors import InvalidRequest
from pdserve.wire.sampling_params import MAX_GRAMMAR_BYTES, STRUCTURE, Grammar, GrammarKind

_VALUE_END = quoted(f"\n{PARAMETER_END}\n")
_ANY_NAME = r"/[^<>\s]{1,64}/"


def xml_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    """Returns the grammar of calls in Qwen3-Coder's form, whose arguments have tags of their own.

    A plain string stands there as it is, and any other value as JSON. Where parameters cannot have tags, because of
    their names or because the schema says more than a list of parameters, the arguments are one JSON object.
    """
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


def hermes_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    return tagged_form(HERMES, _json_rules(tools, "arguments", forced=forced), tokens)


def gemma4_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    """Returns the form of Gemma 4's calls, with JSON as their arguments, which the parser reads as well."""
    opening, closing = marker(GEMMA4.openings[0], tokens), marker(GEMMA4.closing, tokens)
    book = RuleBook()
    parts = ((tool, SchemaParts(argument_schema(tool, forced=forced), lenient=not tool.strict)) for tool in tools)
    book.define("call", " | ".join(f"{quoted(f'call:{tool.name}')} {part.whole()}" for tool, part in parts))
    return CallForm(
        tuple(book.lines),
        triggers_of(GEMMA4.openings, tokens, in_letters=True),
        opening,
        between=f"{closing} {opening}",
        closing=closing,
    )


def llama_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    return CallForm(
        _json_rules(tools, "parameters", forced=forced),
        triggers_of(LLAMA_JSON.openings, tokens, in_letters=False),
        between='"; "',
        bare_call="call",
        not_first=f"{SPACES} {quoted(LLAMA_JSON.bare)}",
        text_follows=False,
    )


def nemotron_form(tools: Sequence[ToolSchema], tokens: MarkerTokens, *, forced: bool) -> CallForm:
    """Returns the form of models that write a list of calls between two marks."""
    opening, closing = marker(NEMOTRON.openings[0], tokens), marker(NEMOTRON.closing, tokens)
    return CallForm(
        _json_rules(tools, "arguments", forced=forced),
        triggers_of(NEMOTRON.openings, tokens, in_letters=True),
        opening,
        entry='"["',
        between='", "',
        closing=f'"]" {closing}',
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
    ToolFormat.NEMOTRON: nemotron_form,
    ToolFormat.GEMMA: gemma_form,
    ToolFormat.GEMMA4: gemma4_form,
}


def tool_grammar(
    reading: AnswerReading, prompt_ending: str, special_id: SpecialId, is_text: TextToken = no_token
) -> Grammar | None:
    """Returns the grammar of the answers to a prompt that ends so; None if calls may be anything.

    ``special_id`` and ``is_text`` tell of the tokens that the vocabulary has for markers, as ``MarkerTokens`` says.
    Raises InvalidRequest if the functions take more bytes than a grammar may have.
    """
    tools = reading.tools
    functions = list(tools.callable.values())
    if reading.formats.calls is ToolFormat.NONE or not (tools.forced or any(one.strict for one in functions)):
        return None
    tokens = MarkerTokens(special_id, is_text)
    if reading.formats.calls is ToolFormat.HARMONY:
        answer_of = harmony_forced if tools.forced else harmony_strict
        return _grammar(answer_of(functions, prompt_ending, tokens, parallel=tools.parallel))
    form = _FORMS[reading.formats.calls](functions, tokens, forced=tools.forced)
    markers, start = reading.formats.reasoning_markers, reading.formats.reasoning_start(prompt_ending)
    thinking = [] if markers is None or start is ReasoningStart.BEHIND else _thinking(markers, start, tokens)
    if tools.forced:
        answer = [f"answer: {form.opening} {form.entry} {form.calls('call', parallel=tools.parallel)}"]
    else:
        opening = markers.opening if markers is not None and start is ReasoningStart.BEFORE else None
        answer = list(_free_answer(form, opening, parallel=tools.parallel))
    return _grammar("\n".join([f"start: {'thinking ' if thinking else ''}answer", *thinking, *answer, *form.rules, ""]))


def _grammar(text: str) -> Grammar:
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"'tools' that have to be called as they say may have {MAX_GRAMMAR_BYTES} bytes together", param="tools"
        )
    return Grammar(GrammarKind.LARK, text)


def rules_before(
    reading: AnswerReading, prompt_ending: str, special_id: SpecialId, is_text: TextToken = no_token
) -> str:
    """Returns the rules of what stands around the structure of an answer to a prompt that ends so, as in ``Grammar``.

    They are empty if nothing does.
    """
    if not reading.formats.harmony:
        return ""
    return harmony_structure(prompt_ending, MarkerTokens(special_id, is_text))


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
    opening, begin, closing = (marker(text, tokens) for text in (markers.opening, *markers.tokens))
    if opening == quoted(markers.opening) and begin != quoted(markers.tokens[0]):
        # The vocabulary has a token for its beginning alone.
        opening = f"{begin} {quoted(markers.opening.removeprefix(markers.tokens[0]))}"
    if closing == quoted(markers.closing):
        thoughts = [f"thoughts[suffix={closing}]: /(?s:.*)/"]
    else:
        thoughts = [
            f"THOUGHTS: /(?s:.*)/ & ~(/(?s:.*)/ {quoted(markers.closing)} /(?s:.*)/)",
            f"thoughts: THOUGHTS {closing}",
        ]
    inside = r"thoughts /\s{0,4}/"
    return [f"thinking: {f'({opening} {inside})?' if start is ReasoningStart.BEFORE else inside}", *thoughts]


def harmony_forced(tools: Sequence[ToolSchema], prompt: str, tokens: MarkerTokens, *, parallel: bool) -> str:
    """Returns the grammar of an answer to ``prompt`` that calls functions."""
    more = f" ({_next(tokens)} thoughts call)*" if parallel else ""
    answer = f"start: {_opening(prompt, tokens)} thoughts call{more}"
    return _lines([answer, *_free(tokens, ANALYSIS), *_calls(tools, tokens, forced=True)])


def harmony_strict(tools: Sequence[ToolSchema], prompt: str, tokens: MarkerTokens, *, parallel: bool) -> str:
    """Returns the grammar of an answer to ``prompt`` that may call functions, and if it does, as they say."""
    more = f" ({_next(tokens)} thoughts call)*" if parallel else ""
    said = f"{marker(CHANNEL, tokens)} {quoted(FINAL)} {marker(MESSAGE, tokens)} TEXT"
    message = f"thoughts ({said} | call{more})"
    if section_of(prompt) is Section.CONTENT:
        answer = f"start: TEXT | said {_next_role(tokens)} {message}"
    else:
        answer = f"start: {_opening(prompt, tokens)} {message}"
    return _lines([answer, *_free(tokens, ANALYSIS, COMMENTARY), *_calls(tools, tokens, forced=False)])


def harmony_structure(prompt: str, tokens: MarkerTokens) -> str:
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
