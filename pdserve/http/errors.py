"""Encodes every error of a node or a proxy in OpenAI's shape."""

from __future__ import annotations

import msgspec

from pdserve.errors import DeadlineExceeded, Internal, RequestError, Unauthorized, UnsupportedMediaType


class _Detail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(msgspec.Struct, frozen=True):
    error: _Detail


_encoder = msgspec.json.Encoder()


def error_body(error: RequestError) -> bytes:
    """Returns ``{"error": {"message", "type", "param", "code"}}`` as JSON."""
    return _encoder.encode(_Body(_Detail(error.message, error.type, error.param, error.code)))


def error_headers(error: RequestError) -> dict[str, str]:
    """Returns headers that tell the client to come back later, or not at all, or what its request lacks."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, UnsupportedMediaType):
        headers |= {"accept-post": "application/json", "accept-encoding": "identity"}
    elif isinstance(error, DeadlineExceeded):  # OpenAI's clients would send it twice more, for as long each time
        headers["x-should-retry"] = "false"
    return headers


def error_event(error: RequestError) -> bytes:
    """Returns the last server-sent event of a stream that failed; no ``[DONE]`` follows it."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


def internal_error(process: str) -> Internal:
    """Returns what a client is told of a defect in ``process``, whose details are in the log alone."""
    return Internal(f"internal error; the {process}'s log has the details")
