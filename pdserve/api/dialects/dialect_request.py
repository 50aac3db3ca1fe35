"""What the requests of all dialects have in common, and the chat request that they become.

Errors name the fields of that chat request as the clients of the dialect know them (``in_own_names``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from pdserve.api.requests.chat_messages import not_text
from pdserve.api.requests.openai_request import ChatRequest, invalid_field
from pdserve.api.requests.request_fields import SharedFields, unsupported
from pdserve.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

MAX_PARTS = 4_096
"""The most parts that one message may have."""
MAX_TOOLS = 1_024
Parts: TypeAlias = Annotated[list[Any], Meta(max_length=MAX_PARTS)]
ToolEntries: TypeAlias = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
"""Tools, each of which is checked as it is translated."""
MEDIA = ("image", "input_image", "image_url", "input_audio", "input_file", "document", "file", "video_url", "audio_url")
"""The types of parts, in all dialects, that are something else than text: images, sound and files."""


class DialectRequest(SharedFields, kw_only=True):
    """The fields that a dialect's request and the chat request have under the same names."""

    chat_template_kwargs: dict[str, Any] | None = None


class TranslatedChat(ChatRequest, kw_only=True):
    """The chat request that a dialect's request has become."""

    source: Any
    """The dialect's own request."""


_SHARED = [field.name for field in msgspec.structs.fields(DialectRequest)]
_CHAT = {field.name for field in msgspec.structs.fields(ChatRequest)}


def translated(request: DialectRequest, messages: Sequence[Mapping[str, Any]], **fields: Any) -> TranslatedChat:
    """Returns the chat request with these messages and ``fields``, of which those that are None are left out.

    Raises InvalidRequest for a field that this model's chat does not have.
    """
    if not messages:
        raise InvalidRequest("there is no message to answer", code="empty_prompt")
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given:
        if name not in _CHAT:
            raise unsupported(name)
    shared = {name: getattr(request, name) for name in _SHARED}
    try:
        return msgspec.convert({**shared, **given, "messages": list(messages), "source": request}, TranslatedChat)
    except msgspec.ValidationError as exc:
        raise invalid_field(exc, {}) from exc


def read_part(value: Any, kinds: Mapping[str, type[T]], where: str, default: str = "") -> T:
    """Returns ``value`` as the struct that ``kinds`` has for its ``type``; without a type it counts as ``default``.

    Raises InvalidRequest that names the place.
    """
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{where}' must be an object", param=where)
    kind = value.get("type", default)
    struct = kinds.get(kind) if isinstance(kind, str) else None
    if struct is None and kind in MEDIA:
        raise not_text(where, next(iter(kinds)))
    if struct is None:
        known = f"one of {', '.join(kinds)}" if len(kinds) > 1 else repr(next(iter(kinds)))
        raise InvalidRequest(f"'{where}.type' must be {known}", param=f"{where}.type")
    try:
        return msgspec.convert(value, struct)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"'{where}' is not acceptable: {exc}", param=where) from exc


def drop_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


_FIRST_NAME = re.compile("[a-z_]*")
_FUNCTION = ".function."

RESPONSES_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
MESSAGES_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}


def own_name(name: str, names: Mapping[str, str]) -> str:
    """Returns what the dialect of ``names`` calls a field of a chat request.

    Of a field that the dialect writes in another way, it is the name of the whole field.
    """
    if not names:
        return name
    first = _FIRST_NAME.match(name)
    return names.get(first[0] if first else "", name.replace(_FUNCTION, "."))


def in_own_names(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Returns ``error`` with the dialect's name of the field at fault."""
    if error.param is None or (own := own_name(error.param, names)) == error.param:
        return error
    message = error.message.replace(repr(error.param), repr(own))
    return InvalidRequest(message, param=own, code=error.code, retry_after_s=error.retry_after_s)
