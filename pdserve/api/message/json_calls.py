"""Calls that are JSON objects with a name and arguments: Hermes and Qwen, Llama 3, Nemotron, Mistral.

<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>
[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
[TOOL_CALLS]f[ARGS]{"a": 1}
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from pdserve.api.message.call_parser import MAX_HELD, CallMarkers, CallParser
from pdserve.api.message.json_text import JsonText, as_json
from pdserve.api.message.tool_schemas import ToolSchema

HERMES = CallMarkers(("<tool_call>",), "</tool_call>")
LLAMA_JSON = CallMarkers(("<|python_tag|>",), bare="{")
NEMOTRON = CallMarkers(("<TOOLCALL>",), "</TOOLCALL>", separators=" \t\r\n,;[]")
MISTRAL = CallMarkers(("[TOOL_CALLS]",), separators=" \t\r\n,;[]", inner=("[ARGS]", "[CALL_ID]"))

ARGUMENTS = ("arguments", "parameters")
MAX_TRIES = 4
"""How many inner objects of a call are looked at, whether they are the arguments."""
MAX_NAME = 256
"""How many characters stand before the arguments at most, where a name without quotes is there."""
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?")


class JsonCallParser(CallParser):
    """Reads calls as JSON objects. Where the name comes first, the arguments go on as they come."""

    def __init__(
        self, markers: CallMarkers, tools: Mapping[str, ToolSchema], *, parallel: bool, named: bool = False
    ) -> None:
        """``named`` says whether a call may also be a name with the object of its arguments behind it."""
        super().__init__(markers, tools, parallel=parallel)
        self._named = named
        self._object = JsonText()
        self._arguments_depth = 0
        """How many objects are open around the arguments."""
        self._call_start = 0
        """Where the object begins in what is held."""
        self._tries = 0

    def _begins_call(self, char: str) -> bool:
        return char == "{" or (self._named and (char.isalnum() or char in "_-."))

    def _call(self) -> bool:
        if self._waiting[0] != "{":
            return self._read_name()
        self._object, self._call_start, self._tries = JsonText(), len(self._held), MAX_TRIES
        self._state = self._read_object
        return True

    def _read_name(self) -> bool:
        head, brace, _ = self._waiting[:MAX_NAME].partition("{")
        if not brace and len(self._waiting) < MAX_NAME and not self._over:
            return False
        match = _NAMED.fullmatch(head) if brace else None
        if match is None or match[1] not in self._tools:
            self._fail()
            return True
        self._take(len(head))
        self._start_call(match[1])
        self._object, self._arguments_depth = JsonText(), 0
        self._state = self._read_arguments
        return True

    def _read_object(self) -> bool:
        """Reads an object up to its arguments, or to its end where its name does not come before them."""
        for index, char in enumerate(self._waiting):
            depth = self._object.depth
            if self._object.add(char) is None or len(self._held) + index >= MAX_HELD:
                self._held += self._take(index)
                self._fail()
                return True
            if self._object.over:
                self._held += self._take(index + 1)
                self._read_whole(self._held[self._call_start :])
                return True
            if depth == 1 and char == "{" and (name := self._name_before(self._waiting[:index])) is not None:
                self._take(index + 1)
                self._start_call(name)
                self._argue(char)
                self._arguments_depth = 1
                self._state = self._read_arguments
                return True
        self._held += self._take(len(self._waiting))
        return False

    def _name_before(self, rest: str) -> str | None:
        """Returns the function's name if the object that begins here is that of its arguments."""
        self._tries -= 1
        if self._tries < 0:
            return None
        fields = _fields(self._held[self._call_start :] + rest + "null}")
        if fields is None or next(reversed(fields)) not in ARGUMENTS:
            return None
        return self._name(fields)

    def _name(self, fields: Mapping[str, msgspec.Raw]) -> str | None:
        name = _text(fields.get("name", _NULL))
        return name if name in self._tools else None

    def _read_whole(self, text: str) -> None:
        """Reads a complete call."""
        fields = _fields(text) or {}
        name = self._name(fields)
        arguments = _arguments(fields)
        if name is None or arguments is None:
            self._fail()
            return
        self._start_call(name)
        self._argue(arguments)
        self._state = self._between

    def _read_arguments(self) -> bool:
        written: list[str] = []
        for index, char in enumerate(self._waiting):
            if (piece := self._object.add(char)) is None:
                self._argue("".join(written))
                self._take(index)
                brackets = ("]" if "]" in self._markers.separators else "") + "}" * self._arguments_depth
                self._pass_on(self._markers.around, brackets, self._between)
                return True
            written.append(piece)
            if self._object.depth == self._arguments_depth:
                self._argue("".join(written))
                self._take(index + 1)
                self._state = self._between if self._object.over else self._read_rest
                return True
        self._argue("".join(written))
        self._take(len(self._waiting))
        return False

    def _read_rest(self) -> bool:
        """Skips what an object has behind its arguments."""
        for index, char in enumerate(self._waiting):
            if self._object.add(char) is None:
                self._take(index)
                self._fail()
                return True
            if self._object.over:
                self._take(index + 1)
                self._state = self._between
                return True
        self._take(len(self._waiting))
        return False


def _fields(text: str) -> dict[str, msgspec.Raw] | None:
    """Returns the fields of an object; None if it is none."""
    if (written := as_json(text)) is None:
        return None
    try:
        return _object.decode(written)
    except (msgspec.DecodeError, RecursionError):
        return None


def _text(value: msgspec.Raw) -> str | None:
    try:
        return _string.decode(value)
    except msgspec.DecodeError:
        return None


def _arguments(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """Returns the arguments of a complete call as JSON. A call may lack them, or have them as a string of JSON."""
    given = next((fields[key] for key in ARGUMENTS if key in fields), _NULL)
    text = bytes(given).decode() if (string := _text(given)) is None else string
    if text == "null":
        return "{}"
    if string is not None and text.lstrip().startswith("{"):
        return text if (written := as_json(text)) is None else written
    return text if _fields(text) is not None else None


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_string = msgspec.json.Decoder(str)
_NULL = msgspec.Raw(b"null")
