"""The routes that nodes answer, as an ASGI application of their own in front of the web framework's.

Every token of every client passes here, so requests skip what the framework would do for them: its request and response
objects, its routing, and a second task that waits for the client to leave.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from pdserve.errors import Internal, MethodNotAllowed, RequestError, UnsupportedMediaType
from pdserve.http.errors import error_body, error_headers
from pdserve_proxy.credentials import ApiKeys
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.relay.access_log import OTHER_ROUTES
from pdserve_proxy.relay.relay import NodeRequest, Relay, StreamedResponse, WholeResponse
from pdserve_proxy.relay.relayed_request import RelayedRequest, RelayOutcome
from pdserve_proxy.requests.admission_queue import AdmissionController
from pdserve_proxy.requests.client_request import (
    REQUEST_ID_HEADER,
    ClientGone,
    ClientRequest,
    Receive,
    Scope,
    Send,
    request_id,
)
from pdserve_proxy.requests.held_bodies import HeldBodies
from pdserve_proxy.requests.request_body import GenerationBody, read_body

AsgiApp: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

RELAYED_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"})

LARGE_BYTES = 256 * 1024
"""Larger bodies are read one at a time, with a turn of the event loop for everybody else before each."""

log = logging.getLogger(__name__)


class RelayedRoutes:
    """An ASGI application: answers ``RELAYED_ROUTES``, and leaves all else to ``others``."""

    def __init__(
        self,
        max_body_bytes: int,
        keys: ApiKeys,
        bodies: HeldBodies,
        admission: AdmissionController,
        relay: Relay,
        metrics: ProxyMetrics,
        others: AsgiApp,
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._keys = keys
        self._bodies = bodies
        self._admission = admission
        self._relay = relay
        self._metrics = metrics
        self._others = others
        self._large_body = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in RELAYED_ROUTES:
            await self._others(scope, receive, send)
            return
        request = ClientRequest(scope, receive, send)
        given_id = request_id(request.header(b"x-request-id"))
        if request.method != "POST":
            error = MethodNotAllowed("this route takes POST only")
            self._metrics.counts.requests[OTHER_ROUTES, error.status] += 1
            await _send_error(request, error, given_id, {"allow": "POST"})
            return
        try:
            with self._relay.begin(given_id, request.path) as relayed:
                request.on_disconnect(relayed.client_left)
                await self._serve(relayed, request)
        except (asyncio.CancelledError, ClientGone, Exception):
            # The server has nothing to add to it: the client is gone, or its response breaks off here.
            return

    async def _serve(self, relayed: RelayedRequest, request: ClientRequest) -> None:
        try:
            result = await self._forward(relayed, request)
        except asyncio.CancelledError:
            if not relayed.takes_cancel_as_cut():
                raise
            assert relayed.cut_short is not None
            await _refuse(relayed, request, relayed.cut_short.error, relayed.cut_short.outcome)
        except RequestError as exc:
            await _refuse(relayed, request, exc, RelayOutcome.REFUSED)
        except ClientGone:
            raise
        except Exception:
            log.exception("request_id=%s failed inside the proxy", relayed.request_id)
            await _refuse(relayed, request, Internal("the proxy failed on this request"), RelayOutcome.FAILED)
        else:
            await _respond(relayed, request, result)

    async def _forward(self, relayed: RelayedRequest, request: ClientRequest) -> WholeResponse | StreamedResponse:
        caller = self._keys.caller(request.header(b"authorization"))
        UnsupportedMediaType.check_encoding(request.header(b"content-encoding"))
        # A place among the requests under way is taken when the body is there: a slow sender keeps no other out.
        # With this call ends what keeps the body in memory: it is not there while the response goes to the client.
        with self._bodies.hold(caller, request.address) as held:
            data = await request.body(self._max_body_bytes, held)
            body = read_body(data) if len(data) <= LARGE_BYTES else await self._read_large(data)
            await self._admission.admit(caller, body.answers, relayed.hold_place)
            return await self._relay.forward(relayed, NodeRequest(request.path, body, request.header(b"accept")))

    async def _read_large(self, data: bytes) -> GenerationBody:
        async with self._large_body:
            await asyncio.sleep(0)
            return read_body(data)


async def _respond(relayed: RelayedRequest, request: ClientRequest, result: WholeResponse | StreamedResponse) -> None:
    headers = {**result.headers, REQUEST_ID_HEADER: relayed.request_id}
    if isinstance(result, WholeResponse):
        relayed.begin_relaying(result.status)
        await request.respond(result.status, headers, result.body)
        relayed.relayed_bytes = len(result.body)
        relayed.end(RelayOutcome.OK if result.status < 400 else RelayOutcome.REFUSED)
        return
    stream = result.body
    await request.begin(result.status, headers, stream.first, more=not stream.over)
    while not stream.over:
        data = await stream.next(request.write)
        await request.send(data, more=not stream.over)
    stream.end()


async def _refuse(relayed: RelayedRequest, request: ClientRequest, error: RequestError, outcome: RelayOutcome) -> None:
    relayed.end(outcome, error.status)
    await _send_error(request, error, relayed.request_id, {})


async def _send_error(request: ClientRequest, error: RequestError, request_id: str, headers: dict[str, str]) -> None:
    headers |= {"content-type": "application/json", REQUEST_ID_HEADER: request_id, **error_headers(error)}
    await request.respond(error.status, headers, error_body(error))
