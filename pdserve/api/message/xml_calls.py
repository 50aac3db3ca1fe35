"""Calls in Qwen3-Coder's form, whose arguments have tags of their own.

<tool_call>
<function=f>
<parameter=a>
1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from pdserve.api.message.call_parser import MAX_HELD, CallMarkers, CallParser
from pdserve.api.message.markers import find_marker
from pdserve.api.message.tool_schemas import ToolSchema

QWEN_XML = CallMarkers(("<tool_call>",), "</tool_call>")

FUNCTION_END = "</function>"
PARAMETER_END = "</parameter>"
_TEXT_ENDS = (f"\n{PARAMETER_END}", PARAMETER_END)
_FUNCTION = re.compile(r"<function=([\w.-]{1,128})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]{1,256})>\n?")
_END = re.compile(rf"\s*{FUNCTION_END}")
MAX_TAG = 512
"""How many characters a tag has at most, with the spaces before it."""


class XmlCallParser(CallParser):
    """Reads calls whose arguments come one by one. A text goes on as it comes, any other value when it is whole."""

    def __init__(self, tools: Mapping[str, ToolSchema], *, parallel: bool) -> None:
        super().__init__(QWEN_XML, tools, parallel=parallel)
        self._tool = ToolSchema("")
        self._given: set[str] = set()
        """The parameters that the call has."""

    def _begins_call(self, char: str) -> bool:
        return char == "<"

    def _call(self) -> bool:
        tag, end, _ = self._waiting[:MAX_TAG].partition(">")
        if not end and len(self._waiting) < MAX_TAG and not self._over:
            return False
        match = _FUNCTION.fullmatch(tag + end)
        if match is None or match[1] not in self._tools:
            self._fail()
            return True
        self._take(match.end())
        self._tool, self._given = self._tools[match[1]], set()
        self._start_call(match[1])
        self._argue("{")
        self._state = self._read_parameter
        return True

    def _read_parameter(self) -> bool:
        """Reads one parameter with its value, or the end of the call."""
        if end := _END.match(self._waiting):
            self._take(end.end())
            self._argue("}")
            self._state = self._between
            return True
        tag = _PARAMETER.match(self._waiting)
        if tag is not None and tag[1] not in self._given and self._tool.takes_text(tag[1]):
            self._take(tag.end())
            self._begin_argument(tag[1])
            self._argue('"')
            self._state = self._read_text
            return True
        # The line that ends the tag belongs to it, and may be the next character.
        if tag is not None and tag.end() < len(self._waiting):
            value = self._waiting.find(PARAMETER_END, tag.end())
            if 0 <= value <= MAX_HELD:
                self._add_argument(tag[1], self._waiting[tag.end() : value].removesuffix("\n"))
                self._take(value + len(PARAMETER_END))
                return True
            if len(self._waiting) > MAX_HELD + len(PARAMETER_END):
                return self._break_off()
        elif len(self._waiting) > MAX_TAG:
            return self._break_off()
        return False

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
            self._argue(_encode(_value(text)))

    def _begin_argument(self, name: str) -> None:
        self._argue(f"{', ' if self._given else ''}{_encode(name)}: ")
        self._given.add(name)


def _value(text: str) -> object:
    """Returns the value that ``text`` writes as JSON, or the text itself."""
    try:
        return msgspec.Raw(_raw.decode(text.strip()))
    except (msgspec.DecodeError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


_raw = msgspec.json.Decoder(msgspec.Raw)
