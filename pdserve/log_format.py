"""How log lines look, how many of them an event may cause, and what of others' texts a terminal is given.

It writes log records as JSON, one object a line, for programs that collect logs.

A message of pdserve is a template with ``name=%s`` in it. The names become fields of the object, with the arguments as
their values. They are taken from the template and never from the finished text, so that no text of a client or a peer
can bring a field about.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from functools import lru_cache
from types import TracebackType
from typing import TypeAlias

import msgspec

MAX_TEXT_CHARS = 8192
"""Longer texts of messages and fields are cut."""

FieldValue: TypeAlias = str | int | float | bool | None

_SPECIFIER = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?%[-+ #0]*\d*(?:\.\d+)?(?P<type>[a-zA-Z%])")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_DURATIONS = ("_ms", "_s")


class LogThrottle:
    """Counts the events of one kind, and lets one log line through every ``every_s`` seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_s = float("-inf")
        self._events = 0

    def add(self, now: float) -> int:
        """Counts one event. Returns how many there were since the last line if another is due, and otherwise 0."""
        self._events += 1
        if now < self._next_s:
            return 0
        events, self._events = self._events, 0
        self._next_s = now + self._every_s
        return events


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a log, as JSON."""

    time: str
    """In UTC, as RFC 3339 has it."""
    level: str
    process: str
    """Which process wrote it: ``proxy``, ``worker``, ``api``, ``engine``, ``rank 1``."""
    logger: str
    message: str
    node: str = ""
    request_id: str = ""
    fields: dict[str, FieldValue] = {}
    exception: str = ""
    """The traceback of an exception."""


class JsonFormatter(logging.Formatter):
    """Formats records as ``LogLine``."""

    def __init__(self, process: str, node: str = "") -> None:
        super().__init__()
        self._process = process
        self.node = node

    def format(self, record: logging.LogRecord) -> str:
        fields = fields_of(record)
        request_id = fields.pop("request_id", None)
        line = LogLine(
            time=f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            level=record.levelname,
            process=self._process,
            node=self.node,
            logger=record.name,
            message=_clean(record.getMessage()),
            request_id="" if request_id in (None, "-") else str(request_id),
            fields=fields,
            exception=_clean(self.formatException(record.exc_info)) if record.exc_info else "",
        )
        return msgspec.json.encode(line).decode()


def fields_of(record: logging.LogRecord) -> dict[str, FieldValue]:
    """Returns the named arguments of a record's template. Unknown values (``-``) are None."""
    arguments = record.args
    if not isinstance(arguments, tuple) or not isinstance(record.msg, str):
        return {}
    fields: dict[str, FieldValue] = {}
    for name, argument in zip(_names(record.msg), arguments, strict=False):
        if name is not None:
            fields[name] = _value(name, argument)
        elif not isinstance(argument, str | int | float | BaseException | None):
            # A request or a transfer, whose own name is a list of fields.
            fields |= _named(str(argument))
    return fields


@lru_cache(maxsize=1024)
def _names(template: str) -> tuple[str | None, ...]:
    """Returns the name before each argument of a template, or None where it has no name."""
    found = _SPECIFIER.finditer(template)
    return tuple(match["name"] for match in found if match["type"] != "%")


def _named(text: str) -> dict[str, FieldValue]:
    if not text.startswith("request_id="):
        return {}
    parts = (part.partition("=") for part in text.split())
    return {name: _value(name, value) for name, separator, value in parts if separator}


def _value(name: str, argument: object) -> FieldValue:
    if isinstance(argument, bool | int | float) or argument is None:
        return argument
    text = _clean(str(argument))
    if text == "-" and name != "request_id":
        return None
    if name.endswith(_DURATIONS) and _NUMBER.fullmatch(text):
        return float(text)
    return text


def _clean(text: str) -> str:
    """Returns ``text`` as JSON can have it, within bounds."""
    if len(text) > MAX_TEXT_CHARS:
        text = text[:MAX_TEXT_CHARS] + " (cut)"
    return text.encode("utf-8", "replace").decode()


def log_all_as_json(formatter: JsonFormatter) -> None:
    """Makes warnings of Python, and exceptions that nobody handles, lines of the log as well."""
    logging.captureWarnings(True)
    log = logging.getLogger("pdserve")

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        log.critical("an exception that nobody handles", exc_info=(kind, value, traceback))

    sys.excepthook = hook

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            hook(args.exc_type, args.exc_value, args.exc_traceback)

    threading.excepthook = thread_hook
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)


def name_node(node: str) -> None:
    """Names this process's node in the lines that follow, if they are JSON."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.node = node


def as_text(line: str) -> str:
    """Returns a line of a JSON log as a line for people, and any other line as it is."""
    if not line.startswith("{"):
        return line
    try:
        read = msgspec.json.decode(line, type=LogLine)
    except msgspec.MsgspecError:
        return line
    text = f"{read.time} {read.level} {read.logger}: {read.message}"
    return f"{text}\n{read.exception}" if read.exception else text


_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Returns ``text`` without control characters, of which line feeds and tabs stay.

    With the others, a text could move the cursor, change the terminal or write to its clipboard.
    """
    return text.translate(_CONTROLS)


def printable_line(text: str) -> str:
    """Returns ``text`` as one line, with a question mark in place of each character that a terminal may obey."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
