"""Errors as a stream's last event, and those that the web framework finds."""

from __future__ import annotations

from werkzeug.exceptions import HTTPException

from pdserve.errors import (
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
)
from pdserve.http.errors import error_body

_FROM_STATUS: dict[int, type[RequestError]] = {
    404: NotFound,
    405: MethodNotAllowed,
    408: RequestTimeout,
    413: PayloadTooLarge,
}


def error_event(error: RequestError) -> bytes:
    """The server-sent event after which a broken stream ends, without ``[DONE]``."""
    return b"data: " + error_body(error) + b"\n\n"


def from_http(exc: HTTPException) -> RequestError:
    """The error of ours that says what the web framework's exception says."""
    status = exc.code or 500
    default = InvalidRequest if 400 <= status < 500 else Internal
    return _FROM_STATUS.get(status, default)(exc.description or exc.name)
