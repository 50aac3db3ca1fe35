"""Writes rules of llguidance's Lark. What comes from a client is written as a literal, or as the JSON of a schema.

``CallForm`` has what the grammars of all forms of calls say: how a call reads, and what stands around calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.api.message.call_parser import CallMarkers
from pdserve.errors import InvalidRequest
from pdserve.wire.sampling_params import MAX_GRAMMAR_BYTES

STRING = '%json {"type": "string"}'
NUMBER = '%json {"type": "number"}'
SPACES = r"/[\s\x1c-\x1f]*/"
"""The terminal of what Python's ``str.strip`` takes away."""


def quoted(text: str) -> str:
    """Returns the literal of a text."""
    # llguidance reads no delete character that is written as itself.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def one_of(expressions: Iterable[str]) -> str:
    """Returns the expression of a choice."""
    return f"({' | '.join(expressions)})"


class RuleBook:
    """The rules of one grammar that have no name of their own. Two with the same content are one."""

    def __init__(self, name: str = "the grammar of the calls that 'tools' ask for", param: str = "tools") -> None:
        """``name`` is what errors call the grammar, and ``param`` the field of the request that asks for it."""
        self._name = name
        self._param = param
        self._names: dict[str, str] = {}
        self._defined: set[str] = set()
        self._size = 0
        self._count = 0
        self.lines: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """Returns the name of the rule that has this body and these attributes, such as ``[lazy]``."""
        name = self._names.get(attributes + body)
        if name is None:
            name = self._names[attributes + body] = self.new_name()
            self.define(name + attributes, body)
        return name

    def terminal(self, body: str) -> str:
        """Returns the name of the terminal that has this body. A terminal has as many choices as it needs."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = self.new_name().upper()
            self.define(name, body)
        return name

    def has(self, name: str) -> bool:
        return name in self._defined

    def new_name(self) -> str:
        """Returns the name of a rule that is defined later."""
        self._count += 1
        return f"rule_{self._count}"

    def define(self, name: str, body: str) -> None:
        """Adds a rule. Raises InvalidRequest as soon as there is more than a grammar may have."""
        self._defined.add(name)
        line = f"{name}: {body}"
        self.lines.append(line)
        self._size += len(line.encode()) + 1
        if self._size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{self._name} would have more than {MAX_GRAMMAR_BYTES} bytes", param=self._param)


SpecialId = Callable[[str], int | None]
"""Returns the id of the special token that has a text; None if no special token has it."""
TextToken = Callable[[str], bool]
"""Returns whether a token that is no special one has a text. Its letters match it, wherever a grammar has them."""


def no_token(_: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class MarkerTokens:
    """The tokens that a vocabulary has for markers."""

    special_id: SpecialId
    is_text: TextToken

    def has(self, text: str) -> bool:
        """Returns whether the model has a token for a marker."""
        return self.special_id(text) is not None or self.is_text(text)


@dataclass(frozen=True, slots=True)
class Triggers:
    """What the parser of a form takes for the beginning of calls wherever it comes in a text."""

    tokens: tuple[str, ...]
    """Special tokens, behind which calls have to follow."""
    letters: tuple[str, ...]
    """Literals, behind which calls have to follow."""
    shut_out: tuple[str, ...]
    """Literals that no text may have: they look like a special token, or like one that the model does not have."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of calls. Each part but ``rules`` is an expression, empty if there is nothing."""

    rules: tuple[str, ...]
    """Among them is ``call``."""
    triggers: Triggers
    opening: str = ""
    """What a forced answer begins with."""
    entry: str = ""
    """What stands between ``opening``, or a trigger, and the first call."""
    between: str = ""
    closing: str = ""
    bare_call: str = ""
    """The first call of an answer that begins with calls, though it need not have any, with what stands before it."""
    not_first: str = ""
    """The terminal of what no other answer begins with, because the parser would take it for the beginning of calls."""
    text_follows: bool = True
    """Whether the parser sees where calls end, so that text may follow."""

    def calls(self, first: str, *, parallel: bool) -> str:
        """Returns the expression of a first call, and perhaps more, up to their closing."""
        return f"{first} {f'({self.between} call)* ' if parallel else ''}{self.closing}"


def marker(text: str, tokens: MarkerTokens) -> str:
    """Returns the expression of a marker: the special token that has this text, or its letters."""
    token_id = tokens.special_id(text)
    return quoted(text) if token_id is None else f"<[{token_id}]>"


def triggers_of(openings: Sequence[str], tokens: MarkerTokens, *, in_letters: bool) -> Triggers:
    """Returns the triggers of a form. ``in_letters`` says whether models without tokens for them write the openings."""
    special = {text: written for text in openings if (written := marker(text, tokens)) != quoted(text)}
    letters = [text for text in openings if text not in special and (in_letters or tokens.has(text))]
    return Triggers(
        tuple(special.values()),
        tuple(map(quoted, letters)),
        tuple(quoted(text) for text in openings if text not in letters),
    )


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
