"""Follows a JSON value character by character, to see where it ends and that it is one."""

from __future__ import annotations

import enum
import re

MAX_DEPTH = 64
"""How many objects and lists may lie in each other."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_START = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE](?:[+-]?[0-9]*))?)?")
_WORDS = ("true", "false", "null")
_SPACE = " \t\n\r"
_HEX = "0123456789abcdefABCDEF"
MAX_SCALAR = 64
"""How many characters a number may have."""


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
    """A JSON object or list, as far as its characters have come."""

    def __init__(self) -> None:
        self._want = _Want.VALUE
        self._open: list[str] = []
        self._scalar = ""
        """A number or a word that is not over."""
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
            if self._continues(self._scalar + char):
                self._scalar += char
                return True
            if not _is_scalar(self._scalar):
                return False
            self._want = _Want.COMMA_OR_END
        return char in _SPACE or self._add_outside(char)

    def _add_to_string(self, char: str) -> bool:
        if char == '"':
            self._want = _Want.COLON if self._in_key else _Want.COMMA_OR_END
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
        if not self._open:
            return False
        if char == '"':
            self._in_key, self._want = False, _Want.STRING
            return True
        self._scalar, self._want = char, _Want.SCALAR
        return self._continues(char)

    def _close(self, char: str) -> bool:
        if self._open.pop() != char:
            return False
        self._want = _Want.COMMA_OR_END if self._open else _Want.NOTHING
        return True

    def _continues(self, scalar: str) -> bool:
        if len(scalar) > MAX_SCALAR:
            return False
        return any(word.startswith(scalar) for word in _WORDS) or _NUMBER_START.fullmatch(scalar) is not None


def _is_scalar(text: str) -> bool:
    return text in _WORDS or _NUMBER.fullmatch(text) is not None
