"""The ASGI application of a node or a proxy: hot routes of plain ASGI in front of a Quart application.

Every token of every client passes the hot routes. They skip what the web framework would do for each request (its
request and response objects, its routing, and a second task that waits for the client to leave) and for each chunk.

``CrossOrigin`` says which web pages' scripts may read the answers. The fields that are the same in all answers are
among the server's default fields. Only where some origins are allowed and others are not, the answer to a page has one
more field, which names the page's origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from quart import Quart, Response, abort, g
from quart import request as quart_request
from werkzeug.exceptions import HTTPException

from pdserve.errors import (
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    RequestError,
    RequestTimeout,
    forget_frames,
)
from pdserve.http.errors import error_body, error_form, error_headers, internal_error
from pdserve.http.request import REQUEST_ID_HEADER, Asgi, ClientGone, HttpRequest, Receive, Scope, Send, request_label

Fields: TypeAlias = Sequence[tuple[bytes, bytes]]

EVERY_ORIGIN = "*"
EXPOSED = "x-request-id, retry-after, x-should-retry, x-pdserve-ignored"
"""The fields of answers that scripts may read beside those that browsers always let them read."""
PREFLIGHT_S = 600
"""How long a browser may remember the answer to a preflight request, in seconds."""

_FIELD_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1024}")


class CrossOrigin:
    """The origins whose pages may use one server."""

    def __init__(self, origins: Sequence[str]) -> None:
        """``origins`` are like ``https://chat.example.com``, or the one ``*`` for all. Without any, none may."""
        every = EVERY_ORIGIN in origins
        self._every = every
        self._origins = frozenset(origin.lower().encode() for origin in origins if not every)
        self.selects = bool(self._origins)
        """Whether answers to allowed pages differ from others."""
        self.defaults: list[tuple[str, str]] = []
        """The fields of every answer."""
        if origins:
            self.defaults.append(("access-control-expose-headers", EXPOSED))
            self.defaults.append(("access-control-allow-origin", EVERY_ORIGIN) if every else ("vary", "origin"))

    def allows(self, origin: bytes) -> bool:
        """Returns whether pages of ``origin`` may use the server. What is no page sends no origin."""
        return self._every or origin.lower() in self._origins

    def fields(self, request: Fields) -> list[tuple[bytes, bytes]]:
        """Returns the fields that the answer to a request with these fields has beside the defaults."""
        for name, value in request:
            if name == b"origin":
                return [(b"access-control-allow-origin", value)] if self.allows(value) else []
        return []


def preflight_fields(wanted: str | None) -> dict[str, str]:
    """Returns what answers a preflight, with which a browser asks whether a page may send a request at all.

    ``wanted`` are the names of the request's fields. The answer means nothing to a browser if the server does not name
    the page's origin in it.
    """
    fields = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": str(PREFLIGHT_S)}
    if wanted is not None and _FIELD_NAMES.fullmatch(wanted):
        fields["access-control-allow-headers"] = wanted
    return fields


log = logging.getLogger(__name__)

TOKENIZER_INFO_PATH = "/tokenizer_info"

Handler: TypeAlias = Callable[[HttpRequest], Awaitable[None]]
"""Answers one request in the task that calls it. Raises RequestError where the client is to get that instead."""


class DirectRoutes:
    """An ASGI application: calls the handler of a path, and leaves all other paths to ``others``.

    A handler runs in the task of the ASGI call, which is cancelled when the client leaves: nothing of a request
    survives that task.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        others: Asgi,
        process: str,
        on_error: Callable[[int], None],
        readers: Mapping[str, Handler] = MappingProxyType({}),
        find: Callable[[str], Mapping[str, Handler] | None] = lambda path: None,
    ) -> None:
        """``handlers`` answer POST, and ``readers`` answer GET. A path may have both.

        For any other path, ``find`` returns the handlers by method, or None if it is one of ``others``. Errors that
        clients get name ``process``, which is ``node`` or ``proxy``. ``on_error`` is called with the status of each.
        """
        self._methods: dict[str, dict[str, Handler]] = {}
        for method, paths in (("POST", handlers), ("GET", readers)):
            for path, handler in paths.items():
                self._methods.setdefault(path, {})[method] = handler
        self._find = find
        self._others = others
        self._process = process
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        methods = self._of(scope) if scope["type"] == "http" else None
        if methods is None and not _is_preflight(scope):
            await self._others(scope, receive, send)
            return
        request = HttpRequest(scope, receive, send)
        try:
            handler = None if methods is None else methods.get(request.method)
            if handler is None:
                await _answer_other_method(request, tuple(methods or ("POST",)))
                return
            request.cancel_on_disconnect()
            await handler(request)
        except (asyncio.CancelledError, ClientGone):
            return  # The client is gone, or the server ends.
        except Exception as exc:
            with contextlib.suppress(asyncio.CancelledError):
                await self._refuse(request, exc, methods or {})
            forget_frames(exc)

    def _of(self, scope: Scope) -> Mapping[str, Handler] | None:
        if b"%" in scope["raw_path"]:  # These paths have one spelling, as those of ``quart_app``.
            return None
        return self._methods.get(scope["path"]) or self._find(scope["path"])

    async def _refuse(self, request: HttpRequest, exc: Exception, methods: Iterable[str]) -> None:
        if request.answered:  # mostly because the client was gone in the middle of a write
            log.info("request_id=%s broke off: %r", request.label, exc)
            return
        if not isinstance(exc, RequestError):
            log.error("request_id=%s failed inside the %s", request.label, self._process, exc_info=exc)
            exc = internal_error(self._process)
        self._on_error(exc.status)
        await request.refuse(exc, _allow(methods) if isinstance(exc, MethodNotAllowed) else {})


def _allow(methods: Iterable[str]) -> dict[str, str]:
    return {"allow": ", ".join((*methods, "OPTIONS"))}


def _is_preflight(scope: Scope) -> bool:
    """Returns whether a browser asks if a page may send a request; it may be one to any path."""
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    return any(name == b"access-control-request-method" for name, _ in scope["headers"])


async def _answer_other_method(request: HttpRequest, methods: Sequence[str]) -> None:
    if request.method != "OPTIONS":
        raise MethodNotAllowed(f"this route takes {' and '.join(methods)} only")
    asked = request.header(b"access-control-request-method") is not None
    fields = preflight_fields(request.header(b"access-control-request-headers")) if asked else _allow(methods)
    await request.respond(200, fields, b"")


def quart_app(process: str, max_body_bytes: int, on_error: Callable[[int], None], served: Sequence[str] = ()) -> Quart:
    """Returns a Quart application without routes, which answers every error in OpenAI's shape.

    Every response carries the request's label. ``process`` and ``on_error`` are as ``DirectRoutes`` has them. A client
    that asks for another route gets the names of those that are ``served``. Each path has one spelling.
    """
    app = Quart("pdserve", static_folder=None)
    app.url_map.merge_slashes = False
    app.config["MAX_CONTENT_LENGTH"] = max_body_bytes

    def label() -> str:
        """Returns the label of the present request, which is made once."""
        if not hasattr(g, "label"):
            g.label = request_label(quart_request.headers.get(REQUEST_ID_HEADER))
        return str(g.label)

    @app.before_request
    async def in_one_spelling() -> None:
        """Refuses what Quart takes for a route's path as well (``//metrics``, ``/%2fmetrics``, ``/%6detrics``).

        A server in front of this one may guard the path by its one spelling.
        """
        rule = quart_request.url_rule
        if rule is None:
            return
        fixed, variable, _ = rule.rule.partition("<")
        written: bytes = quart_request.scope["raw_path"]
        if not (written.startswith(fixed.encode()) if variable else written == fixed.encode()):
            abort(404)

    @app.after_request
    async def labelled(response: Response) -> Response:
        response.headers[REQUEST_ID_HEADER] = label()
        return response

    @app.errorhandler(RequestError)
    async def refused(error: RequestError) -> Response:
        return respond(error, error.status)

    @app.errorhandler(HTTPException)
    async def found_by_framework(found: HTTPException) -> Response:
        forget_frames(found)  # Quart's request holds it
        asked = f"{quart_request.method[:16]} {quart_request.path[:200]}"
        match found.code:
            case 404 if what := not_served(quart_request.path):
                error = NotFound(f"{what} are not served: pdserve generates text, and nothing else", code="not_served")
                response = respond(error, 404)
            case 404:
                advice = f"this {process} serves {', '.join(served)}; {_BASE_URLS}"
                response = respond(NotFound(f"unknown request URL: {asked}: {advice}", code="unknown_url"), 404)
            case 405:
                response = respond(MethodNotAllowed(f"the route does not take this method: {asked}"), 405)
            case code:
                status = code or 500
                kind = _ERRORS.get(status, Internal if status >= 500 else InvalidRequest)
                response = respond(kind(found.description or http.HTTPStatus(status).phrase), status)
        if allow := dict(found.get_headers()).get("Allow"):
            response.headers["Allow"] = allow
        return response

    @app.errorhandler(Exception)
    async def defect(exc: Exception) -> Response:
        log.error("a request failed inside the %s", process, exc_info=exc)
        return await refused(internal_error(process))

    def respond(error: RequestError, status: int) -> Response:
        on_error(status)
        body = error_body(error, error_form(quart_request.path), label())
        return Response(body, status, error_headers(error), content_type="application/json")

    return app


def not_served(path: str) -> str:
    """Returns what others serve at ``path`` and pdserve does not, in the plural; empty if this is no such path."""
    return next((what for route, what in _NOT_SERVED.items() if path == route or path.startswith(f"{route}/")), "")


_NOT_SERVED = {
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rankings",
    "/v2/rerank": "rankings",
    "/rerank": "rankings",
    "/v1/score": "scores",
    "/score": "scores",
    "/pooling": "embeddings",
    "/classify": "classes",
    "/v1/moderations": "moderations",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/audio": "speech and its transcriptions",
    "/v1/realtime": "realtime sessions",
    "/v1/files": "files",
    "/v1/uploads": "files",
    "/v1/vector_stores": "vector stores",
    "/v1/batches": "batches",
    "/v1/messages/batches": "batches",
    "/v1/fine_tuning": "fine-tuning jobs",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/conversations": "conversations",
}
"""Routes of OpenAI, Anthropic, vLLM and others for what pdserve does not do."""

_BASE_URLS = "the base URL of OpenAI's clients ends in /v1, and that of Anthropic's clients does not"

_ERRORS: dict[int, type[RequestError]] = {408: RequestTimeout, 413: PayloadTooLarge}
"""Our errors for those that Quart finds."""
