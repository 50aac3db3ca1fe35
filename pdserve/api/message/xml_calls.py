"""Calls in Qwen3-Coder's form, whose arguments have tags of their own.

<tool_call>
<function=f>
<parameter=a>
1
</parameter>
</function>
</tool_call>

A plain string stands there as it is. Other values are JSON, or text that is none. The arguments may also be one JSON
object in place of the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from pdserve.api.message.call_parser import MAX_HELD, CallMarkers, CallParser
from pdserve.api.message.json_text import JsonText
from pdserve.api.message.markers import begins, find_marker
from pdserve.api.message.tool_schemas import ANNOTATIONS, ToolSchema

QWEN_XML = CallMarkers(("<tool_call>",), "</tool_call>")

FUNCTION_END = "</function>"
PARAMETER_END = "</parameter>"
_TEXT_ENDS = (f"\n{PARAMETER_END}", PARAMETER_END)
_FUNCTION = re.compile(r"<function=([\w.-]{1,128})>")
PARAMETER_NAME = re.compile(r"[^<>\s]{1,256}")
_PARAMETER = re.compile(rf"\s*<parameter=({PARAMETER_NAME.pattern})>\n?")
_END = re.compile(rf"\s*{FUNCTION_END}")
_VALUE_END = re.compile(rf"\s*{PARAMETER_END}")
_PLAIN_KEYS = ANNOTATIONS | {"type", "minLength", "maxLength", "enum", "const"}
MAX_TAG = 512
"""How many characters a tag has at most, with the spaces before it."""


def is_plain_text(schema: object) -> bool:
    """Returns whether a parameter of this schema is a string that stands between its tags as it is."""
    if not isinstance(schema, dict) or schema.get("type") != "string" or not schema.keys() <= _PLAIN_KEYS:
        return False
    choices = schema.get("enum", [])
    if not isinstance(choices, list):
        return False
    values = [*choices, schema["const"]] if "const" in schema else choices
    return all(isinstance(one, str) and PARAMETER_END not in one for one in values)


class XmlCallParser(CallParser):
    """Reads calls whose arguments come one by one. A text goes on as it comes, any other value when it is whole."""

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
        for index, char in enumerate(self._waiting):
            if not self._object.add(char):
                self._argue(self._take(index))
                return self._break_off()
            if self._object.over:
                self._argue(self._take(index + 1))
                self._state = self._read_end
                return True
        self._argue(self._take(len(self._waiting)))
        return False

    def _read_end(self) -> bool:
        """Reads the end of a call whose arguments are whole."""
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
        if tag[1] not in self._given and is_plain_text(self._tool.parameter(tag[1])):
            self._take(tag.end())
            self._begin_argument(tag[1])
            self._argue('"')
            self._state = self._read_text
            return True
        self._value_start = self._followed = tag.end()
        self._object, self._is_json = JsonText(), True
        self._name, self._state = tag[1], self._read_value
        return True

    def _read_value(self) -> bool:
        """Reads a value, which is passed on when it is whole."""
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
            self._is_json = self._object.add(self._waiting[self._followed])
            self._followed += 1
        if self._is_json and self._object.over:
            if end := _VALUE_END.match(self._waiting, self._followed):
                return end.end() - len(PARAMETER_END)
            self._is_json = begins(self._waiting[self._followed :].lstrip(), PARAMETER_END) is None
        if self._is_json and not self._over:
            return -1
        return self._waiting.find(PARAMETER_END, self._value_start)

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
            value = _value(text)
            is_text = isinstance(value, msgspec.Raw) and bytes(value)[:1] == b'"'
            self._argue(_encode(text if self._tool.takes_text(name) and not is_text else value))

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
