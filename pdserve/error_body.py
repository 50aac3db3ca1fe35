"""OpenAI's error shape: body and headers of every HTTP error of a node or a proxy, and a broken stream's last event."""

from __future__ import annotations

import msgspec

from pdserve.errors import DeadlineExceeded, RequestError, Unauthorized, UnsupportedMediaType


class _Detail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(msgspec.Struct, frozen=True):
    error: _Detail


_encoder = msgspec.json.Encoder()


def error_body(error: RequestError) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` as JSON."""
    return _encoder.encode(_Body(_Detail(error.message, error.type, error.param, error.code)))


def error_headers(error: RequestError) -> dict[str, str]:
    """What the client should do: come back later, or not at all, show a key, or send its body in another way."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, UnsupportedMediaType):
        headers["accept-encoding"] = "identity"
    elif isinstance(error, DeadlineExceeded):  # OpenAI's clients would send it twice more, for as long each time
        headers["x-should-retry"] = "false"
    return headers
