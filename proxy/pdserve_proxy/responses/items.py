"""Reads the items of a request's input, gives each an id, and lists them in pages.

Of an item only what names it is read. No code here makes an object for each of an unbounded number of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.wire.ids import new_id

MAX_ITEMS = 4_096
"""The most items of an input, as many as nodes take."""

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
"""The beginnings of the ids of items, by their types."""

_Items = msgspec.defstruct(
    "_Items",
    [(f"item_{number}", msgspec.Raw, msgspec.Raw(b"")) for number in range(MAX_ITEMS)],
    array_like=True,
    forbid_unknown_fields=True,
)
"""A list of at most ``MAX_ITEMS`` items: decoding stops at the first item beyond, however long the list is."""


class _ItemHead(msgspec.Struct):
    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: msgspec.Raw = msgspec.Raw(b"")


class _Text(msgspec.Struct, tag_field="type", tag="input_text"):
    text: msgspec.Raw


class _SaidText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: msgspec.Raw
    annotations: tuple[()] = ()


class _Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    role: str
    content: list[_Text | _SaidText]
    status: Literal["completed"] = "completed"


class ItemList(msgspec.Struct):
    """A page of the items of which a response was made."""

    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


_items_decoder = msgspec.json.Decoder(_Items)
_head_decoder = msgspec.json.Decoder(_ItemHead)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_objects_decoder = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_encoder = msgspec.json.Encoder()


def input_items(given: msgspec.Raw) -> bytes:
    """Returns the ``input`` of a request as a JSON list of items that have types and ids. Raises InvalidRequest."""
    name = new_id().hex()
    try:
        if bytes(memoryview(given)[:1]) == b'"':
            return _encoder.encode([_message(f"msg_{name}00", "user", given)])
        items = [raw for raw in msgspec.structs.astuple(_items_decoder.decode(given)) if raw]
        return b"[%b]" % b",".join([_with_id(raw, f"{name}{number:02x}") for number, raw in enumerate(items)])
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidRequest(
            f"'input' is not acceptable: it has to be a text or a list of at most {MAX_ITEMS} items", param="input"
        ) from exc


def output_items(output: bytes) -> bytes:
    """Returns a response's output as later ones go on from it: without log probabilities, which no model reads.

    Each token's are a kilobyte and a hundred values. Raises msgspec.DecodeError.
    """
    if b'"logprobs":[{' not in output:
        return output
    items = _objects_decoder.decode(output)
    for item in items:
        if "content" in item:
            parts = _objects_decoder.decode(item["content"])
            for part in parts:
                if "logprobs" in part:
                    part["logprobs"] = msgspec.Raw(b"[]")
            item["content"] = msgspec.Raw(_encoder.encode(parts))
    return _encoder.encode(items)


def page(items: bytes, *, after: str | None, limit: int, newest_first: bool) -> ItemList:
    """Returns up to ``limit`` of ``items`` behind the one that is named ``after``. Raises InvalidRequest."""
    listed = _list_decoder.decode(items)
    if newest_first:
        listed.reverse()
    if after is not None:
        listed = _behind(listed, after)
    shown = listed[:limit]
    ends = [_head_decoder.decode(raw).id for raw in (shown[0], shown[-1])] if shown else [None, None]
    return ItemList(shown, ends[0], ends[1], has_more=len(listed) > limit)


def _behind(listed: Sequence[msgspec.Raw], after: str) -> list[msgspec.Raw]:
    for place, raw in enumerate(listed):
        if _head_decoder.decode(raw).id == after:
            return list(listed[place + 1 :])
    raise InvalidRequest(f"'after' names no item of this response: {after[:200]!r}", param="after")


def _with_id(raw: msgspec.Raw, name: str) -> bytes:
    """Returns an item with its type and its id. A message whose content is a text gets parts, as OpenAI shows it."""
    head = _head_decoder.decode(raw)
    kind = head.type or "message"
    item_id = head.id or f"{_PREFIXES.get(kind, 'item')}_{name}"
    if kind == "message" and bytes(memoryview(head.content)[:1]) == b'"':
        return _encoder.encode(_message(item_id, head.role or "user", head.content))
    # The last field of a name counts, so these are in place of those of the same names that are null.
    added = b"".join(
        b',"%b":%b' % (field, _encoder.encode(value))
        for field, given, value in ((b"type", head.type, kind), (b"id", head.id, item_id))
        if given is None
    )
    fields = bytes(raw).strip()[1:-1].strip()
    return b"{%b}" % (fields + added if fields else added[1:])


def _message(item_id: str, role: str, text: msgspec.Raw) -> _Message:
    part = _SaidText(text) if role == "assistant" else _Text(text)
    return _Message(item_id, role, [part])
