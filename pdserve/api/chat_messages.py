"""Chat messages as clients send them to the plain form that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from pdserve.errors import InvalidRequest

TEXT_PARTS = ("text", "input_text", "output_text")
_READ = ("type", "text")


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their content as one string. Which roles there are is for the template to say.

    Raises InvalidRequest that names the message and the field.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def unread_part_fields(messages: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """What parts of contents say beside their text, each name once."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return tuple(f"messages.content.{name}" for name in dict.fromkeys(chain.from_iterable(parts)) if name not in _READ)


def _plain(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"'{where}.role' must be a non-empty string", param=f"{where}.role")
    return {**message, "content": _text(message, role, f"{where}.content")}


def _text(message: dict[str, Any], role: str, where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    raise InvalidRequest(f"'{where}' must be a string or a non-empty list of text parts", param=where)


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise InvalidRequest(f"'{where}.type' must be 'text': this model reads text only", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"'{where}.text' must be a string", param=f"{where}.text")
    return text
