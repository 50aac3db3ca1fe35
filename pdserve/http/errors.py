"""Maps every error of a node or a proxy to an HTTP response in OpenAI's shape.

``error_body`` and ``error_headers`` encode a ``RequestError``. The functions below them make Quart responses of our
own errors, of those that the web framework finds, and of defects.
"""

from __future__ import annotations

import http
import logging

import msgspec
from quart import Response
from werkzeug.exceptions import HTTPException

from pdserve.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
    Unauthorized,
    UnsupportedMediaType,
)


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


logger = logging.getLogger(__name__)


def error_response(error: RequestError) -> Response:
    return Response(error_body(error), error.status, error_headers(error), content_type="application/json")


def http_error(error: HTTPException) -> Response:
    """Of an error that the HTTP framework found: no such route, wrong method, body too large or too slow."""
    status = error.code or 500
    known: dict[int, type[RequestError]] = {
        404: NotFound,
        405: MethodNotAllowed,
        408: RequestTimeout,
        413: PayloadTooLarge,
    }
    kind = known.get(status, Internal if status >= 500 else InvalidRequest)
    response = error_response(kind(error.description or http.HTTPStatus(status).phrase))
    response.status_code = status
    if allow := dict(error.get_headers()).get("Allow"):
        response.headers["Allow"] = allow
    return response


def unexpected_error(error: Exception, request_id: str) -> Response:
    """Of a defect: logged here, and told to the client without its details."""
    logger.error("request_id=%s unexpected error in a request", request_id, exc_info=error)
    return error_response(Internal("internal error; the node's log has the details"))
