"""Handles the routes that nodes answer: admits a request, relays it, and answers with the node's response."""

from __future__ import annotations

import asyncio
import logging

from pdserve.errors import RequestError
from pdserve.http.errors import internal_error
from pdserve.http.request import ClientGone, HttpRequest
from pdserve_proxy.credentials import ApiKeys
from pdserve_proxy.relay.dispatch import NodeRequest
from pdserve_proxy.relay.relay import COMPLETION_ROUTES, Relay, StreamedResponse
from pdserve_proxy.relay.relayed_request import RelayedRequest, RelayOutcome
from pdserve_proxy.relay.whole_answer import WholeResponse
from pdserve_proxy.requests.admission_queue import AdmissionController
from pdserve_proxy.requests.held_bodies import HeldBodies
from pdserve_proxy.requests.request_body import GenerationBody, read_body

RELAYED_ROUTES = COMPLETION_ROUTES | {"/detokenize", "/tokenize", "/v1/messages/count_tokens"}

LARGE_BYTES = 256 * 1024
"""Larger bodies are read one at a time, and before each one all other requests get a turn of the event loop."""

log = logging.getLogger(__name__)


class RelayedRoutes:
    """Answers requests to ``RELAYED_ROUTES``."""

    def __init__(
        self,
        max_body_bytes: int,
        keys: ApiKeys,
        bodies: HeldBodies,
        admission: AdmissionController,
        relay: Relay,
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._keys = keys
        self._bodies = bodies
        self._admission = admission
        self._relay = relay
        self._large_body = asyncio.Lock()

    async def handle(self, request: HttpRequest) -> None:
        """Answers ``request``, with an error if it cannot be relayed. The relayed request ends with the answer."""
        with self._relay.begin(request.task, request.label, request.path) as relayed:
            await self._serve(relayed, request)

    async def _serve(self, relayed: RelayedRequest, request: HttpRequest) -> None:
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
            await _refuse(relayed, request, internal_error("proxy"), RelayOutcome.FAILED)
        else:
            await _respond(relayed, request, result)

    async def _forward(self, relayed: RelayedRequest, request: HttpRequest) -> WholeResponse | StreamedResponse:
        caller = self._keys.caller(request.header(b"authorization"), request.header(b"x-api-key"))
        request.check_body_form()
        # A place among the requests under way is taken when the body is there, so a slow sender keeps no other out.
        # Only this call and the journal of a stream keep the body: it is gone while an answer in one piece leaves.
        with self._bodies.hold(caller, request.address) as held:
            data = await request.body(self._max_body_bytes, held)
            body = read_body(data) if len(data) <= LARGE_BYTES else await self._read_large(data)
            await self._admission.admit(caller, body.answers, relayed.hold_place, body.priority)
            return await self._relay.forward(relayed, NodeRequest(request.path, body, request.header(b"accept")))

    async def _read_large(self, data: bytes) -> GenerationBody:
        async with self._large_body:
            await asyncio.sleep(0)
            return read_body(data)


async def _respond(relayed: RelayedRequest, request: HttpRequest, result: WholeResponse | StreamedResponse) -> None:
    if isinstance(result, WholeResponse):
        relayed.begin_relaying(result.status)
        await request.respond(result.status, result.headers, result.body)
        relayed.relayed_bytes = len(result.body)
        relayed.end(RelayOutcome.OK if result.status < 400 else RelayOutcome.REFUSED)
        return
    stream = result.body
    await request.begin(result.status, result.headers, stream.first, more=not stream.over)
    while not stream.over:
        data = await stream.next(request.write)
        await request.send(data, more=not stream.over)
    stream.end()


async def _refuse(relayed: RelayedRequest, request: HttpRequest, error: RequestError, outcome: RelayOutcome) -> None:
    relayed.end(outcome, error.status)
    await request.refuse(error)
