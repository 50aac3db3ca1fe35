"""Fields of OpenAI's and vLLM's requests that pdserve knows and does not honour: refused, unless they ask for nothing.

To ignore them would be worse than to refuse: a client that asks for JSON or for a tool call would get neither, with
status 200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.errors import InvalidRequest

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Besides ``null``, the values that mean the same as leaving the field out."""

ACCEPTED = frozenset(_NEUTRAL) | {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields that are no cause for a warning: they say something about the request, not about its answer."""


def refuse_unsupported(fields: Mapping[str, msgspec.Raw]) -> None:
    """Raises InvalidRequest for the first field that asks for something that pdserve cannot do."""
    for name, raw in fields.items():
        if name not in _NEUTRAL:
            continue
        if not _asks_for_nothing(raw, _NEUTRAL[name]):
            raise InvalidRequest(f"{name!r} is not supported by pdserve", param=name, code="unsupported_parameter")


def _asks_for_nothing(raw: msgspec.Raw, neutrals: tuple[Any, ...]) -> bool:
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        # Too many digits, too deep, half a surrogate pair: whatever it is, it is not a neutral value.
        return False
    return value is None or any(_same(value, neutral) for neutral in neutrals)


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells 0 from False, as JSON does."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
