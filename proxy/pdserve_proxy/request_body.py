"""The little that the proxy reads of a request body, and what it takes out of one."""

from __future__ import annotations

import re
from itertools import accumulate

import msgspec

from pdserve.errors import InvalidRequest

INTERNAL_PREFIXES = ("kv_transfer", "pdserve_", "x-pdserve")
"""Top-level keys that begin so are between nodes, never a client's."""

LEAD_BYTES = 4096
"""Of a prompt's beginning, for a policy that looks at it."""

MAX_DEPTH = 64
"""Of lists and objects within each other. Nodes' decoders recurse."""

_MARKERS = (b"\\u", *(prefix.encode() for prefix in INTERNAL_PREFIXES))
"""Without these bytes in it a body has no such key. An escape (``\\u006b``) can hide one."""


class _Head(msgspec.Struct):
    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw(b"false")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")


class GenerationBody(msgspec.Struct, frozen=True):
    """A request body as it goes to a node."""

    data: bytes
    model: str | None
    stream: bool
    lead: bytes
    """The first ``LEAD_BYTES`` of its messages or prompt."""


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""Into signed bytes: +1 for a bracket that opens, -1 for one that closes."""

_head_decoder = msgspec.json.Decoder(_Head)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


def read_body(data: bytes) -> GenerationBody:
    """``data`` without internal fields, and what routing needs of it.

    Raises InvalidRequest if it is not a JSON object, nested too deeply, or its ``model`` is not a string.
    """
    if not is_shallow(data, MAX_DEPTH):
        raise InvalidRequest(f"the request body is nested more than {MAX_DEPTH} deep", code="json_too_deep")
    try:
        head = _head_decoder.decode(data)
        lead = bytes(memoryview(head.messages or head.prompt)[:LEAD_BYTES])
        return GenerationBody(_without_internal_fields(data), head.model, bytes(head.stream) == b"true", lead)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"request body: {exc}", param=_param(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"the request body is not valid JSON: {exc}", code="invalid_json") from exc


def is_shallow(data: bytes, depth: int) -> bool:
    """Whether brackets in ``data``, some JSON, are at most ``depth`` within each other. Linear, without recursion."""
    if data.count(b"[") + data.count(b"{") <= depth:
        return True
    steps = _STRING.sub(b"", data).translate(_STEPS, _NO_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) <= depth


def _without_internal_fields(data: bytes) -> bytes:
    """The same bytes wherever nothing has to go."""
    for marker in _MARKERS:
        if data.find(marker) >= 0:  # "in" would take it for a number first, and fail at that
            break
    else:
        return data
    fields = _fields_decoder.decode(data)
    kept = {name: value for name, value in fields.items() if not name.startswith(INTERNAL_PREFIXES)}
    return data if len(kept) == len(fields) else _encoder.encode(kept)


def _param(exc: msgspec.ValidationError) -> str | None:
    return "model" if "$.model" in str(exc) else None
