"""The proxy's HTTP face: the relayed routes, those that tell about the cluster, every error in OpenAI's shape."""

from __future__ import annotations

import logging

from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from pdserve.config import ProxyConfig
from pdserve.error_body import error_body, error_headers
from pdserve.errors import Internal, RequestError
from pdserve_proxy.api_keys import ApiKeys
from pdserve_proxy.client_request import REQUEST_ID_HEADER, request_id
from pdserve_proxy.errors import from_http
from pdserve_proxy.held_bodies import HeldBodies
from pdserve_proxy.information import Information, Scrape
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.relay import Relay
from pdserve_proxy.relayed_routes import AsgiApp, RelayedRoutes
from pdserve_proxy.request_counts import OTHER_ROUTES
from pdserve_proxy.snapshot import Directory
from pdserve_proxy.turnstile import Turnstile

log = logging.getLogger(__name__)


def build_app(
    config: ProxyConfig,
    keys: ApiKeys,
    bodies: HeldBodies,
    turnstile: Turnstile,
    directory: Directory,
    relay: Relay,
    metrics: ProxyMetrics,
    scrape: Scrape,
) -> AsgiApp:
    app = Quart("pdserve_proxy", static_folder=None)
    app.url_map.merge_slashes = False
    app.config["MAX_CONTENT_LENGTH"] = config.http.max_body_bytes

    Information(directory, scrape, keys).add_routes(app)

    async def on_http_error(exc: HTTPException) -> Response:
        error = from_http(exc)
        metrics.counts.requests[OTHER_ROUTES, error.status] += 1
        response = _error_response(error, _id_of_request())
        if isinstance(exc, MethodNotAllowed) and exc.valid_methods:
            response.headers["allow"] = ", ".join(exc.valid_methods)
        return response

    async def on_request_error(error: RequestError) -> Response:
        metrics.counts.requests[OTHER_ROUTES, error.status] += 1
        return _error_response(error, _id_of_request())

    async def on_defect(exc: Exception) -> Response:
        log.error("a request failed inside the proxy", exc_info=exc)
        return await on_request_error(Internal("the proxy failed on this request"))

    app.register_error_handler(HTTPException, on_http_error)
    app.register_error_handler(RequestError, on_request_error)
    app.register_error_handler(Exception, on_defect)
    return RelayedRoutes(config.http.max_body_bytes, keys, bodies, turnstile, relay, metrics, app)


def _error_response(error: RequestError, request_id: str) -> Response:
    headers = {REQUEST_ID_HEADER: request_id, **error_headers(error)}
    return Response(error_body(error), error.status, headers, content_type="application/json")


def _id_of_request() -> str:
    return request_id(request.headers.get(REQUEST_ID_HEADER))
