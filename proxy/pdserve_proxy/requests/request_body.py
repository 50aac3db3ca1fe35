"""The little that the proxy reads of a request body, and what it takes out of one.

All of it is linear in the body's size, whatever the bytes, and done by msgspec and by methods of ``bytes``: some 6 ms a
MiB of the event loop's time at worst. Nothing here may step through a body in Python, or make an object for each of as
many values as a client likes.
"""

from __future__ import annotations

import re

import msgspec

from pdserve.errors import InvalidRequest

INTERNAL_PREFIXES = ("kv_transfer", "pdserve_", "x-pdserve")
"""Top-level keys that begin so are between nodes, never a client's."""

PROMPT_START_BYTES = 4096
"""Of a prompt's beginning, for a policy that looks at it."""

MAX_ANSWERS = 1024
"""Nodes give no more answers to one request (``n`` times prompts): what is above it counts as this."""

MAX_FIELDS = 65_536
"""Of a body from which a field has to be taken out, nested ones and colons in texts included."""

MAX_HITS = 1000
"""Places that are looked at, for a key that may be an internal one."""

_MARKERS = tuple(b'"' + prefix.encode() for prefix in INTERNAL_PREFIXES)
_BEFORE_STRINGS = b"{, \t\r\n"
"""What can stand before the quotation mark that opens a key. One inside a string has a backslash there."""
_ESCAPED_LETTER = re.compile(rb"\\u00(?:2[dD]|5[fF]|6[1456bBeE]|7[023468])")
"""One of the prefixes' characters in a form that hides it. No encoder writes these so."""


class _Head(msgspec.Struct):
    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw(b"false")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    n: msgspec.Raw = msgspec.Raw(b"")
    best_of: msgspec.Raw = msgspec.Raw(b"")


class GenerationBody(msgspec.Struct, frozen=True):
    """A request body as it goes to a node."""

    data: bytes
    model: str | None
    stream: bool
    prompt_start: bytes
    """The first ``PROMPT_START_BYTES`` of its messages or prompt."""
    prompts: int = 1
    """How many it has to be computed for, at most ``MAX_ANSWERS``. What a node would refuse counts as 1."""
    answers: int = 1
    """``n`` for each prompt, at most ``MAX_ANSWERS``: the places in engines' batches that it may take."""


_Items = msgspec.defstruct(
    "_Items",
    [(f"item_{number}", msgspec.Raw, msgspec.Raw(b"")) for number in range(MAX_ANSWERS)],
    array_like=True,
    forbid_unknown_fields=True,
)
"""A list of at most so many: decoding gives up at the first one beyond, however many there are."""

_head_decoder = msgspec.json.Decoder(_Head)
_items_decoder = msgspec.json.Decoder(_Items)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


def read_body(data: bytes) -> GenerationBody:
    """``data`` without internal fields, and what routing and admission need of it.

    Raises InvalidRequest if it is not a JSON object, nested too deeply, or its ``model`` is not a string.
    """
    try:
        head = _head_decoder.decode(data)
        prompt_start = bytes(memoryview(head.messages or head.prompt)[:PROMPT_START_BYTES])
        kept = _without_internal_fields(data)
        prompts = _prompts(head.prompt) if head.prompt else 1
        answers = prompts
        if head.n or head.best_of:
            answers = min(prompts * max(_choices(head.n), _choices(head.best_of)), MAX_ANSWERS)
        return GenerationBody(kept, head.model, bytes(head.stream) == b"true", prompt_start, prompts, answers)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"request body: {exc}", param=_param(exc)) from exc
    except RecursionError as exc:  # msgspec counts the depth of what it skips too
        raise InvalidRequest("the request body is nested too deeply", code="json_too_deep") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequest(f"the request body is not valid JSON: {exc}", code="invalid_json") from exc


def _prompts(prompt: msgspec.Raw) -> int:
    """How many prompts there are in OpenAI's four forms: a string, token ids, or a list of either."""
    text = bytes(memoryview(prompt)[:PROMPT_START_BYTES])
    if not text.startswith(b"["):
        return 1
    first = text[1:].lstrip()[:1]
    if first == b"[":  # each with ids alone: no bracket is inside a string
        return min(max(bytes(prompt).count(b"[") - 1, 1), MAX_ANSWERS)
    if first.isdigit():
        return 1
    try:
        items = _items_decoder.decode(prompt)
    except msgspec.ValidationError:
        return MAX_ANSWERS
    return max(sum(map(bool, msgspec.structs.astuple(items))), 1)


def _choices(value: msgspec.Raw) -> int:
    if not value:
        return 1
    try:
        return max(min(msgspec.json.decode(bytes(memoryview(value)[:64]), type=int), MAX_ANSWERS), 1)
    except msgspec.DecodeError:  # a node refuses it
        return 1


def _without_internal_fields(data: bytes) -> bytes:
    """The same bytes wherever nothing has to go."""
    if not _may_have_internal_fields(data):
        return data
    if data.count(b":") > MAX_FIELDS:
        raise InvalidRequest(
            "the request body has internal fields, or writes plain letters as \\u escapes, and has more than "
            f"{MAX_FIELDS} fields",
            code="too_many_fields",
        )
    fields = _fields_decoder.decode(data)
    kept = {name: value for name, value in fields.items() if not name.startswith(INTERNAL_PREFIXES)}
    return data if len(kept) == len(fields) else _encoder.encode(kept)


def _may_have_internal_fields(data: bytes) -> bool:
    """Whether some string, at any depth, begins as an internal key does. True where that takes long to tell."""
    for marker in _MARKERS:
        at = data.find(marker)  # "in" would take it for a number first, and fail at that
        if at >= 0 and _opens_string(data, marker, at):
            return True
    return data.find(b"\\u00") >= 0 and _ESCAPED_LETTER.search(data) is not None


def _opens_string(data: bytes, marker: bytes, at: int) -> bool:
    """Whether ``marker``, found at ``at``, opens a string there or further on. True after ``MAX_HITS`` that do not."""
    for _ in range(MAX_HITS):
        if at < 0:
            return False
        if data[at - 1] in _BEFORE_STRINGS:
            return True
        at = data.find(marker, at + 1)
    return True


def _param(exc: msgspec.ValidationError) -> str | None:
    return "model" if "$.model" in str(exc) else None
