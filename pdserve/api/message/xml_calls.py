"""Calls in Qwen3-Coder's form, whose arguments have tags of their own.

<tool_call>
<function=f>
<parameter=a>
1
</parameter>
</function>
</tool_call>

A plain string stands there as it is. Any other value is read as JSON, or as Python's ``True``, ``False`` or ``None``,
if the schema of its parameter admits what that is; if not, and the schema admits strings, it is a string. The arguments
may also be one JSON object in place of the parameters. Models leave out ``<tool_call>`` now and then.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from pdserve.api.message.call_parser import MAX_HELD, CallMarkers, CallParser, begins, find_marker
from pdserve.api.message.json_text import JsonText, as_json
from pdserve.api.message.tool_schemas import BOOLEAN, NULL, STRING, PlainString, SchemaKinds, ToolSchema, kind_of

QWEN_XML = CallMarkers(("<tool_call>",), "</tool_call>", unwrapped="<function=")

FUNCTION_END = "</function>"
PARAMETER_END = "</parameter>"
_TEXT_ENDS = (f"\n{PARAMETER_END}", PARAMETER_END)
_FUNCTION = re.compile(r"<function=([\w.-]{1,128})>")
PARAMETER_NAME = re.compile(r"[^<>\s]{1,256}")
_PARAMETER = re.compile(rf"\s*<parameter=({PARAMETER_NAME.pattern})>\n?")
_END = re.compile(rf"\s*{FUNCTION_END}")
_VALUE_END = re.compile(rf"\s*{PARAMETER_END}")
MAX_TAG = 512
"""How many characters a tag has at most, with the spaces before it."""


_NULLS = ("null", "None")


def plain_text(schema: object, kinds: SchemaKinds) -> PlainString | None:
    """Returns what a parameter's schema says of a string that stands between its tags as it is; None for other values.

    ``kinds`` looks at the schemas of the parameter's function.
    """
    found = kinds.plain_string(schema)
    if found is None:
        return None
    values = (*found.schema.get("enum", ()), found.schema.get("const", ""))
    unclear = any(PARAMETER_END in value or (found.nullable and value in _NULLS) for value in values)
    return None if unclear else found


class XmlCallParser(CallParser):
    """Reads calls whose arguments come one by one. A text goes on as it comes, any other value when it is complete."""

    def __init__(self, tools: Mapping[str, ToolSchema], *, parallel: bool) -> None:
        super().__init__(QWEN_XML, tools, parallel=parallel)
        self._tool = ToolSchema("")
        self._given: set[str] = set()
        """The parameters that the call has."""
        self._object = JsonText()
        """The arguments where they are one object, or a value that may be JSON."""
        self._name = ""
        """The parameter whose value comes."""
        self._value_start = 0
        self._followed = 0
        """How many of the characters that wait have been looked at, whether they are JSON."""
        self._is_json = False
        self._searched = 0
        """Up to here the characters that wait have no tag behind a value."""

    def _begins_call(self, char: str) -> bool:
        return char == "<"

    def _call(self) -> bool:
        tag, end, _ = self._waiting[:MAX_TAG].partition(">")
        if not end and len(self._waiting) < MAX_TAG and not self._over:
            return False
        match = _FUNCTION.fullmatch(tag + end)
        if match is None or match[1] not in self._tools:
            self._held += self._take(1)  # what is read once more does not begin a call again
            self._fail()
            return True
        self._take(match.end())
        self._tool, self._given = self._tools[match[1]], set()
        self._start_call(match[1])
        self._state = self._read_start
        return True

    def _read_start(self) -> bool:
        """Looks whether the arguments are one object."""
        start = len(self._waiting) - len(self._waiting.lstrip())
        if start == len(self._waiting):
            return len(self._waiting) > MAX_TAG and self._break_off()
        if self._waiting[start] == "{":
            self._take(start)
            self._object, self._state = JsonText(), self._read_object
        else:
            self._argue("{")
            self._state = self._read_parameter
        return True

    def _read_object(self) -> bool:
        written: list[str] = []
        for index, char in enumerate(self._waiting):
            if (piece := self._object.add(char)) is None:
                self._argue("".join(written))
                self._take(index)
                self._pass_on((FUNCTION_END, *self._markers.around), "", self._read_end)
                return True
            written.append(piece)
            if self._object.over:
                self._argue("".join(written))
                self._take(index + 1)
                self._state = self._read_end
                return True
        self._argue("".join(written))
        self._take(len(self._waiting))
        return False

    def _read_end(self) -> bool:
        """Reads the end of a call whose arguments are complete."""
        if end := _END.match(self._waiting):
            self._take(end.end())
            self._state = self._between
            return True
        if begins(self._waiting.lstrip(), FUNCTION_END) is None and len(self._waiting) <= MAX_TAG:
            return False
        return self._break_off()

    def _read_parameter(self) -> bool:
        """Reads one parameter with its value, or the end of the call."""
        if end := _END.match(self._waiting):
            self._take(end.end())
            self._argue("}")
            self._state = self._between
            return True
        tag = _PARAMETER.match(self._waiting)
        # The line that ends the tag belongs to it, and may be the next character.
        if tag is None or tag.end() == len(self._waiting):
            return len(self._waiting) > MAX_TAG and self._break_off()
        plain = None if tag[1] in self._given else plain_text(self._tool.parameter(tag[1]), self._tool.values)
        if plain is not None:
            self._take(tag.end())
            self._begin_argument(tag[1])
            self._state = self._read_nullable if plain.nullable else self._read_quote
            return True
        self._value_start = self._followed = self._searched = tag.end()
        self._object, self._is_json = JsonText(), True
        self._name, self._state = tag[1], self._read_value
        return True

    def _read_value(self) -> bool:
        """Reads a value, which is passed on when it is complete."""
        end = self._value_end()
        if 0 <= end <= MAX_HELD:
            self._add_argument(self._name, self._waiting[self._value_start : end].removesuffix("\n"))
            self._take(end + len(PARAMETER_END))
            self._state = self._read_parameter
            return True
        return len(self._waiting) > MAX_HELD + len(PARAMETER_END) and self._break_off()

    def _value_end(self) -> int:
        """Returns where the tag behind a value stands; a negative number if that is not known yet.

        The same tag in a text of a JSON value does not end it.
        """
        while self._is_json and not self._object.over and self._followed < len(self._waiting):
            self._is_json = self._object.add(self._waiting[self._followed]) is not None
            self._followed += 1
        if self._is_json and self._object.over:
            if end := _VALUE_END.match(self._waiting, self._followed):
                return end.end() - len(PARAMETER_END)
            self._is_json = begins(self._waiting[self._followed :].lstrip(), PARAMETER_END) is None
        if self._is_json and not self._over:
            return -1
        found = self._waiting.find(PARAMETER_END, self._searched)
        if found < 0:
            # The rest may have the beginning of the tag.
            self._searched = max(self._searched, len(self._waiting) - len(PARAMETER_END) + 1)
        return found

    def _read_nullable(self) -> bool:
        """Looks whether the value is null or a text."""
        found = _NULL.match(self._waiting)
        if found is None and not self._over and _may_be_null(self._waiting):
            return False
        if found is None:
            return self._read_quote()
        self._take(found.end())
        self._argue("null")
        self._state = self._read_parameter
        return True

    def _read_quote(self) -> bool:
        self._argue('"')
        self._state = self._read_text
        return True

    def _read_text(self) -> bool:
        """Reads a text, which goes on as it comes."""
        start, marker = find_marker(self._waiting, _TEXT_ENDS)
        if start:
            self._argue(_encode(self._take(start))[1:-1])
        if marker:
            self._take(len(marker))
            self._argue('"')
            self._state = self._read_parameter
        return bool(marker)

    def _break_off(self) -> bool:
        """Ends a call that is none from here on."""
        self._fail()
        return True

    def _add_argument(self, name: str, text: str) -> None:
        if name not in self._given:
            self._begin_argument(name)
            self._argue(_encode(_value(text, self._tool.kinds(name))))

    def _begin_argument(self, name: str) -> None:
        self._argue(f"{', ' if self._given else ''}{_encode(name)}: ")
        self._given.add(name)


def _may_be_null(text: str) -> bool:
    """Returns whether the beginning of a value may become that of null."""
    begun = text.strip()
    if len(text) > MAX_TAG:
        return False
    for word in _NULLS:
        if word.startswith(begun):
            return True
        if begun.startswith(word):
            return PARAMETER_END.startswith(begun[len(word) :].lstrip())
    return False


def _value(text: str, kinds: frozenset[str]) -> object:
    """Returns the value that ``text`` writes, of one of these kinds if there is one."""
    word = text.strip()
    written = _word(word, kinds)
    try:
        value = msgspec.Raw(_raw.decode(as_json(word) or word))
        kind = kind_of(_any.decode(value))
    except (msgspec.DecodeError, RecursionError):
        return text if written is None else _WORDS[written]
    if kind in kinds or STRING not in kinds:
        return value
    return text if written is None else _WORDS[written]


def _word(text: str, kinds: frozenset[str]) -> str | None:
    """Returns the word of Python that ``text`` is, if a value may be that."""
    if BOOLEAN in kinds and text.capitalize() in ("True", "False"):
        return text.capitalize()
    if text == "None" and NULL in kinds:
        return text
    # Where there can be no string, anything is better.
    return text if text in _WORDS and STRING not in kinds else None


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


_WORDS = {"True": True, "False": False, "None": None}
_NULL = re.compile(rf"\s*(?:{'|'.join(_NULLS)})\s*{PARAMETER_END}")
_raw = msgspec.json.Decoder(msgspec.Raw)
_any = msgspec.json.Decoder()
