"""The proxy's HTTP face: the routes that nodes answer, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator

from quart import Quart, Request, Response, request
from quart.wrappers.response import ResponseBody
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from pdserve.config import ProxyConfig
from pdserve.errors import DeadlineExceeded, Internal, RequestError
from pdserve_proxy.api_keys import ApiKeys
from pdserve_proxy.errors import error_body, error_headers, from_http
from pdserve_proxy.exchange import Exchange, Outcome
from pdserve_proxy.information import Information, Scrape
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.relay import Answer, Call, Relay, Streaming
from pdserve_proxy.request_body import GenerationBody, read_body
from pdserve_proxy.snapshot import Directory
from pdserve_proxy.turnstile import Turnstile

log = logging.getLogger(__name__)

RELAYED_ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
UPLOAD_TIMEOUT_S = 60.0
REQUEST_ID_HEADER = "x-request-id"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class _StreamBody(ResponseBody):
    """Hands Quart the stream itself, without a generator in between."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream

    async def __aenter__(self) -> AsyncIterator[bytes]:
        return self._stream

    async def __aexit__(self, *exc_info: object) -> None:
        """The exchange closes what the stream holds."""


def build_app(
    config: ProxyConfig,
    keys: ApiKeys,
    turnstile: Turnstile,
    directory: Directory,
    relay: Relay,
    metrics: ProxyMetrics,
    scrape: Scrape,
) -> Quart:
    app = Quart("pdserve_proxy", static_folder=None)
    app.url_map.merge_slashes = False
    app.config["MAX_CONTENT_LENGTH"] = config.http.max_body_bytes
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BODY_TIMEOUT"] = UPLOAD_TIMEOUT_S

    async def relayed() -> Response:
        exchange = relay.begin(_request_id(request), request.path)
        try:
            async with exchange.gate:
                # Before the body is read: a request that waits costs no more memory than its head.
                await turnstile.enter(keys.caller(request.headers.get("authorization")), exchange.hold)
                call = Call(request.path, await _read(request), request.headers.get("accept"))
                result = await relay.forward(exchange, call)
        except TimeoutError:
            assert exchange.cut_short is not None
            return _refuse(exchange, exchange.cut_short.error, exchange.cut_short.outcome)
        except RequestError as exc:
            return _refuse(exchange, exc, Outcome.REFUSED)
        except Exception:
            log.exception("request %s failed inside the proxy", exchange.request_id)
            return _refuse(exchange, Internal("the proxy failed on this request"), Outcome.FAILED)
        return _respond(exchange, result)

    for path in RELAYED_ROUTES:
        app.add_url_rule(path, path, relayed, methods=["POST"])
    Information(directory, scrape, keys).add_routes(app)

    async def on_http_error(exc: HTTPException) -> Response:
        error = from_http(exc)
        metrics.requests.labels("other", error.status).inc()
        response = _error_response(error, _request_id(request))
        if isinstance(exc, MethodNotAllowed) and exc.valid_methods:
            response.headers["allow"] = ", ".join(exc.valid_methods)
        return response

    async def on_request_error(error: RequestError) -> Response:
        metrics.requests.labels("other", error.status).inc()
        return _error_response(error, _request_id(request))

    async def on_defect(exc: Exception) -> Response:
        log.error("a request failed inside the proxy", exc_info=exc)
        return await on_request_error(Internal("the proxy failed on this request"))

    app.register_error_handler(HTTPException, on_http_error)
    app.register_error_handler(RequestError, on_request_error)
    app.register_error_handler(Exception, on_defect)
    return app


async def _read(request: Request) -> GenerationBody:
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            data = await request.body
    except TimeoutError as exc:
        raise DeadlineExceeded(f"the request body did not come within {UPLOAD_TIMEOUT_S:.0f} s") from exc
    except HTTPException as exc:
        raise from_http(exc) from exc
    return read_body(data)


def _respond(exchange: Exchange, result: Answer | Streaming) -> Response:
    if isinstance(result, Answer):
        exchange.relayed_bytes = len(result.body)
        exchange.end(Outcome.OK if result.status < 400 else Outcome.REFUSED, result.status)
        response = Response(result.body, result.status, result.headers)
    else:
        response = Response(_StreamBody(result.body), result.status, result.headers)
    response.headers[REQUEST_ID_HEADER] = exchange.request_id
    return response


def _refuse(exchange: Exchange, error: RequestError, outcome: Outcome) -> Response:
    exchange.end(outcome, error.status)
    return _error_response(error, exchange.request_id)


def _error_response(error: RequestError, request_id: str) -> Response:
    headers = {REQUEST_ID_HEADER: request_id, **error_headers(error)}
    return Response(error_body(error), error.status, headers, content_type="application/json")


def _request_id(request: Request) -> str:
    """The client's own, if it is fit for log lines, or a new one."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
