"""Structural tags: answers that are partly free and partly bound, as clients of vLLM and SGLang describe them.

The formats of which a tag is put together are those of XGrammar that are about text. Its formats about tokens, grammars
within formats, other styles than JSON and regions of so many tokens have no form here, so that a request with one of
these is refused by its place. XGrammar's own models write every field. One that pdserve does not follow is taken with
the value that asks for nothing.

A format becomes a row of pieces: fixed texts, rules, and free text. Free text goes up to where the fixed text behind it
comes for the first time, so only the two together are a part of a grammar. Fixed texts are made of letters; no special
token stands for one, and none comes in free text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.api.call_grammars.rules import RuleBook, one_of, quoted
from pdserve.api.call_grammars.schema_parts import MAX_DEPTH, closed_schema
from pdserve.api.requests.grammar_check import GrammarPart
from pdserve.errors import InvalidRequest
from pdserve.wire.sampling_params import JSON_WHITESPACE, Grammar, GrammarKind

MAX_PARTS = 512
"""The most formats of one list."""
MAX_TRIGGERS = 128
"""The most triggers of one list. Each is looked for in all others."""
MAX_TRIGGER_CHARS = 128

NonEmpty: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4_096)]
MaybeEmpty: TypeAlias = Annotated[str, Meta(max_length=4_096)]
Texts: TypeAlias = Annotated[list[NonEmpty], Meta(max_length=MAX_PARTS)]
SomeTexts: TypeAlias = Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_PARTS)]
Triggers: TypeAlias = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_TRIGGER_CHARS)]], Meta(min_length=1, max_length=MAX_TRIGGERS)
]
NoTexts: TypeAlias = Annotated[list[str], Meta(max_length=0)]
Times: TypeAlias = Annotated[int, Meta(ge=0, le=1_000)]


class ConstString(msgspec.Struct, tag_field="type", tag="const_string", forbid_unknown_fields=True):
    value: MaybeEmpty


class JsonSchemaPart(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"
    any_order: bool = False
    max_whitespace_cnt: None = None
    excludes: NoTexts = []

    def __post_init__(self) -> None:
        if self.any_order:
            raise ValueError("'any_order' is not supported by pdserve")


class RegexPart(msgspec.Struct, tag_field="type", tag="regex", forbid_unknown_fields=True):
    pattern: Annotated[str, Meta(min_length=1)]


class AnyText(msgspec.Struct, tag_field="type", tag="any_text", forbid_unknown_fields=True):
    """Any text up to what stands behind it, or to the end of the answer."""

    excludes: Texts = []
    """It has none of these in it."""
    max_tokens: None = None
    max_chars: None = None


class InOrder(msgspec.Struct, tag_field="type", tag="sequence", forbid_unknown_fields=True):
    elements: Annotated[list[Format], Meta(max_length=MAX_PARTS)]


class Either(msgspec.Struct, tag_field="type", tag="or", forbid_unknown_fields=True):
    elements: Annotated[list[Format], Meta(min_length=1, max_length=MAX_PARTS)]


class Maybe(msgspec.Struct, tag_field="type", tag="optional", forbid_unknown_fields=True):
    content: Format


class OnceOrMore(msgspec.Struct, tag_field="type", tag="plus", forbid_unknown_fields=True):
    content: Format


class AnyTimes(msgspec.Struct, tag_field="type", tag="star", forbid_unknown_fields=True):
    content: Format


class Repeated(msgspec.Struct, tag_field="type", tag="repeat", forbid_unknown_fields=True):
    content: Format
    min: Times
    max: Annotated[int, Meta(ge=-1, le=1_000)]
    """-1 is any number."""


class Tag(msgspec.Struct, tag_field="type", tag="tag", forbid_unknown_fields=True):
    """Something with a beginning and one of some ends."""

    begin: MaybeEmpty
    content: Format
    end: MaybeEmpty | SomeTexts


class TriggeredTags(msgspec.Struct, tag_field="type", tag="triggered_tags", forbid_unknown_fields=True):
    """Free text, in which a tag has to follow wherever a trigger comes, with which the tag begins."""

    triggers: Triggers
    tags: Annotated[list[Tag], Meta(min_length=1, max_length=MAX_PARTS)]
    at_least_one: bool = False
    """Whether it begins with a tag."""
    stop_after_first: bool = False
    excludes: Texts = []


class SeparatedTags(msgspec.Struct, tag_field="type", tag="tags_with_separator", forbid_unknown_fields=True):
    """Tags with a text between each two."""

    tags: Annotated[list[Tag], Meta(min_length=1, max_length=MAX_PARTS)]
    separator: MaybeEmpty
    at_least_one: bool = False
    stop_after_first: bool = False


Format: TypeAlias = (
    ConstString
    | JsonSchemaPart
    | RegexPart
    | AnyText
    | InOrder
    | Either
    | Maybe
    | OnceOrMore
    | AnyTimes
    | Repeated
    | Tag
    | TriggeredTags
    | SeparatedTags
)


class TaggedStructure(msgspec.Struct, forbid_unknown_fields=True):
    """A tag as older clients write it, whose content is JSON."""

    begin: NonEmpty
    end: MaybeEmpty
    schema: dict[str, Any] | bool | None = None
    """Any JSON if missing."""
    type: Literal["tag"] | None = None


Structures: TypeAlias = Annotated[list[TaggedStructure], Meta(min_length=1, max_length=MAX_PARTS)]


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """A whole one: a format, or ``structures`` and their ``triggers`` as older clients have them."""

    type: Literal["structural_tag"]
    format: Format | None = None
    structures: Structures | None = None
    triggers: Triggers | None = None


_OPTIONS = {"lenient": True, "coerce_one_of": True, "whitespace_pattern": JSON_WHITESPACE}
_NOTHING = '""'
_VERBOSE = re.compile(r"(?<!\\)(?:\\\\)*\(\?[A-Za-z-]*x")
"""The flag of a regular expression with which the end of a line is no character of it, but may end a comment."""


@dataclass(frozen=True, slots=True)
class _Fixed:
    """One of some texts, none of them empty."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Free:
    """Text without any of ``excludes``."""

    excludes: tuple[str, ...]
    place: str


@dataclass(frozen=True, slots=True)
class _Part:
    """What an expression says."""

    expression: str


_Piece: TypeAlias = _Fixed | _Free | _Part


@dataclass(frozen=True, slots=True)
class TagGrammar:
    """The grammar of a structural tag."""

    grammar: Grammar
    parts: tuple[GrammarPart, ...]
    """The schemas and regular expressions in it, to find the one that is at fault."""


def tag_grammar(asked: StructuralTag, param: str) -> TagGrammar:
    """Returns the grammar of a structural tag, which is the field ``param`` of a request. Raises InvalidRequest."""
    if asked.format is not None:
        if asked.structures is not None or asked.triggers is not None:
            raise InvalidRequest(
                f"'format' and 'structures' with 'triggers' are two ways to say one thing: {param!r} has both",
                param=param,
            )
        wanted, place = asked.format, f"{param}.format"
    elif asked.structures is None or asked.triggers is None:
        raise InvalidRequest(f"{param!r} needs 'format', or 'structures' and 'triggers'", param=param)
    else:
        tags = [Tag(one.begin, JsonSchemaPart(_or_any(one.schema)), one.end) for one in asked.structures]
        wanted, place = TriggeredTags(asked.triggers, tags), param
    builder = _Builder(param, older=asked.format is None)
    start = builder.expression(wanted, place, last=True)
    text = "\n".join([f"start: {start}", *builder.book.lines, ""])
    return TagGrammar(Grammar(GrammarKind.LARK, text), tuple(builder.parts))


@dataclass
class _Builder:
    """The rules of one grammar. ``last`` says whether the answer ends behind a format."""

    param: str
    older: bool
    """Whether the client has written ``structures``: places are named by these."""
    book: RuleBook = field(init=False)
    parts: list[GrammarPart] = field(default_factory=list)
    _depth: int = 0

    def __post_init__(self) -> None:
        self.book = RuleBook(f"the grammar of {self.param!r}", self.param)
        self.book.define("ANY", "/(?s:.*)/")

    def expression(self, wanted: Format, place: str, *, last: bool) -> str:
        """Returns the expression of a format by itself, which any other may follow."""
        return self._joined(self._pieces(wanted, place, last=last), last=last)

    def _pieces(self, wanted: Format, place: str, *, last: bool) -> list[_Piece]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidRequest(
                f"{self.param!r} is nested too deeply: at most {MAX_DEPTH} formats within each other are allowed",
                param=self.param,
            )
        try:
            return self._pieces_within(wanted, place, last=last)
        finally:
            self._depth -= 1

    def _pieces_within(self, wanted: Format, place: str, *, last: bool) -> list[_Piece]:
        match wanted:
            case ConstString(value=value):
                return _fixed(value)
            case JsonSchemaPart(json_schema=schema):
                # Structures have schemas alone.
                written = place.removesuffix(".content") + ".schema" if self.older else f"{place}.json_schema"
                return [self._json(schema, written)]
            case RegexPart(pattern=pattern):
                return [_Part(self.book.terminal(self._regex(pattern, place)))]
            case AnyText(excludes=excludes):
                return [_Free(tuple(excludes), place)]
            case InOrder(elements=elements):
                end = len(elements) - 1
                pieces = (
                    self._pieces(element, f"{place}.elements[{index}]", last=last and index == end)
                    for index, element in enumerate(elements)
                )
                return [piece for several in pieces for piece in several]
            case Either(elements=elements):
                each = (
                    self.expression(element, f"{place}.elements[{index}]", last=last)
                    for index, element in enumerate(elements)
                )
                return [self._choice(each)]
            case Maybe(content=content):
                return [self._repeated(content, place, "?")]
            case OnceOrMore(content=content):
                return [self._repeated(content, place, "+")]
            case AnyTimes(content=content):
                return [self._repeated(content, place, "*")]
            case Repeated(content=content):
                if -1 < wanted.max < wanted.min:
                    raise InvalidRequest(f"'max' of {place!r} must be -1, or 'min' at least", param=self.param)
                if wanted.max == 0:
                    return []
                most = "" if wanted.max < 0 else wanted.max
                return [self._repeated(content, place, f"{{{wanted.min},{most}}}")]
            case Tag():
                return self._tag(wanted, wanted.begin, place)
            case TriggeredTags():
                return [self._triggered(wanted, place, last=last)]
            case SeparatedTags():
                return [self._separated(wanted, place)]

    def _repeated(self, content: Format, place: str, times: str) -> _Piece:
        rule = self.book.rule(self.expression(content, f"{place}.content", last=False))
        return _Part(f"{rule}{times}")

    def _tag(self, tag: Tag, begin: str, place: str) -> list[_Piece]:
        """Returns the pieces of a tag, of whose beginning ``begin`` is left."""
        ends = tuple(dict.fromkeys(tag.end)) if isinstance(tag.end, list) else ()
        closing: list[_Piece] = [_Fixed(ends)] if ends else _fixed(str(tag.end))
        return [*_fixed(begin), *self._pieces(tag.content, f"{place}.content", last=False), *closing]

    def _triggered(self, wanted: TriggeredTags, place: str, *, last: bool) -> _Piece:
        triggers = list(dict.fromkeys(wanted.triggers))
        self._check_triggers(triggers, wanted, place)
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        tags = f"{place}.structures" if self.older else f"{place}.tags"
        for index, tag in enumerate(wanted.tags):
            trigger = next(one for one in triggers if tag.begin.startswith(one))
            pieces = self._tag(tag, tag.begin.removeprefix(trigger), f"{tags}[{index}]")
            behind = self.book.rule(self._joined(pieces, last=False))
            by_trigger[trigger].append(behind)
            whole.append(f"{quoted(trigger)} {behind}")
        if wanted.at_least_one and wanted.stop_after_first:
            return self._choice(whole)
        if not last:
            raise InvalidRequest(
                f"{place!r} has free text at its end, so that nothing can stand behind it", param=self.param
            )
        text = self._text((*triggers, *wanted.excludes))
        heads = (
            f"{self._lazy(text, (trigger,))} {self._choice(tags).expression}" for trigger, tags in by_trigger.items()
        )
        tagged = self.book.rule(one_of(heads))
        if wanted.stop_after_first:
            return _Part(self.book.rule(f"{tagged} | {text}"))
        first = f"{self._choice(whole).expression} " if wanted.at_least_one else ""
        return _Part(self.book.rule(f"{first}{tagged}* {text}"))

    def _check_triggers(self, triggers: list[str], wanted: TriggeredTags, place: str) -> None:
        """Raises InvalidRequest unless it is clear which tags may follow each trigger."""
        for trigger in triggers:
            if any(other in trigger for other in triggers if other != trigger):
                raise InvalidRequest(f"{place!r} has a trigger with another one in it: {trigger!r}", param=self.param)
            if not any(tag.begin.startswith(trigger) for tag in wanted.tags):
                raise InvalidRequest(f"no tag of {place!r} begins with the trigger {trigger!r}", param=self.param)
        for tag in wanted.tags:
            if not tag.begin.startswith(tuple(triggers)):
                raise InvalidRequest(f"a tag of {place!r} begins with no trigger: {tag.begin!r}", param=self.param)

    def _separated(self, wanted: SeparatedTags, place: str) -> _Piece:
        tag = self._choice(
            self._joined(self._tag(tag, tag.begin, f"{place}.tags[{index}]"), last=False)
            for index, tag in enumerate(wanted.tags)
        ).expression
        between = f"{quoted(wanted.separator)} " if wanted.separator else ""
        several = tag if wanted.stop_after_first else f"{tag} ({between}{tag})*"
        return _Part(self.book.rule(several) + ("" if wanted.at_least_one else "?"))

    def _choice(self, expressions: Iterable[str]) -> _Part:
        names = (one if one.isidentifier() else self.book.rule(one) for one in expressions)
        return _Part(self.book.rule(" | ".join(dict.fromkeys(names))))

    def _joined(self, pieces: list[_Piece], *, last: bool) -> str:
        """Returns the expression of pieces in their order."""
        parts = []
        waiting: _Free | None = None
        for piece in pieces:
            match piece:
                case _Fixed(texts=texts) if waiting is not None:
                    parts.append(self._lazy(self._text(waiting.excludes), texts))
                    waiting = None
                    continue
                case _Fixed(texts=texts):
                    parts.append(one_of(map(quoted, texts)))
                case _Part(expression=expression):
                    parts.append(expression)
            if waiting is not None:
                raise self._endless(waiting)
            waiting = piece if isinstance(piece, _Free) else None
        if waiting is not None:
            if not last:
                raise self._endless(waiting)
            parts.append(self._text(waiting.excludes))
        return " ".join(parts) or _NOTHING

    def _endless(self, free: _Free) -> InvalidRequest:
        return InvalidRequest(
            f"{free.place!r} is any text: a fixed text has to follow it, or the end of the answer", param=self.param
        )

    def _text(self, excludes: tuple[str, ...]) -> str:
        """Returns the terminal of a text that has none of ``excludes`` in it."""
        if not excludes:
            return "ANY"
        return self.book.terminal(f"ANY & ~(ANY {one_of(map(quoted, dict.fromkeys(excludes)))} ANY)")

    def _lazy(self, text: str, ends: tuple[str, ...]) -> str:
        """Returns the rule of a text up to the first of some ends, and with it."""
        return self.book.rule(f"{text} {one_of(map(quoted, ends))}", "[lazy]")

    def _json(self, schema: dict[str, Any] | bool, place: str) -> _Piece:
        if schema is False:
            raise InvalidRequest(f"{place!r} is a schema that nothing follows", param=self.param)
        given = {} if schema is True else schema
        written = json.dumps(closed_schema(given, self.param, _OPTIONS, repr(place))).replace("\x7f", "\\u007f")
        self.parts.append(GrammarPart(repr(place), Grammar(GrammarKind.JSON_SCHEMA, written)))
        return _Part(self.book.rule(f"%json {written}"))

    def _regex(self, pattern: str, place: str) -> str:
        """Returns the terminal of a regular expression, which is one of the whole part."""
        pattern = pattern.removeprefix("^")
        if re.search(r"(?<!\\)(\\\\)*\$\Z", pattern):
            pattern = pattern[:-1]
        if re.search(r"(?<!\\)(\\\\)*\\\Z", pattern):
            raise InvalidRequest(f"the pattern of {place!r} ends within an escape", param=self.param)
        self.parts.append(GrammarPart(repr(f"{place}.pattern"), Grammar(GrammarKind.REGEX, pattern)))
        if _VERBOSE.search(pattern) and ("\n" in pattern or "\r" in pattern):
            raise InvalidRequest(
                f"the pattern of {place!r} has the flag 'x' and several lines: it takes one line", param=self.param
            )
        # A slash would end it, and a line's end the line. What is escaped already stays as it is.
        written = re.sub(r"\\.|[/\n\r]", _in_slashes, pattern, flags=re.DOTALL)
        return f"/{written}/" if written else _NOTHING


def _in_slashes(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}.get(match[0], match[0])


def _fixed(text: str) -> list[_Piece]:
    return [_Fixed((text,))] if text else []


def _or_any(schema: dict[str, Any] | bool | None) -> dict[str, Any] | bool:
    return {} if schema is None else schema
