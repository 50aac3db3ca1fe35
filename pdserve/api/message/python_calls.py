"""Calls that are written as in Python: Llama 3.2 and 4, Gemma.

[f(a=1, b="x"), g()]
[f(**{"a b": 1})]
```tool_code
f(a=1)
```
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import msgspec

from pdserve.api.message.call_parser import MAX_HELD, CallMarkers, CallParser
from pdserve.api.message.json_text import MAX_DEPTH
from pdserve.api.message.tool_schemas import ToolSchema

PYTHONIC = CallMarkers(("<|python_tag|>", "<|python_start|>"), "<|python_end|>", bare="[", separators=" \t\r\n,;[]")
GEMMA = CallMarkers(("```tool_code", "```tool_call"), "```", bare="[", separators=" \t\r\n,;[]")

MAX_NAME = 128
MAX_NUMBER = 64
"""How many characters a number may have that JSON would write otherwise."""
_OPEN, _CLOSE = "([{", ")]}"
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<number>-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"""
    r"""|(?P<name>[A-Za-z_][\w.-]*)|(?P<sign>\*\*|[()\[\]{},:=]))""",
    re.DOTALL,
)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


class PythonCallParser(CallParser):
    """Reads calls with keyword arguments that are literals. A call is passed on when it is complete."""

    def __init__(self, markers: CallMarkers, tools: Mapping[str, ToolSchema], *, parallel: bool) -> None:
        super().__init__(markers, tools, parallel=parallel)
        self._read = 0
        """How many of the characters that wait are known to belong to the call."""
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def _begins_call(self, char: str) -> bool:
        return char.isalnum() or char in "_.-"

    def _call(self) -> bool:
        self._read, self._depth, self._quote, self._escaped = 0, 0, "", False
        self._state = self._read_call
        return True

    def _read_call(self) -> bool:
        while self._read < len(self._waiting):
            char = self._waiting[self._read]
            if self._read >= MAX_HELD or not self._follow(char):
                self._give_up()
                return True
            self._read += 1
            if self._depth == 0 and char == ")":
                self._read_whole()
                return True
        if self._over:
            self._give_up()
        return self._over

    def _give_up(self) -> None:
        """Makes content of what was read: it is no call.

        No other call is looked for in it. A text could have thousands of beginnings of calls, each as long as the rest.
        """
        self._held += self._take(self._read)
        self._fail()

    def _follow(self, char: str) -> bool:
        """Returns whether the text is still the beginning of a call."""
        if self._quote:
            closes = char == self._quote and not self._escaped
            self._escaped = char == "\\" and not self._escaped
            self._quote = "" if closes else self._quote
        elif self._depth == 0 and char != "(":
            return self._read < MAX_NAME and (char.isalnum() or char in "_.-")
        elif char in "\"'":
            self._quote = char
        elif char in _OPEN:
            self._depth += 1
        elif char in _CLOSE:
            self._depth -= 1
        return self._depth <= MAX_DEPTH

    def _read_whole(self) -> None:
        call = _call_of(self._waiting[: self._read])
        if call is None or call[0] not in self._tools:
            self._give_up()
            return
        self._take(self._read)
        self._start_call(call[0])
        self._argue(call[1])
        self._state = self._between


def _call_of(text: str) -> tuple[str, str] | None:
    """Returns the name and the arguments, as JSON, of a call; None if it is none."""
    name, _, arguments = text.partition("(")
    try:
        reader = _LiteralReader(arguments)
        given = dict(reader.arguments())
        reader.take_end()
        return name, msgspec.json.encode(given).decode()
    except (_NoCall, ValueError):
        return None


class _NoCall(Exception):
    """The text is no call."""


class _LiteralReader:
    """Reads the literals of one call, from behind its opening bracket."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._next = self._match()

    def take(self, kind: str) -> str:
        token = self._next
        if token is None or token.lastgroup != kind:
            raise _NoCall
        self._at = token.end()
        self._next = self._match()
        return token[kind]

    def take_sign(self, sign: str) -> None:
        if self.take("sign") != sign:
            raise _NoCall

    def take_end(self) -> None:
        if self._next is not None or self._text[self._at :].strip():
            raise _NoCall

    def arguments(self) -> Iterator[tuple[str, object]]:
        """Yields names and values up to the closing bracket."""
        while not self._took(")"):
            if self._took("**"):
                self.take_sign("{")
                yield from self._pairs()
            else:
                name = self.take("name")
                self.take_sign("=")
                yield name, self._value()
            if not self._took(","):
                self.take_sign(")")
                return

    def _pairs(self) -> Iterator[tuple[str, object]]:
        """Yields the keys and values of a dictionary, behind its opening bracket."""
        while not self._took("}"):
            key = _string(self.take("string"))
            self.take_sign(":")
            yield key, self._value()
            if not self._took(","):
                self.take_sign("}")
                return

    def _value(self) -> object:
        token = self._next
        kind = None if token is None else token.lastgroup
        if kind == "string":
            return _string(self.take("string"))
        if kind == "number":
            return _number(self.take("number"))
        if kind == "name":
            word = self.take("name")
            if word not in _WORDS:
                raise _NoCall
            return _WORDS[word]
        if self._took("{"):
            return dict(self._pairs())
        self.take_sign("[")
        return list(self._items())

    def _items(self) -> Iterator[object]:
        while not self._took("]"):
            yield self._value()
            if not self._took(","):
                self.take_sign("]")
                return

    def _took(self, sign: str) -> bool:
        token = self._next
        if token is None or token["sign"] != sign:
            return False
        self.take("sign")
        return True

    def _match(self) -> re.Match[str] | None:
        return _TOKEN.match(self._text, self._at)


def _string(literal: str) -> str:
    text = _ESCAPE.sub(lambda found: _unescaped(found[1]), literal[1:-1])
    # Half a surrogate pair has no encoding.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unescaped(escape: str) -> str:
    if len(escape) > 1:
        return chr(int(escape[1:], 16))
    return _ESCAPED.get(escape, escape if escape in "\"'\\/" else "\\" + escape)


def _number(text: str) -> object:
    """Returns a number as it is written, if JSON has it so: no digit of it is lost."""
    if _JSON_NUMBER.fullmatch(text):
        return msgspec.Raw(text.encode())
    if len(text) > MAX_NUMBER:
        raise _NoCall
    value = float(text)
    if not math.isfinite(value):
        raise _NoCall
    return value
