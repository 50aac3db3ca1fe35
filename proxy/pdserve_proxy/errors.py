"""What goes around OpenAI's error body: headers, and the last event of a stream."""

from __future__ import annotations

from werkzeug.exceptions import HTTPException

from pdserve.error_body import error_body
from pdserve.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    Unauthorized,
)

_FROM_STATUS: dict[int, type[RequestError]] = {
    404: NotFound,
    405: MethodNotAllowed,
    408: DeadlineExceeded,
    413: PayloadTooLarge,
}


def error_event(error: RequestError) -> bytes:
    """The server-sent event after which a broken stream ends, without ``[DONE]``."""
    return b"data: " + error_body(error) + b"\n\n"


def error_headers(error: RequestError) -> dict[str, str]:
    """``Retry-After``, where the error has one; how to authenticate, where that is missing."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


def from_http(exc: HTTPException) -> RequestError:
    """The error of ours that says what the web framework's exception says."""
    status = exc.code or 500
    default = InvalidRequest if 400 <= status < 500 else Internal
    return _FROM_STATUS.get(status, default)(exc.description or exc.name)
