"""Follows a JSON object, list or string character by character, to see where it ends and that it is one."""

from __future__ import annotations

import enum

MAX_DEPTH = 64
"""How many objects and lists may lie in each other."""

_WORDS = ("true", "false", "null")
_SPACE = " \t\n\r"
_HEX = "0123456789abcdefABCDEF"

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


class JsonText:
    """A JSON object, list or string, as far as its characters have come."""

    def __init__(self) -> None:
        self._want = _Want.VALUE
        self._open: list[str] = []
        self._word = ""
        """A word that is not over."""
        self._number: str | None = None
        """Where a number is that is not over, as in ``_NUMBER_STEPS``; None if it is a word."""
        self._hex_left = 0
        self._in_key = False

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._open)

    @property
    def over(self) -> bool:
        return self._want is _Want.NOTHING

    def add(self, char: str) -> bool:
        """Takes the next character. Returns whether the text can still become JSON: without it, it is over."""
        want = self._want
        if want is _Want.STRING:
            return self._add_to_string(char)
        if want is _Want.ESCAPE:
            return self._add_escaped(char)
        if want is _Want.HEX:
            self._hex_left -= 1
            self._want = _Want.HEX if self._hex_left else _Want.STRING
            return char in _HEX
        if want is _Want.SCALAR:
            if self._continues(char):
                return True
            if self._word not in _WORDS if self._number is None else self._number not in _NUMBER_ENDS:
                return False
            self._want = _Want.COMMA_OR_END
        return char in _SPACE or self._add_outside(char)

    def _add_to_string(self, char: str) -> bool:
        if char == '"':
            self._want = _Want.COLON if self._in_key else self._behind_value()
        elif char == "\\":
            self._want = _Want.ESCAPE
        return char >= " "

    def _add_escaped(self, char: str) -> bool:
        self._want, self._hex_left = (_Want.HEX, 4) if char == "u" else (_Want.STRING, 0)
        return char in '"\\/bfnrtu'

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
