"""Any error to a response with OpenAI's error body and status."""

from __future__ import annotations

import http
import logging

from quart import Response
from werkzeug.exceptions import HTTPException

from pdserve.error_body import error_body, error_headers
from pdserve.errors import (
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
)

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


def unexpected_error(error: Exception) -> Response:
    """Of a defect: logged here, and told to the client without its details."""
    logger.error("unexpected error in a request", exc_info=error)
    return error_response(Internal("internal error; the node's log has the details"))
