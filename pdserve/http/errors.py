"""Encodes every error of a node or a proxy: in OpenAI's shape, or in Anthropic's on the routes that are Anthropic's."""

from __future__ import annotations

import enum

import msgspec

from pdserve.errors import DeadlineExceeded, EngineGone, Internal, RequestError, Unauthorized, UnsupportedMediaType


class OpenAiErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiError(msgspec.Struct, frozen=True):
    """The body of an error in OpenAI's form."""

    error: OpenAiErrorDetail


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True):
    """The body of an error in Anthropic's form."""

    error: AnthropicErrorDetail
    request_id: str | None
    type: str = "error"


class _ResponsesEvent(msgspec.Struct, frozen=True):
    code: str | None
    message: str
    param: str | None
    sequence_number: int
    type: str = "error"


_encoder = msgspec.json.Encoder()

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorForm(enum.Enum):
    """The form in which the clients of a route expect errors."""

    OPENAI = "openai"
    RESPONSES = "responses"
    """OpenAI's, but in a stream, where each event has a number."""
    ANTHROPIC = "anthropic"


_FORMS = {"/v1/responses": ErrorForm.RESPONSES, "/v1/messages": ErrorForm.ANTHROPIC}
_ANTHROPIC_ROUTES = "/v1/messages/"
"""Behind this, Anthropic's clients look for routes that nobody has here."""


def error_form(path: str) -> ErrorForm:
    """Returns the form of the errors of the route ``path``."""
    if path.startswith(_ANTHROPIC_ROUTES):
        return ErrorForm.ANTHROPIC
    return _FORMS.get(path, ErrorForm.OPENAI)


def error_body(error: RequestError, form: ErrorForm = ErrorForm.OPENAI, label: str | None = None) -> bytes:
    """Returns ``{"error": {"message", "type", "param", "code"}}`` as JSON, or Anthropic's form of it.

    Anthropic's form names the request by ``label``.
    """
    if form is not ErrorForm.ANTHROPIC:
        return _encoder.encode(OpenAiError(OpenAiErrorDetail(error.message, error.type, error.param, error.code)))
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return _encoder.encode(AnthropicError(AnthropicErrorDetail(kind, error.message), label))


ENGINE_GONE_HEADER = "x-pdserve-engine-gone"
"""With it, a node says that its failure is no matter of the request: it has lost its engine, and ends."""


def error_headers(error: RequestError) -> dict[str, str]:
    """Returns headers that tell the client to come back later, or not at all, or what its request lacks."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, UnsupportedMediaType):
        headers |= {"accept-post": "application/json", "accept-encoding": "identity"}
    elif isinstance(error, DeadlineExceeded):  # OpenAI's clients would send it twice more, for as long each time
        headers["x-should-retry"] = "false"
    elif isinstance(error, EngineGone):
        headers[ENGINE_GONE_HEADER] = "1"
    return headers


def error_event(
    error: RequestError, form: ErrorForm = ErrorForm.OPENAI, number: int = 0, label: str | None = None
) -> bytes:
    """Returns the last server-sent event of a stream that failed; no ``[DONE]`` follows it.

    ``number`` is that of the event, where events have numbers. Anthropic's form names the request by ``label``.
    """
    if form is ErrorForm.RESPONSES:
        body = _encoder.encode(_ResponsesEvent(error.code or error.type, error.message, error.param, number))
    else:
        body = error_body(error, form, label)
    return b"event: error\ndata: " + body + b"\n\n"


def internal_error(process: str) -> Internal:
    """Returns what a client gets to know of a defect in ``process``, whose details are in the log alone."""
    return Internal(f"internal error; the {process}'s log has the details")
