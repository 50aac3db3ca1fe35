"""Names the fields of a chat request as the clients of a dialect know them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pdserve.errors import InvalidRequest

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
