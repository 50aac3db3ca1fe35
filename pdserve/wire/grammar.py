"""Says which texts an answer may be, in the form that every process of the cluster shares.

A grammar bounds the answer's text as a whole: with a grammar, an answer that ends with ``FinishReason.STOP`` is a text
of that grammar, and one that ends with ``LENGTH`` is the beginning of one.

The API makes grammars out of the fields of a request: ``JSON_SCHEMA`` out of ``response_format``, for instance. Forced
tool calls are ``LARK``, which holds the schemas of their arguments: ``start: "<tool_call>\\n" call "\\n</tool_call>"``
and ``call: "{...: " %json {...} "}"``. The API has compiled a grammar before it sends it, so a grammar that does not
compile is the client's error and never reaches an engine.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

MAX_GRAMMAR_BYTES = 2**18
"""No setting allows a longer grammar: with the longest prompt it has to fit into a frame."""

JSON_WHITESPACE = r"[ ]|\n[ \t]{0,64}"
"""What may stand between the parts of JSON: nothing, a space, or a line's end and an indentation. With any number of
spaces, a model that has nothing to say would write spaces until its answer is full."""


class GrammarKind(enum.Enum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON."""
    REGEX = "regex"
    """A regular expression of the whole answer, in Rust's syntax, which has neither backreferences nor lookaround."""
    LARK = "lark"
    """A context-free grammar in llguidance's variant of Lark. Its first rule is named ``start``."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The grammar of an answer."""

    kind: GrammarKind
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_BYTES)]


class GrammarTrial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks the process that tries grammars whether this one compiles."""

    grammar: Grammar
    ebnf: bool = False
    """Whether the grammar, of the kind ``LARK``, may be in GBNF instead, to be written anew in Lark."""


class TriedGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a trial. The grammar compiles if there is no ``refusal``."""

    grammar: Grammar
    """The grammar, in Lark if it was in GBNF, with what the trial has left out of its schemas."""
    refusal: str = ""
    place: str = ""
    """The part of a JSON Schema that is at fault, as in ``properties.name``; empty if that is not known."""
