"""The HTTP routes of a node."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import cast

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, g, request
from werkzeug.exceptions import HTTPException

from pdserve.api.answers.openai_response import DetokenizeResponse, ModelCard, ModelList, TokenizeResponse
from pdserve.api.completions import admit_ticket, chat_route, check_model, text_route
from pdserve.api.requests.openai_request import BodyParser, DetokenizeRequest, TokenizeRequest
from pdserve.api.requests.preparing import Check
from pdserve.api.requests.prompts import render_chat
from pdserve.api.requests.tokenizer import TemplateFailed, Tokenizer
from pdserve.api.serving_node import ServingNode
from pdserve.errors import InvalidRequest, NotFound, RequestError, UnsupportedMediaType
from pdserve.http.errors import error_response, http_error, unexpected_error
from pdserve.http.request import REQUEST_ID_HEADER, RequestOwner, request_label

logger = logging.getLogger(__name__)


def create_app(node: ServingNode) -> Quart:
    """Returns the ASGI application that serves ``node``."""
    app = Quart("pdserve", static_folder=None)
    app.url_map.merge_slashes = False
    app.config["MAX_CONTENT_LENGTH"] = node.max_body_bytes
    app.config["RESPONSE_TIMEOUT"] = None  # requests have deadlines; Quart's 60 s would cut long answers in silence
    app.asgi_app = RequestOwner(app.asgi_app)  # type: ignore[method-assign]  # how Quart takes ASGI middleware
    _add_request_ids(app)
    _add_errors(app)
    _add_completions(app, node)
    _add_models(app, node)
    _add_tokenizer(app, node)
    _add_probes(app, node)
    return app


def _add_request_ids(app: Quart) -> None:
    @app.before_request
    async def begin() -> None:
        g.request_id = request_label(request.headers.get(REQUEST_ID_HEADER))
        UnsupportedMediaType.check_encoding(request.headers.get("content-encoding"))

    @app.after_request
    async def label(response: Response) -> Response:
        response.headers[REQUEST_ID_HEADER] = g.request_id
        return response


def _add_errors(app: Quart) -> None:
    @app.errorhandler(TemplateFailed)
    async def template_failed(error: TemplateFailed) -> Response:
        logger.info("request_id=%s a chat template failed: %s", g.request_id, error.detail)
        return error_response(error)

    @app.errorhandler(RequestError)
    async def refused(error: RequestError) -> Response:
        return error_response(error)

    @app.errorhandler(HTTPException)
    async def http(error: HTTPException) -> Response:
        return http_error(error)

    @app.errorhandler(Exception)
    async def unexpected(error: Exception) -> Response:
        return unexpected_error(error, g.request_id)


def _add_completions(app: Quart, node: ServingNode) -> None:
    chat, text = chat_route(node), text_route(node)

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await chat.handle()

    @app.post("/v1/completions")
    async def completions() -> Response:
        return await text.handle()


def _add_models(app: Quart, node: ServingNode) -> None:
    card = ModelCard(node.model, node.started, node.ready.max_model_len)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(ModelList([card]))

    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        check_model(name, node)
        return _json(card)


def _add_tokenizer(app: Quart, node: ServingNode) -> None:
    tokenize_body, detokenize_body = BodyParser(TokenizeRequest), BodyParser(DetokenizeRequest)

    def admit() -> Tokenizer:
        if node.tokenizer is None:
            raise NotFound("this node only prefills: it has no tokenizer", code="prefill_node")
        admit_ticket(node)
        return node.tokenizer

    @app.post("/tokenize")
    async def tokenize() -> Response:
        encoder = admit()
        data = cast("bytes", await request.get_data(as_text=False))

        def work(check: Check) -> bytes:
            body = tokenize_body.parse(data).request
            check_model(body.model, node)
            if (body.prompt is None) == (body.messages is None):
                raise InvalidRequest("give either 'prompt' or 'messages'", param="prompt")
            check()
            text = render_chat(body, encoder) if body.prompt is None else body.prompt
            special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
            param = "messages" if body.prompt is None else "prompt"
            token_ids = node.limits.encode(text, encoder, param, add_special_tokens=special, cut=True)
            return msgspec.json.encode(TokenizeResponse(len(token_ids), node.ready.max_model_len, token_ids))

        return Response(await node.preparer.run(len(data), work, node.timeout_s), content_type="application/json")

    @app.post("/detokenize")
    async def detokenize() -> Response:
        decoder = admit()
        data = cast("bytes", await request.get_data(as_text=False))

        def work(check: Check) -> DetokenizeResponse:
            body = detokenize_body.parse(data).request
            check_model(body.model, node)
            node.limits.check_count(len(body.tokens), "tokens")
            check()
            return DetokenizeResponse(
                decoder.decode(node.limits.check_ids(body.tokens, "tokens"), skip_special_tokens=False)
            )

        return _json(await node.preparer.run(len(data), work, node.timeout_s))


def _add_probes(app: Quart, node: ServingNode) -> None:
    installed = importlib.metadata.version("pdserve")

    @app.get("/live")
    async def live() -> Response:
        return _json({"status": "live"})

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "healthy" if node.alive else "engine lost"}, 200 if node.alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        if node.unready is None:
            return _json({"status": "ready"})
        status, reason = node.unready
        return _json({"status": status, "reason": reason}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(node.metrics.render(), content_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": installed})


def _json(value: msgspec.Struct | dict[str, str], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status=status, content_type="application/json")
