"""The HTTP routes of a node."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response

from pdserve.api.answers.openai_response import DetokenizeResponse, TokenizeResponse
from pdserve.api.dialects.dialect_answers import DialectParser
from pdserve.api.dialects.messages_answer import TokenCount
from pdserve.api.dialects.messages_request import PromptRequest, chat_of_messages
from pdserve.api.node.commands import NodeCommands
from pdserve.api.node.serving_node import ServingNode
from pdserve.api.requests.chat_messages import render_chat
from pdserve.api.requests.openai_request import BodyParser, DetokenizeRequest, TokenizeRequest, TokenizerInfoRequest
from pdserve.api.requests.preparing import Check
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.api.routes.completions import (
    admit_ticket,
    chat_route,
    check_model,
    client_of,
    messages_route,
    prepare,
    responses_route,
    text_route,
)
from pdserve.errors import InvalidRequest
from pdserve.http.documentation import add_documentation
from pdserve.http.model_list import ModelCard, ModelList, model_in_query
from pdserve.http.request import JSON, HttpRequest
from pdserve.http.routes import TOKENIZER_INFO_PATH, DirectRoutes, quart_app
from pdserve.wire.command import COMMAND_PATH
from pdserve.wire.discovery import NodeSizes
from pdserve.wire.version import INSTALLED_VERSION


class NodeServerInfo(msgspec.Struct, frozen=True):
    """What ``/server_info`` says of a node."""

    version: str
    name: str
    role: str
    model: str
    fingerprint: str
    max_model_len: int
    max_running: int
    block_size: int
    num_blocks: int
    max_body_bytes: int
    sizes: NodeSizes
    """What it serves and what fits."""
    process: str = "node"


def create_app(node: ServingNode, commands: NodeCommands | None = None) -> DirectRoutes:
    """Returns an ASGI application that serves ``node``. Without ``commands``, the node takes none."""
    chat, text, tokenizing = chat_route(node), text_route(node), TokenizerRoutes(node)
    responses, messages = responses_route(node), messages_route(node)
    handlers = {
        "/v1/chat/completions": chat.handle,
        "/v1/completions": text.handle,
        "/v1/messages": messages.handle,
        "/v1/messages/count_tokens": tokenizing.count_tokens,
        "/v1/responses": responses.handle,
        "/tokenize": tokenizing.tokenize,
        "/detokenize": tokenizing.detokenize,
    }
    app = quart_app("node", node.max_body_bytes, _ignore, (*handlers, TOKENIZER_INFO_PATH, "/v1/models"))
    _add_models(app, node)
    _add_probes(app, node)
    add_documentation(app, "node")
    if commands is not None:
        handlers[COMMAND_PATH] = commands.handle
    # A proxy, which sends its nodes POST alone, asks with a body for what clients get without one.
    handlers[TOKENIZER_INFO_PATH] = tokenizing.info
    return DirectRoutes(handlers, app, "node", _ignore, {TOKENIZER_INFO_PATH: tokenizing.info})


def _ignore(status: int) -> None:
    """A node counts its choices that end with an error, not its responses."""


def _add_models(app: Quart, node: ServingNode) -> None:
    card = ModelCard(node.model, node.started, node.model, node.ready.max_model_len)

    @app.get("/v1/models")
    @app.get("/v1/models/")
    async def models() -> Response:
        return _json(ModelList([card]))

    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        check_model(name, node)
        return _json(card)


def _add_probes(app: Quart, node: ServingNode) -> None:
    @app.get("/live")
    async def live() -> Response:
        return _json({"status": "live" if node.alive else "engine lost"}, 200 if node.alive else 503)

    @app.get("/health")
    @app.get("/ping")
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
        return Response(await node.metrics.render(), content_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": INSTALLED_VERSION})

    @app.get("/server_info")
    async def server_info() -> Response:
        ready = node.ready
        return _json(
            NodeServerInfo(
                INSTALLED_VERSION,
                node.name,
                node.role.value,
                node.model,
                ready.fingerprint,
                ready.max_model_len,
                ready.max_running,
                ready.block_size,
                ready.num_blocks,
                node.max_body_bytes,
                node.sizes,
            )
        )


class TokenizerRoutes:
    """The routes about tokens, which ask no engine."""

    def __init__(self, node: ServingNode) -> None:
        self._node = node
        self._tokenize_parser, self._detokenize_parser = BodyParser(TokenizeRequest), BodyParser(DetokenizeRequest)
        self._info_parser = BodyParser(TokenizerInfoRequest)
        # Encoded once: a vocabulary may have thousands of added tokens, and tokens of answers would wait for them.
        self._info = msgspec.json.encode(node.tokenizer.info(node.ready.max_model_len))
        self._count_parser = DialectParser(PromptRequest)

    async def tokenize(self, request: HttpRequest) -> None:
        encoder, client = self._admit(request)
        data = await request.body(self._node.max_body_bytes)

        def work(check: Check) -> bytes:
            body = self._tokenize_parser.parse(data).request
            check_model(body.model, self._node)
            if (body.prompt is None) == (body.messages is None):
                raise InvalidRequest("give either 'prompt' or 'messages'", param="prompt")
            check()
            text = render_chat(body, encoder, int(time.time())) if body.prompt is None else body.prompt
            special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
            param = "messages" if body.prompt is None else "prompt"
            token_ids = self._node.limits.encode(text, encoder, param, add_special_tokens=special, cut=True)
            strings = encoder.token_strings(token_ids) if body.return_token_strs else None
            length = self._node.ready.max_model_len
            return msgspec.json.encode(TokenizeResponse(len(token_ids), length, token_ids, strings))

        await self._respond(request, len(data), work, client)

    async def count_tokens(self, request: HttpRequest) -> None:
        """Says how many tokens the prompt of a request to ``/v1/messages`` has."""
        encoder, client = self._admit(request)
        data = await request.body(self._node.max_body_bytes)

        def work(check: Check) -> bytes:
            body = self._count_parser.parse(data, chat_of_messages).request
            check_model(body.model, self._node)
            check()
            text = render_chat(body, encoder, int(time.time()))
            token_ids = self._node.limits.encode(text, encoder, "messages", add_special_tokens=False, cut=True)
            return msgspec.json.encode(TokenCount(len(token_ids)))

        await self._respond(request, len(data), work, client)

    async def info(self, request: HttpRequest) -> None:
        """Says what the model's tokeniser is: to a client by GET, and to a proxy by POST."""
        admit_ticket(request, self._node)
        data = await request.body(self._node.max_body_bytes)
        if request.method == "GET":
            check_model(model_in_query(request.query), self._node)
        else:
            check_model(self._info_parser.parse(data).request.model, self._node)
        await request.respond(200, JSON, self._info)

    async def detokenize(self, request: HttpRequest) -> None:
        decoder, client = self._admit(request)
        data = await request.body(self._node.max_body_bytes)

        def work(check: Check) -> bytes:
            body = self._detokenize_parser.parse(data).request
            check_model(body.model, self._node)
            limits = self._node.limits
            limits.check_count(len(body.tokens), "tokens")
            check()
            text = decoder.decode(limits.check_ids(body.tokens, "tokens"), skip_special_tokens=False)
            return msgspec.json.encode(DetokenizeResponse(text))

        await self._respond(request, len(data), work, client)

    def _admit(self, request: HttpRequest) -> tuple[Tokenizer, bytes]:
        """Returns the tokenizer, and what stands for the client."""
        request.check_body_form()
        return self._node.tokenizer, client_of(request, admit_ticket(request, self._node))

    async def _respond(self, request: HttpRequest, size: int, work: Callable[[Check], bytes], client: bytes) -> None:
        answer = await prepare(request, self._node, size, work, self._node.timeout_s, client)
        await request.respond(200, JSON, answer)


def _json(value: msgspec.Struct | dict[str, str], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status=status, content_type="application/json")
