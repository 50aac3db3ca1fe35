"""OpenAI's error shape: the body of every HTTP error of a node or a proxy, and what a broken stream ends with."""

from __future__ import annotations

import msgspec

from pdserve.errors import RequestError


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
