"""Client request → decode node → client, one upstream request per attempt.

A node that cannot be reached, or does not take the request (503, 401), is replaced by another as long as there is one
that fits; one that is lost with the request, before its first byte, once. After the first byte the stream is the
client's: a loss then ends it with an error event (``stream``).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from pdserve.config import ProxyConfig
from pdserve.errors import BadUpstream, RequestError, Unavailable
from pdserve.tls import Trust
from pdserve.wire.ticket import TICKET_HEADER
from pdserve_proxy.exchange import Cut, Exchange
from pdserve_proxy.expiry import ExpiryQueue
from pdserve_proxy.flights import Flights
from pdserve_proxy.journal import ExchangeLog
from pdserve_proxy.node_connection import NodeLost, NodeResponse, NodeUnreachable
from pdserve_proxy.node_pool import NodePool
from pdserve_proxy.request_body import GenerationBody
from pdserve_proxy.routing import RETRY_AFTER_S, Ask, Route, Router, resolve_model
from pdserve_proxy.snapshot import Directory
from pdserve_proxy.stream import EventStream
from pdserve_proxy.ticketing import TicketOffice

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 16
"""Of one request. Where so many nodes in a row are busy, it makes none of them less so to ask the others."""
MAX_LOSSES = 2
"""Nodes that may be lost with one request: it may be what they died of."""
REFUSALS = (401, 503)
"""Status codes with which a node does not take a request, or gives it back. Its own failures are 500."""
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
"""Response headers of a node's that a client gets; ``x-request-id`` is the proxy's own."""


class Answer(msgspec.Struct, frozen=True):
    """A response in one piece."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Streaming:
    """A response whose first byte has come."""

    status: int
    headers: dict[str, str]
    body: EventStream


class Kind(enum.Enum):
    """How an attempt failed."""

    UNREACHABLE = "unreachable"
    """No connection came about."""
    REFUSED = "refused"
    """The node has not begun with the request, or has given it back in good order."""
    LOST = "lost"
    """The node may have begun with it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that another node may make good."""

    kind: Kind
    error: RequestError
    answer: Answer | None = None
    """What the node itself said, where it did."""


class Call(msgspec.Struct, frozen=True):
    """What of a client's request goes to a node."""

    path: str
    body: GenerationBody
    accept: str | None


class Relay:
    """Owns the connections to nodes and the exchanges that are under way. Used as an async context manager."""

    def __init__(
        self,
        config: ProxyConfig,
        directory: Directory,
        flights: Flights,
        tickets: TicketOffice,
        journal: ExchangeLog,
        trust: Trust,
    ) -> None:
        self._trust = trust
        self._config = config
        self._directory = directory
        self._flights = flights
        self._router = Router(config.routing.policy)
        self._tickets = tickets
        self._journal = journal
        self._active: set[Exchange] = set()

    async def __aenter__(self) -> Self:
        relay = self._config.relay
        self._loop = asyncio.get_running_loop()
        self._pool = NodePool(
            connect_timeout_s=relay.connect_timeout_s, max_connections=relay.max_connections, trust=self._trust
        )
        self._directory.on_loss(lambda node: self._pool.doubt(node.url))
        self._deadlines: ExpiryQueue[Exchange] = ExpiryQueue(
            self._config.request.timeout_s, lambda exchange: exchange.cut(Cut.DEADLINE)
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cut_all()
        self._pool.close()
        self._deadlines.close()

    def begin(self, request_id: str, route: str) -> Exchange:
        """An exchange for the request that the current task handles."""
        task = asyncio.current_task(self._loop)
        assert task is not None
        exchange = Exchange(task, request_id, route, self._config.request.timeout_s, self._ended)
        self._active.add(exchange)
        self._deadlines.add(exchange)
        self._journal.began()
        return exchange

    def cut_all(self) -> None:
        """Cut every exchange short: the time to drain is over."""
        for exchange in tuple(self._active):
            exchange.cut(Cut.SHUTDOWN)

    async def forward(self, exchange: Exchange, call: Call) -> Answer | Streaming:
        """The response to ``call``. An exchange that streams ends with its stream; one that does not, its caller ends.

        Raises RequestError if no node gives one.
        """
        ask = Ask(resolve_model(self._directory.snapshot(), call.body.model), call.body.lead)
        tried: frozenset[bytes] = frozenset()
        failure: Failure | None = None
        losses = 0
        for attempt in range(MAX_ATTEMPTS):
            try:
                route = self._route(ask, tried)
            except RequestError:
                if failure is None:
                    raise
                break
            if attempt:
                self._journal.retried()
            # A prefill node computes a prompt once, for however many answers.
            prefill = [(node, call.body.prompts) for node in route.prefill[:1]]
            exchange.take_off(route, self._flights.begin((route.decode, call.body.answers), *prefill))
            result = await self._attempt(exchange, call, route, attempt)
            if not isinstance(result, Failure):
                return result
            failure = result
            tried |= {route.decode.boot_id}
            level = logging.INFO if failure.kind is Kind.REFUSED else logging.WARNING
            log.log(level, "attempt %d of %s at %s: %s", attempt, exchange.request_id, route.decode.name, failure.error)
            if failure.kind is Kind.UNREACHABLE:
                self._directory.mark_unreachable(route.decode.boot_id)
            elif failure.kind is Kind.LOST:
                losses += 1
                if losses == MAX_LOSSES:
                    break
        assert failure is not None
        if failure.answer is None:
            raise failure.error
        return failure.answer

    def _route(self, ask: Ask, exclude: frozenset[bytes]) -> Route:
        snapshot = self._directory.snapshot()
        return self._router.choose(snapshot, ask, self._flights.loads(snapshot), exclude)

    async def _attempt(
        self, exchange: Exchange, call: Call, route: Route, attempt: int
    ) -> Answer | Streaming | Failure:
        node = route.decode
        ticket = self._tickets.issue(
            route, request_id=exchange.request_id, attempt=attempt, deadline_s=exchange.remaining_s
        )
        headers = {
            "content-type": "application/json",
            "x-request-id": exchange.request_id,
            TICKET_HEADER: ticket,
        }
        if call.accept is not None:
            headers["accept"] = call.accept
        # An answer in one piece comes when all of it is computed: silence until then is no sign; the deadline rules.
        silence_s = self._config.relay.idle_timeout_s if call.body.stream else None
        try:
            response = await self._pool.post(node.url, call.path, headers, call.body.data, silence_s=silence_s)
        except NodeUnreachable:
            error = Unavailable(
                f"node {node.name} cannot be reached", code="upstream_unreachable", retry_after_s=RETRY_AFTER_S
            )
            return Failure(Kind.UNREACHABLE, error)
        except NodeLost as exc:
            return _lost(node.name, exc)
        exchange.attach(response)
        try:
            return await _first_byte(exchange, response)
        except NodeLost as exc:
            return _lost(node.name, exc)

    def _ended(self, exchange: Exchange) -> None:
        self._active.discard(exchange)
        self._deadlines.discard(exchange)
        self._journal.ended(exchange)


async def _first_byte(exchange: Exchange, response: NodeResponse) -> Answer | Streaming | Failure:
    headers, content_type = _kept(response.headers), response.content_type
    if response.status == 200 and content_type == "text/event-stream":
        stream = EventStream(exchange, response)
        await stream.open()
        exchange.got_byte()
        exchange.begin_relaying(response.status)
        return Streaming(response.status, headers, stream)
    body = response.take_whole()
    if body is None:
        body = await _read_all(exchange, response)
    elif body and response.status not in REFUSALS:
        exchange.got_byte()
    answer = Answer(response.status, headers, body)
    return _judge(exchange.decode_name, answer, content_type)


def _judge(node: str, answer: Answer, content_type: str) -> Answer | Failure:
    """Which of a node's answers are for the client."""
    if answer.status == 503:
        busy = Unavailable(f"node {node} takes no requests now", code="upstream_busy", retry_after_s=RETRY_AFTER_S)
        return Failure(Kind.REFUSED, busy, answer if content_type == "application/json" else None)
    if answer.status == 401:
        return Failure(Kind.REFUSED, BadUpstream(f"node {node} refused the proxy's ticket", code="ticket_refused"))
    if not 200 <= answer.status < 600 or 300 <= answer.status < 400 or content_type != "application/json":
        raise BadUpstream(f"node {node} gave an unexpected answer with status {answer.status}", code="upstream_invalid")
    return answer


async def _read_all(exchange: Exchange, response: NodeResponse) -> bytes:
    """The whole body, so that a loss inside it can still be made good: nodes send an answer when all of it is there."""
    pieces = []
    size = 0
    while not response.exhausted and (piece := await response.read()):
        if response.status not in REFUSALS:
            exchange.got_byte()
        pieces.append(piece)
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise BadUpstream(f"a node's answer is above {MAX_ANSWER_BYTES} bytes", code="upstream_invalid")
    return b"".join(pieces)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in KEPT_HEADERS if name in headers}


def _lost(node: str, exc: NodeLost) -> Failure:
    return Failure(Kind.LOST, BadUpstream(f"node {node} was lost before it answered: {exc}", code="upstream_lost"))
