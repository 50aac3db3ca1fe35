"""Relays a client's request to a decode node and the response back, with one upstream request per attempt.

Each attempt carries a signed ticket, in an HTTP header, that describes the attempt to the decode node. Another node
replaces one that cannot be reached or does not take the request (503, 401), as long as there is one that fits. A node
that is lost with the request before its first byte is replaced once. After the first byte, another node goes on with
the client's stream (``resume``), or the stream ends with an error event (``event_stream``).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from pdserve.config import ProxyConfig, Switch
from pdserve.errors import BadUpstream, RequestError, Unavailable
from pdserve.http.tls import Trust
from pdserve.wire.ids import new_id
from pdserve.wire.ticket import AnswerIdentity
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.access_log import RequestCounts
from pdserve_proxy.relay.dispatch import REFUSALS, Dispatch, NodeRequest, TicketSigner, writes_journals
from pdserve_proxy.relay.event_stream import EventStream
from pdserve_proxy.relay.journal import LARGEST_SHARE, JournalBudget, RelayJournal
from pdserve_proxy.relay.relayed_request import CutReason, RelayedRequest
from pdserve_proxy.relay.resume import Resumes, Resumption
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.routing.router import RETRY_AFTER_S, Route, RouteQuery, requested_model
from pdserve_proxy.upstream.expiry_queue import ExpiryQueue
from pdserve_proxy.upstream.node_connection import NodeLost, NodeResponse, NodeUnreachable
from pdserve_proxy.upstream.node_pool import NodePool

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 16
"""The attempts at one request. Where so many nodes in a row are busy, more attempts only add to their load."""
MAX_LOSSES = 2
"""The nodes that may be lost with one request: the request may be what kills them."""
COMPLETION_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})
MAX_ANSWER_BYTES = 64 * 2**20
KEPT_HEADERS = (
    "content-type",
    "content-encoding",
    "retry-after",
    "cache-control",
    "x-accel-buffering",
    "x-should-retry",
    "x-pdserve-ignored",
)
"""The headers of a node's response that the client gets. The proxy sets ``x-request-id`` itself."""


class WholeResponse(msgspec.Struct, frozen=True):
    """A response in one piece."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """A response whose first byte has come."""

    status: int
    headers: dict[str, str]
    body: EventStream


class AttemptFailureKind(enum.Enum):
    """The ways in which an attempt fails."""

    UNREACHABLE = "unreachable"
    """No connection could be made."""
    REFUSED = "refused"
    """The node has not begun with the request, or has given it back in good order."""
    LOST = "lost"
    """The node may have begun with it."""


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """A failed attempt, after which another node may serve the request."""

    kind: AttemptFailureKind
    error: RequestError
    answer: WholeResponse | None = None
    """The node's own answer, if it gave one."""


class Relay:
    """Owns the connections to nodes and the relayed requests under way. Used as an async context manager."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: RegistryView,
        attempts: Attempts,
        tickets: TicketSigner,
        counts: RequestCounts,
        trust: Trust,
    ) -> None:
        self._trust = trust
        self._config = config
        self._registry = registry
        self._attempts = attempts
        self._tickets = tickets
        self._counts = counts
        budget = config.relay.journal_mib * 2**20
        self._journals = counts.journals = JournalBudget(budget, budget // LARGEST_SHARE)
        self._active: set[RelayedRequest] = set()

    async def __aenter__(self) -> Self:
        relay = self._config.relay
        self._pool = NodePool(
            connect_timeout_s=relay.connect_timeout_s, max_connections=relay.max_connections, trust=self._trust
        )
        self._dispatch = Dispatch(self._config, self._registry, self._attempts, self._tickets, self._pool)
        self._resumes = Resumes(relay, self._registry, self._dispatch, self._counts)
        self._registry.on_loss(lambda node: self._pool.suspect(node.url))
        self._deadlines: ExpiryQueue[RelayedRequest] = ExpiryQueue(
            self._config.request.timeout_s, lambda relayed: relayed.cut(CutReason.DEADLINE)
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cut_all()
        self._pool.close()
        self._deadlines.close()

    def begin(self, task: asyncio.Task[None], request_id: str, path: str) -> RelayedRequest:
        """Begins a relayed request for the request that ``task`` handles, and returns it."""
        relayed = RelayedRequest(task, request_id, path, self._config.request.timeout_s, self._ended)
        self._active.add(relayed)
        self._deadlines.add(relayed)
        self._counts.began()
        return relayed

    def cut_all(self) -> None:
        """Cuts every request short: the time to drain is over."""
        for relayed in tuple(self._active):
            relayed.cut(CutReason.SHUTDOWN)

    async def forward(self, relayed: RelayedRequest, request: NodeRequest) -> WholeResponse | StreamedResponse:
        """Returns the response to ``request``. A streamed request ends with its stream; the caller ends any other.

        Raises RequestError if no node gives a response.
        """
        request = self._with_identity(request)
        query = RouteQuery(requested_model(self._registry.snapshot(), request.body.model), request.body.prompt_start)
        tried: frozenset[bytes] = frozenset()
        failure: AttemptFailure | None = None
        losses = 0
        for number in range(MAX_ATTEMPTS):
            try:
                route = self._dispatch.choose(query, tried)
            except RequestError:
                if failure is None:
                    raise
                break
            if number:
                self._counts.retried()
            self._dispatch.begin(relayed, request.body, route)
            result = await self._try_node(relayed, request, query, route)
            if not isinstance(result, AttemptFailure):
                return result
            failure = result
            tried |= {route.decode.boot_id}
            self._note_failure(relayed, route, number, failure)
            if failure.kind is AttemptFailureKind.LOST:
                losses += 1
                if losses == MAX_LOSSES:
                    break
        assert failure is not None
        if failure.answer is None:
            raise failure.error
        return failure.answer

    def _note_failure(self, relayed: RelayedRequest, route: Route, number: int, failure: AttemptFailure) -> None:
        level = logging.INFO if failure.kind is AttemptFailureKind.REFUSED else logging.WARNING
        name = route.decode.name
        log.log(level, "request_id=%s attempt=%d decode=%s: %s", relayed.request_id, number, name, failure.error)
        if failure.kind is AttemptFailureKind.UNREACHABLE:
            self._registry.mark_unreachable(route.decode.boot_id)

    async def _try_node(
        self, relayed: RelayedRequest, request: NodeRequest, query: RouteQuery, route: Route
    ) -> WholeResponse | StreamedResponse | AttemptFailure:
        node = route.decode
        try:
            response = await self._dispatch.post(relayed, request, route)
        except NodeUnreachable:
            error = Unavailable(
                f"node {node.name} cannot be reached", code="upstream_unreachable", retry_after_s=RETRY_AFTER_S
            )
            return AttemptFailure(AttemptFailureKind.UNREACHABLE, error)
        except NodeLost as exc:
            return _lost(node.name, exc)
        relayed.own_response(response)
        try:
            if response.status == 200 and response.content_type == "text/event-stream":
                return await self._stream(relayed, request, query, response)
            return await _whole_answer(relayed, response)
        except NodeLost as exc:
            return _lost(node.name, exc)

    async def _stream(
        self, relayed: RelayedRequest, request: NodeRequest, query: RouteQuery, response: NodeResponse
    ) -> StreamedResponse:
        stream = EventStream(relayed, response, self._resumption(relayed, request, query))
        await stream.open()
        relayed.got_byte()
        relayed.begin_relaying(response.status)
        return StreamedResponse(response.status, _kept(response.headers), stream)

    def _resumption(self, relayed: RelayedRequest, request: NodeRequest, query: RouteQuery) -> Resumption | None:
        if request.answer is None or relayed.route is None:
            return None
        journal = RelayJournal(self._journals, request) if writes_journals(relayed.route.decode) else None
        relayed.own_journal(journal)
        return Resumption(self._resumes, relayed, query, journal)

    def _with_identity(self, request: NodeRequest) -> NodeRequest:
        """Returns ``request`` with an identity of its answer, if there is one that other nodes may go on with."""
        if self._config.relay.resume is Switch.OFF or request.path not in COMPLETION_ROUTES:
            return request
        return msgspec.structs.replace(request, answer=AnswerIdentity(new_id(), int(time.time())))

    def _ended(self, relayed: RelayedRequest) -> None:
        self._active.discard(relayed)
        self._deadlines.discard(relayed)
        self._counts.ended(relayed)


async def _whole_answer(relayed: RelayedRequest, response: NodeResponse) -> WholeResponse | AttemptFailure:
    body = response.take_whole()
    if body is None:
        body = await _read_all(relayed, response)
    elif body and response.status not in REFUSALS:
        relayed.got_byte()
    answer = WholeResponse(response.status, _kept(response.headers), body)
    return _judge(relayed.decode_name, answer, response.content_type)


def _judge(node: str, answer: WholeResponse, content_type: str) -> WholeResponse | AttemptFailure:
    """Returns ``answer`` if it is for the client, and otherwise the failure that it stands for.

    Raises BadUpstream for an answer that no other node would improve.
    """
    if answer.status == 503:
        busy = Unavailable(f"node {node} takes no requests now", code="upstream_busy", retry_after_s=RETRY_AFTER_S)
        return AttemptFailure(AttemptFailureKind.REFUSED, busy, answer if content_type == "application/json" else None)
    if answer.status == 401:
        return AttemptFailure(
            AttemptFailureKind.REFUSED, BadUpstream(f"node {node} refused the proxy's ticket", code="ticket_refused")
        )
    if not 200 <= answer.status < 600 or 300 <= answer.status < 400 or content_type != "application/json":
        raise BadUpstream(f"node {node} gave an unexpected answer with status {answer.status}", code="upstream_invalid")
    return answer


async def _read_all(relayed: RelayedRequest, response: NodeResponse) -> bytes:
    """Returns the whole body. The client has none of it yet: after a loss, another node can serve the request."""
    pieces = []
    size = 0
    while not response.exhausted and (piece := await response.read()):
        if response.status not in REFUSALS:
            relayed.got_byte()
        pieces.append(piece)
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise BadUpstream(f"a node's answer is above {MAX_ANSWER_BYTES} bytes", code="upstream_invalid")
    return b"".join(pieces)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in KEPT_HEADERS if name in headers}


def _lost(node: str, exc: NodeLost) -> AttemptFailure:
    return AttemptFailure(
        AttemptFailureKind.LOST, BadUpstream(f"node {node} was lost before it answered: {exc}", code="upstream_lost")
    )
