"""Reads the few fields of a request body that the proxy needs, and removes those that are internal to the cluster.

The work is linear in the body's size, whatever its bytes, and is done by msgspec and by methods of ``bytes``: some 6 ms
of the event loop's time per MiB at worst. Every field is read as a node reads it, or the request could ask a node for
what the proxy has not counted. No code here may step through a body in Python, nor make an object for each
of an unbounded number of values.
"""

from __future__ import annotations

import re

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.http.request import read_whole
from pdserve.wire.terms import MAX_PRIORITY

INTERNAL_PREFIXES = ("kv_transfer", "pdserve_", "x-pdserve")
"""The beginnings of top-level keys that nodes use among themselves and that clients may not send."""

PROMPT_START_BYTES = 4096
"""The bytes of a prompt's beginning that routing policies see."""

MAX_ANSWERS = 1024
"""The most answers (``n`` times prompts) that nodes give to one request. A larger number counts as this one."""

MAX_FIELDS = 65_536
"""The most fields of a body from which one has to be removed; nested fields and colons in texts count too."""

MAX_HITS = 1000
"""The number of places in a body that are checked for an internal key."""

_TRUE = msgspec.Raw(b"true")
_MARKERS = tuple(b'"' + prefix.encode() for prefix in INTERNAL_PREFIXES)
_BEFORE_STRINGS = b"{, \t\r\n"
"""The bytes that can precede the quotation mark that opens a key. Inside a string a backslash precedes it."""
_ESCAPED_LETTER = re.compile(rb"\\u00(?:2[dD]|5[fF]|6[1456bBeE]|7[023468])")
"""A character of the prefixes in an escaped form that hides it. No encoder writes these characters so."""


class _Head(msgspec.Struct):
    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw(b"false")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    n: msgspec.Raw = msgspec.Raw(b"")
    best_of: msgspec.Raw = msgspec.Raw(b"")
    priority: msgspec.Raw = msgspec.Raw(b"")


class GenerationBody(msgspec.Struct, frozen=True):
    """A request body as it goes to a node."""

    data: bytes
    model: str | None
    stream: bool
    prompt_start: bytes
    """The first ``PROMPT_START_BYTES`` of the prompt, or of the instructions and the messages."""
    prompts: int = 1
    """The number of prompts, at most ``MAX_ANSWERS``. A value that a node would refuse counts as 1."""
    answers: int = 1
    """``n`` times the prompts, at most ``MAX_ANSWERS``: the places in engines' batches that the request may take."""
    priority: int = 0
    """The request's priority. A value that a node would refuse counts as 0."""


_Items = msgspec.defstruct(
    "_Items",
    [(f"item_{number}", msgspec.Raw, msgspec.Raw(b"")) for number in range(MAX_ANSWERS)],
    array_like=True,
    forbid_unknown_fields=True,
)
"""A list of at most ``MAX_ANSWERS`` items: decoding stops at the first item beyond, however long the list is."""

_head_decoder = msgspec.json.Decoder(_Head)
_items_decoder = msgspec.json.Decoder(_Items)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


def read_body(data: bytes) -> GenerationBody:
    """Returns ``data`` without internal fields, with what routing and admission need to know of it.

    Raises InvalidRequest if it is not a JSON object, nested too deeply, or its ``model`` is not a string.
    """
    try:
        head = _head_decoder.decode(data)
        prompt_start = _prompt_start(head)
        own = _without_internal_fields(data)
        prompts = _prompts(head.prompt) if head.prompt else 1
        answers = prompts
        if head.n or head.best_of:
            answers = min(prompts * max(_count(head.n), _count(head.best_of)), MAX_ANSWERS)
        priority = _priority(head.priority) if head.priority else 0
        stream = head.stream == _TRUE
        return GenerationBody(own, head.model, stream, prompt_start, prompts, answers, priority)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"request body: {exc}", param=_param(exc)) from exc
    except RecursionError as exc:  # msgspec counts the depth of what it skips too
        raise InvalidRequest("the request body is nested too deeply", code="json_too_deep") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        if not data.strip():
            raise InvalidRequest("the request has no body: it takes a JSON object", code="empty_body") from exc
        raise InvalidRequest(f"the request body is not valid JSON: {exc}", code="invalid_json") from exc


def _prompt_start(head: _Head) -> bytes:
    asked = _beginning(head.messages or head.prompt or head.input)
    if not (head.system or head.instructions):
        return asked
    return (_beginning(head.system) + _beginning(head.instructions) + asked)[:PROMPT_START_BYTES]


def _beginning(part: msgspec.Raw) -> bytes:
    # A view spares a copy of all of a large value, and costs more than the copy of a small one.
    return bytes(part) if len(part) <= PROMPT_START_BYTES else bytes(memoryview(part)[:PROMPT_START_BYTES])


def _prompts(prompt: msgspec.Raw) -> int:
    """Returns the number of prompts in any of OpenAI's four forms: a string, token ids, or a list of either."""
    text = _beginning(prompt)
    if not text.startswith(b"["):
        return 1
    first = text[1:].lstrip()[:1]
    if first == b"[":  # lists of token ids: no bracket can be inside a string
        return min(max(bytes(prompt).count(b"[") - 1, 1), MAX_ANSWERS)
    if first.isdigit():
        return 1
    try:
        items = _items_decoder.decode(prompt)
    except msgspec.ValidationError:
        return MAX_ANSWERS
    return max(sum(map(bool, msgspec.structs.astuple(items))), 1)


def _count(value: msgspec.Raw) -> int:
    if not value:
        return 1
    count = read_whole(bytes(value))
    return 1 if count is None else max(min(count, MAX_ANSWERS), 1)  # a node will refuse what is no count


def _priority(value: msgspec.Raw) -> int:
    priority = read_whole(bytes(value))
    return priority if priority is not None and abs(priority) <= MAX_PRIORITY else 0  # a node will refuse another


def _without_internal_fields(data: bytes) -> bytes:
    """Returns ``data`` without internal fields, and ``data`` itself if it has none."""
    if not _may_have_internal_fields(data):
        return data
    if data.count(b":") > MAX_FIELDS:
        raise InvalidRequest(
            "the request body has internal fields, or writes plain letters as \\u escapes, and has more than "
            f"{MAX_FIELDS} fields",
            code="too_many_fields",
        )
    fields = _fields_decoder.decode(data)
    own = {name: value for name, value in fields.items() if not name.startswith(INTERNAL_PREFIXES)}
    return data if len(own) == len(fields) else _encoder.encode(own)


def _may_have_internal_fields(data: bytes) -> bool:
    """Returns whether a string at any depth begins as an internal key does, and True where that takes long to tell."""
    for marker in _MARKERS:
        at = data.find(marker)  # "in" would take it for a number first, and fail at that
        if at >= 0 and _opens_string(data, marker, at):
            return True
    return data.find(b"\\u00") >= 0 and _ESCAPED_LETTER.search(data) is not None


def _opens_string(data: bytes, marker: bytes, at: int) -> bool:
    """Returns whether ``marker`` opens a string at ``at`` or further on, and True after ``MAX_HITS`` that do not."""
    for _ in range(MAX_HITS):
        if at < 0:
            return False
        if data[at - 1] in _BEFORE_STRINGS:
            return True
        at = data.find(marker, at + 1)
    return True


def _param(exc: msgspec.ValidationError) -> str | None:
    return "model" if "$.model" in str(exc) else None
