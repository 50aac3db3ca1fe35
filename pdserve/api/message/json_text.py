"""Follows a JSON object, list or string character by character, to see where it ends and that it is one.

Models write line breaks and other control characters as they are, and put backslashes before characters that JSON does
not escape. That is read as what it means: ``JsonText`` returns it as JSON has it.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

MAX_DEPTH = 64
"""How many objects and lists may lie in each other."""

_WORDS = ("true", "false", "null")
_SPACE = " \t\n\r"
_HEX = "0123456789abcdefABCDEF"
_ESCAPED = '"\\/bfnrt'
_BROKEN = "INVALID_JSON"
"""The name under which an object has the text of arguments that are no JSON, as Anthropic's clients write it."""

_NUMBER_STEPS = {
    "": {"-": "-", "0": "0", "1": "1"},
    "-": {"0": "0", "1": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1": "1", ".": ".", "e": "e"},
    ".": {"0": "d", "1": "d"},
    "d": {"0": "d", "1": "d", "e": "e"},
    "e": {"-": "+", "+": "+", "0": "x", "1": "x"},
    "+": {"0": "x", "1": "x"},
    "x": {"0": "x", "1": "x"},
}
"""What follows what in a number, by kinds of characters: ``1`` is any digit but 0. Behind the point digits are ``d``,
and in the exponent ``x``."""
_NUMBER_ENDS = ("0", "1", "d", "x")
_KINDS = {**dict.fromkeys("123456789", "1"), "E": "e"}


class _Want(enum.Enum):
    """What the next character that is no space belongs to."""

    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    SCALAR = enum.auto()
    NOTHING = enum.auto()


_IN_STRING = (_Want.STRING, _Want.ESCAPE, _Want.HEX)


class JsonText:
    """A JSON object, list or string, as far as its characters have come."""

    def __init__(self) -> None:
        self._want = _Want.VALUE
        self._open: list[str] = []
        self._word = ""
        """A word that is not over."""
        self._number: str | None = None
        """Where a number is that is not over, as in ``_NUMBER_STEPS``; None if it is a word."""
        self._escape = ""
        """What has come of an escaped character, with its backslash."""
        self._in_key = False

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._open)

    @property
    def over(self) -> bool:
        return self._want is _Want.NOTHING

    @property
    def in_string(self) -> bool:
        return self._want in _IN_STRING

    def add(self, char: str) -> str | None:
        """Takes the next character. Returns what JSON has for it, which may come with a later one.

        Returns None if the text cannot become JSON any more. Without the character, it is over.
        """
        want = self._want
        if want is _Want.STRING:
            return self._add_to_string(char)
        if want is _Want.ESCAPE:
            return self._add_escaped(char)
        if want is _Want.HEX:
            return self._add_hex(char)
        if want is _Want.SCALAR:
            if self._continues(char):
                return char
            if self._word not in _WORDS if self._number is None else self._number not in _NUMBER_ENDS:
                return None
            self._want = _Want.COMMA_OR_END
        return char if char in _SPACE or self._add_outside(char) else None

    def _add_to_string(self, char: str) -> str:
        if char == '"':
            self._want = _Want.COLON if self._in_key else self._behind_value()
        elif char == "\\":
            self._want, self._escape = _Want.ESCAPE, char
            return ""
        return char if char >= " " else msgspec.json.encode(char)[1:-1].decode()

    def _add_escaped(self, char: str) -> str:
        if char == "u":
            self._want, self._escape = _Want.HEX, "\\u"
            return ""
        self._want = _Want.STRING
        if char in _ESCAPED:
            return f"\\{char}"
        # Python and JavaScript escape quotes that JSON does not. Of anything else, the backslash belongs to the text.
        return char if char == "'" else rf"\\{self._add_to_string(char)}"

    def _add_hex(self, char: str) -> str:
        if char not in _HEX:
            self._want = _Want.STRING
            return rf"\{self._escape}{self._add_to_string(char)}"
        self._escape += char
        if len(self._escape) < len(r"\u0000"):
            return ""
        self._want = _Want.STRING
        return self._escape

    def _add_outside(self, char: str) -> bool:
        want, ends = self._want, self._want in (_Want.COMMA_OR_END, _Want.VALUE_OR_END, _Want.KEY_OR_END)
        if char in "}]":
            return ends and self._close(char)
        if want in (_Want.VALUE, _Want.VALUE_OR_END):
            return self._begin_value(char)
        if want in (_Want.KEY, _Want.KEY_OR_END):
            self._in_key, self._want = True, _Want.STRING
            return char == '"'
        if want is _Want.COLON:
            self._want = _Want.VALUE
            return char == ":"
        if want is _Want.COMMA_OR_END:
            self._want = _Want.KEY if self._open[-1] == "}" else _Want.VALUE
            return char == ","
        return False

    def _begin_value(self, char: str) -> bool:
        if char == "{":
            self._open.append("}")
            self._want = _Want.KEY_OR_END
            return len(self._open) <= MAX_DEPTH
        if char == "[":
            self._open.append("]")
            self._want = _Want.VALUE_OR_END
            return len(self._open) <= MAX_DEPTH
        if char == '"':
            self._in_key, self._want = False, _Want.STRING
            return True
        self._word, self._want = "", _Want.SCALAR
        self._number = None if char.isalpha() else ""
        return bool(self._open) and self._continues(char)

    def _close(self, char: str) -> bool:
        if self._open.pop() != char:
            return False
        self._want = self._behind_value()
        return True

    def _behind_value(self) -> _Want:
        return _Want.COMMA_OR_END if self._open else _Want.NOTHING

    def _continues(self, char: str) -> bool:
        """Takes the next character of a number or a word. Returns whether it belongs there."""
        if self._number is None:
            longer = self._word + char
            belongs = any(word.startswith(longer) for word in _WORDS)
            self._word = longer if belongs else self._word
            return belongs
        after = _NUMBER_STEPS[self._number].get(_KINDS.get(char, char))
        self._number = self._number if after is None else after
        return after is not None


def as_json(text: str) -> str | None:
    """Returns a text, or the beginning of one, as JSON has it; None if it is neither."""
    reader, pieces = JsonText(), []
    for char in text:
        if (piece := reader.add(char)) is None:
            return None
        pieces.append(piece)
    return "".join(pieces)


def as_object(arguments: str) -> bytes:
    """Returns the arguments of a call as a JSON object, which has their text if they are none."""
    for text in (arguments, as_json(arguments)):
        if text is not None and _is_object(text):
            return text.encode()
    return msgspec.json.encode({_BROKEN: arguments})


def _is_object(text: str) -> bool:
    try:
        _object.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


_object = msgspec.json.Decoder(dict[str, Any])
