"""Describes the HTTP interface, in the form of OpenAPI, from the types that validate requests.

``setup.py`` writes the description into a wheel and a source distribution, as ``pdserve/http/openapi.json``. A source
tree has no such file: there ``pdserve.http.documentation`` runs this module, which prints it. Of other packages this
module needs msgspec alone, because a build has no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from pdserve.api.answers.openai_response import (
    ChatChoice,
    DetokenizeResponse,
    Envelope,
    TextChoice,
    TokenizeResponse,
    TokenizerInfo,
    Usage,
)
from pdserve.api.dialects.messages_answer import AnthropicAnswer, TokenCount
from pdserve.api.dialects.messages_request import MessagesRequest, PromptRequest
from pdserve.api.dialects.responses_answer import ResponseObject
from pdserve.api.dialects.responses_request import ResponsesRequest
from pdserve.api.requests.openai_request import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pdserve.http import errors
from pdserve.http.documentation import ONLY
from pdserve.http.model_list import ModelCard, ModelList
from pdserve.wire.timeline import Timeline

_TYPES = (
    *(ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, PromptRequest),
    *(TokenizeRequest, DetokenizeRequest, TokenizeResponse, DetokenizeResponse, TokenizerInfo),
    *(ChatChoice, TextChoice, Envelope, Usage, ResponseObject, AnthropicAnswer, TokenCount, ModelCard, ModelList),
    Timeline,
    *(errors.OpenAiError, errors.AnthropicError),
)
_STATUSES = {
    400: "The request is wrong.",
    401: "The API key is missing or wrong, or a node was asked without the proxy's ticket.",
    403: "The request comes from a web page whose origin is not allowed.",
    404: "There is no such model or route.",
    405: "The route does not take this method.",
    408: "The request came too slowly.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "The body is no JSON by its type, or is compressed.",
    429: "This client has as many requests under way as it may.",
    431: "The request's head is too large.",
    500: "A defect.",
    502: "The node was lost, or gave nonsense.",
    503: "No node can take the request now.",
    504: "The request's time is over.",
}
_GET_STATUSES = (400, 401, 403, 404, 405, 408, 414, 431, 500, 503)


def _completion(choice: str) -> dict[str, Any]:
    """Returns the schema of a complete completion."""
    properties = {"choices": {"type": "array", "items": _ref(choice)}, "usage": _ref("Usage")}
    return {"allOf": [_ref("Envelope"), {"type": "object", "properties": properties}]}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _errors(statuses: Iterable[int], form: str) -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{form}{status}"} for status in statuses}


def _error_responses() -> dict[str, Any]:
    return {
        f"{form}{status}": {"description": description, "content": {"application/json": {"schema": _ref(form)}}}
        for form in ("OpenAiError", "AnthropicError")
        for status, description in _STATUSES.items()
    }


def _post(
    summary: str, request: str, answer: dict[str, Any], *, streams: bool = True, form: str = "OpenAiError"
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
            "responses": {"200": {"description": "The answer.", "content": content}, **_errors(_STATUSES, form)},
        }
    }


def _get(summary: str, content_type: str = "application/json", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {content_type: {"schema": schema or ({} if content_type == "application/json" else {"type": "string"})}}
    responses = {"200": {"description": "The answer.", "content": content}, **_errors(_GET_STATUSES, "OpenAiError")}
    return {"get": {"summary": summary, "responses": responses}}


def _stored(summary: str, answer: dict[str, Any], parameters: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Returns a method of a response that a proxy stores."""
    described = _get(summary, schema=answer)["get"]
    form = {"type": "string", "pattern": "^resp_[0-9a-f]{32}$"}
    name = {"name": "response_id", "in": "path", "required": True, "schema": form}
    return {**described, "parameters": [name, *(parameters or ())]}


def _stored_paths() -> dict[str, Any]:
    pages = [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}},
        {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
    deleted = {
        "type": "object",
        "properties": {"id": {"type": "string"}, "object": {"enum": ["response"]}, "deleted": {"enum": [True]}},
        "required": ["id", "object", "deleted"],
    }
    items = {
        "type": "object",
        "properties": {
            "object": {"enum": ["list"]},
            "data": {"type": "array", "items": {"type": "object"}},
            "first_id": {"type": ["string", "null"]},
            "last_id": {"type": ["string", "null"]},
            "has_more": {"type": "boolean"},
        },
        "required": ["object", "data", "first_id", "last_id", "has_more"],
    }
    return {
        "/v1/responses/{response_id}": {
            "get": _stored("A response that the proxy stores.", _ref("ResponseObject")),
            "delete": _stored("Deletes a response that the proxy stores.", deleted),
            ONLY: "proxy",
        },
        "/v1/responses/{response_id}/input_items": {
            "get": _stored("The items of which it was made.", items, pages),
            ONLY: "proxy",
        },
    }


def _probe(summary: str) -> dict[str, Any]:
    """Returns a route that says with its status alone how the process is."""
    described = _get(summary)
    described["get"]["responses"]["503"] = {
        "description": "It is not.",
        "content": {"application/json": {"schema": {}}},
    }
    return described


def _paths() -> dict[str, Any]:
    model = _get("One model.", schema=_ref("ModelCard"))
    place = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    model["get"]["parameters"] = [place]
    tokenizer = _get("The model's tokeniser.", schema=_ref("TokenizerInfo"))
    tokenizer["get"]["parameters"] = [{**place, "in": "query", "required": False}]
    tokenizer["get"]["responses"] |= _errors(_STATUSES, "OpenAiError")
    messages = _post("A chat, in Anthropic's form.", "MessagesRequest", _ref("AnthropicAnswer"), form="AnthropicError")
    count = _post(
        "The number of a prompt's tokens.", "PromptRequest", _ref("TokenCount"), streams=False, form="AnthropicError"
    )
    instances = {**_get("The nodes that are registered."), ONLY: "proxy"}
    status = {**_get("The nodes, the requests and what went wrong: what the page at / shows."), ONLY: "proxy"}
    timeline = {**_get("What happened to a request, and when.", schema=_ref("Timeline")), ONLY: "proxy"}
    timeline["get"]["parameters"] = [{**place, "name": "request_id"}]
    timeline["get"]["responses"] |= _errors((429,), "OpenAiError")
    return {
        "/v1/chat/completions": _post("A chat.", "ChatRequest", _completion("ChatChoice")),
        "/v1/completions": _post("A text that goes on.", "CompletionRequest", _completion("TextChoice")),
        "/v1/responses": _post("A chat, in OpenAI's newer form.", "ResponsesRequest", _ref("ResponseObject")),
        **_stored_paths(),
        "/v1/messages": messages,
        "/v1/messages/count_tokens": count,
        "/tokenize": _post("The tokens of a text.", "TokenizeRequest", _ref("TokenizeResponse"), streams=False),
        "/detokenize": _post("The text of tokens.", "DetokenizeRequest", _ref("DetokenizeResponse"), streams=False),
        "/tokenizer_info": tokenizer,
        "/v1/models": _get("The models that are served.", schema=_ref("ModelList")),
        "/v1/models/{model}": model,
        "/live": _get("Whether the process lives."),
        "/health": _probe("Whether the process is well."),
        "/ping": _probe("The same."),
        "/ready": _probe("Whether requests can be served."),
        "/instances": instances,
        "/status": status,
        "/requests/{request_id}/timeline": timeline,
        "/server_info": _get("What serves here, and within which bounds."),
        "/version": _get("The version of pdserve."),
        "/metrics": _get("Metrics in Prometheus's form.", "text/plain"),
        "/openapi.json": _get("This description."),
        "/docs": _get("This description as a page.", "text/html"),
    }


def _plain(value: Any) -> Any:
    """Returns ``value`` with whole numbers written as such: Python takes bounds 0 and 0.0 for the same type."""
    match value:
        case dict():
            return {name: _plain(inner) for name, inner in value.items()}
        case list():
            return [_plain(inner) for inner in value]
        case float() if value.is_integer():
            return int(value)
    return value


def render() -> str:
    """Returns the description."""
    _, schemas = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "pdserve",
            "version": "1",
            "description": "OpenAI's chat, text completions and responses, and Anthropic's messages.",
        },
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": _paths(),
        "components": {
            "schemas": _plain(schemas),
            "responses": _error_responses(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    # JSON Schema has JavaScript's expressions, where the ends of a text have other names.
    return json.dumps(document, indent=1, sort_keys=False).replace(r"\\A", "^").replace(r"\\Z", "$") + "\n"


if __name__ == "__main__":
    print(render(), end="")
