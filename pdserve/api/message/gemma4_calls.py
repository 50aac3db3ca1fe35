"""Calls in Gemma 4's form, which is near JSON: keys are bare, and texts stand between marks of their own.

<|tool_call>call:f{city:<|"|>Köln<|"|>,days:3,deep:{on:true,list:[1,null]}}<tool_call|>

Nothing is escaped in such a text. Keys and texts may also be JSON's, as the grammar of forced calls writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pdserve.api.message.call_parser import MAX_HELD, CallMarkers, CallParser, begins
from pdserve.api.message.json_text import MAX_DEPTH
from pdserve.api.message.tool_schemas import ToolSchema

QUOTE = '<|"|>'
GEMMA4 = CallMarkers(("<|tool_call>",), "<tool_call|>", inner=(QUOTE,))

MAX_HEAD = 256
"""How many characters stand before the arguments at most."""
_HEAD = re.compile(r"call:\s*([\w.-]+)\s*\{")
_SPACES = re.compile(r"\s*")
_KEY = re.compile(r"[^\s:{}\[\],\"<]+")
_BARE = re.compile(r"[^{}\[\],\"<]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_decoder = json.JSONDecoder(strict=False)


class Gemma4CallParser(CallParser):
    """Reads calls, each of which is passed on when it is complete."""

    def __init__(self, tools: Mapping[str, ToolSchema], *, parallel: bool) -> None:
        super().__init__(GEMMA4, tools, parallel=parallel)
        self._name = ""
        self._read = 0
        """How many of the characters that wait are of the call."""
        self._start = 0
        """Where the arguments begin in these."""
        self._depth = 0
        self._quote = ""
        """What ends the text that is open; empty if none is."""
        self._escaped = False

    def _begins_call(self, char: str) -> bool:
        return char == "c"

    def _call(self) -> bool:
        head, brace, _ = self._waiting[:MAX_HEAD].partition("{")
        if not brace and len(self._waiting) < MAX_HEAD and not self._over:
            return False
        match = _HEAD.fullmatch(head + brace)
        self._read = len(head) + len(brace)
        if match is None or match[1] not in self._tools:
            self._give_up()
            return True
        self._name, self._start, self._depth = match[1], self._read - 1, 1
        self._quote, self._escaped = "", False
        self._state = self._read_call
        return True

    def _read_call(self) -> bool:
        while self._read < len(self._waiting):
            taken = self._follow()
            if taken is None and not self._over:
                return False
            self._read += taken or 1
            if self._depth == 0:
                self._read_whole()
                return True
            if self._read >= MAX_HELD or self._depth > MAX_DEPTH:
                self._give_up()
                return True
        if self._over:
            self._give_up()
        return self._over

    def _follow(self) -> int | None:
        """Takes note of the next character, or mark. Returns how many characters it has; None if it may be a mark."""
        char = self._waiting[self._read]
        if self._quote != '"' and char == "<":
            match begins(self._waiting[self._read :], QUOTE):
                case None:
                    return None
                case True:
                    self._quote = "" if self._quote else QUOTE
                    return len(QUOTE)
        elif self._quote == '"':
            closes = char == '"' and not self._escaped
            self._escaped = char == "\\" and not self._escaped
            self._quote = "" if closes else '"'
        elif self._quote:
            pass
        elif char == '"':
            self._quote = char
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return 1

    def _give_up(self) -> None:
        """Makes content of what was read: it is no call. No other call is looked for in it."""
        self._held += self._take(self._read)
        self._fail()

    def _read_whole(self) -> None:
        try:
            arguments = _Reader(self._waiting[self._start : self._read]).whole()
        except ValueError:
            self._give_up()
            return
        self._take(self._read)
        self._start_call(self._name)
        self._argue(arguments)
        self._state = self._between


class _Reader:
    """Writes the arguments of one call as JSON. Raises ValueError for what are none."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> str:
        written = self._value()
        if self._at != len(self._text):
            raise ValueError
        return written

    def _value(self) -> str:
        if self._takes("{"):
            return f"{{{self._listed('}', keyed=True)}}}"
        if self._takes("["):
            return f"[{self._listed(']', keyed=False)}]"
        text = self._quoted()
        if text is not None:
            return text
        bare = self._match(_BARE).strip()
        if bare in _WORDS:
            return _WORDS[bare]
        return bare if _NUMBER.fullmatch(bare) else _encode(bare)

    def _listed(self, closing: str, *, keyed: bool) -> str:
        written: list[str] = []
        while not self._takes(closing):
            if written and not self._takes(","):
                raise ValueError
            if written and self._takes(closing):
                break
            key = self._key() if keyed else ""
            written.append(key + self._value())
        return ", ".join(written)

    def _key(self) -> str:
        key = self._quoted() or _encode(self._match(_KEY))
        if not self._takes(":"):
            raise ValueError
        return f"{key}: "

    def _quoted(self) -> str | None:
        """Returns a text as JSON; None if there is none here."""
        self._skip()
        if self._text.startswith(QUOTE, self._at):
            self._at += len(QUOTE)
            end = self._text.find(QUOTE, self._at)
            if end < 0:
                raise ValueError
            text, self._at = self._text[self._at : end], end + len(QUOTE)
            return _encode(text)
        if self._text.startswith('"', self._at):
            text, self._at = _decoder.raw_decode(self._text, self._at)
            return _encode(text)
        return None

    def _takes(self, text: str) -> bool:
        self._skip()
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        self._skip()
        return True

    def _match(self, wanted: re.Pattern[str]) -> str:
        found = wanted.match(self._text, self._at)
        if found is None:
            raise ValueError
        self._at = found.end()
        return found[0]

    def _skip(self) -> None:
        found = _SPACES.match(self._text, self._at)
        self._at = self._at if found is None else found.end()


def _encode(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
