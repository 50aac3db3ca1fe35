"""Relays a client's request to a decode node and the response back, with one upstream request per attempt.

Each attempt carries a signed ticket, in an HTTP header, that describes the attempt to the decode node. Another node
replaces one that cannot be reached or does not take the request (503, 401), as long as there is one that fits. A node
that is lost with the request before its first byte is replaced once, if need be by one that comes a little later. After
the first byte, another node goes on with the client's stream (``resume``), or the stream ends with an error event
(``event_stream``). An answer in one piece goes on too, if its node has journaled it (``complete_answer``), or
else begins again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

import msgspec

from pdserve.config import ProxyConfig, Switch
from pdserve.control.journal import JOURNALED_ANSWER
from pdserve.errors import Gone, PrefillLost
from pdserve.http.tls import Trust
from pdserve.tracing.tracing import Tracing
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.ids import new_id
from pdserve.wire.replay import REPLAY_HEADER, read_replay
from pdserve.wire.status import IncidentKind
from pdserve.wire.terms import AnswerIdentity
from pdserve.wire.timeline import TimelinePart
from pdserve_proxy.continuation.journal import LARGEST_SHARE, JournalBudget, RelayJournal
from pdserve_proxy.continuation.losses import Suspects
from pdserve_proxy.continuation.move import PlannedMoves
from pdserve_proxy.continuation.resume import STREAMED, ResumeFailed, Resumes, Resumption
from pdserve_proxy.continuation.turns import ResumeLimit, ResumeTurns
from pdserve_proxy.records.access_log import RequestCounts
from pdserve_proxy.records.node_counts import NodeFailure
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.attempt_rule import (
    AttemptFailure,
    AttemptRule,
    FailureKind,
    GiveUp,
    judged,
    lost,
    no_stored_answer,
    returned,
    unreachable,
)
from pdserve_proxy.relay.complete_answer import (
    RESUMED_TYPES,
    CompleteResponse,
    JournaledAnswer,
    read_complete,
    relayed_headers,
    take_complete,
)
from pdserve_proxy.relay.dispatch import Dispatch, NodeRequest, TicketSigner
from pdserve_proxy.relay.event_stream import EventStream
from pdserve_proxy.relay.outcomes import CutReason, ResumeOutcome
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.relay.route_wait import NodeWaits, RouteWait, Wait
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.routing.policies import NOBODY
from pdserve_proxy.routing.router import Route, RouteQuery, requested_model
from pdserve_proxy.upstream.expiry_queue import ExpiryQueue
from pdserve_proxy.upstream.node_connection import NodeLost, NodeRefused, NodeResponse, NodeUnreachable, media_type
from pdserve_proxy.upstream.node_pool import NodePool

log = logging.getLogger(__name__)

UNAUTHORIZED = 401
COMPLETION_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})


class StreamedResponse(msgspec.Struct, frozen=True):
    """A response whose first byte has come."""

    status: int
    headers: dict[str, str]
    body: EventStream


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
        tracing: Tracing | None = None,
        suspects: Suspects | None = None,
    ) -> None:
        self._trust = trust
        self._config = config
        self._timeout_s = config.request.timeout_s
        self._resume_wait_s = config.relay.resume_wait_s
        self._resumes_answers = config.relay.resume is not Switch.OFF
        self._registry = registry
        self._attempts = attempts
        self._tickets = tickets
        self._counts = counts
        budget = config.relay.journal_mib * 2**20
        self._journals = counts.journals = JournalBudget(budget, budget // LARGEST_SHARE)
        self._suspects = suspects or Suspects(config.relay.suspect_s)
        self._tracing = tracing or Tracing()
        self._tracing.parts.live = self._live_parts

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()  # once: each call costs a system call
        relay = self._config.relay
        self._pool = NodePool(
            connect_timeout_s=relay.connect_timeout_s, max_connections=relay.max_connections, trust=self._trust
        )
        self._counts.watch(self._registry, self._attempts)
        nodes = self._counts.nodes
        self._dispatch = Dispatch(self._config, self._registry, self._attempts, self._tickets, self._pool, nodes)
        waits = RouteWait(self._registry)
        self._waits = NodeWaits(self._dispatch, waits)
        turns = ResumeTurns(ResumeLimit(relay.max_resumes, self._registry, self._config.workers.count))
        self._registry.on_change(turns.give)
        self._registry.on_node(turns.heard)
        self._resumes = Resumes(relay, self._registry, self._dispatch, self._counts, self._suspects, waits, turns)
        self._moves = PlannedMoves(relay, self._registry, self._dispatch, self._resumes, self._counts)
        self._registry.on_loss(lambda node: self._pool.suspect(node.url))
        self._deadlines: ExpiryQueue[RelayedRequest] = ExpiryQueue(
            self._config.request.timeout_s, lambda relayed: relayed.cut(CutReason.DEADLINE)
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cut_all()
        self._moves.close()
        self._pool.close()
        self._deadlines.close()

    def begin(
        self, task: asyncio.Task[None], request_id: str, path: str, traceparent: str | None = None
    ) -> RelayedRequest:
        """Begins a relayed request for the request that ``task`` handles, and returns it.

        ``traceparent`` is the client's header of that name.
        """
        tracing = self._tracing
        exports = tracing.exports
        # Most often nobody has a use for a trace.
        trace = tracing.begin(traceparent) if exports or traceparent is not None else None
        relayed = RelayedRequest(
            task, request_id, path, self._timeout_s, self._ended, trace, exports=exports, on_loss=self._node_lost
        )
        self._deadlines.add(relayed)
        self._counts.began(relayed)
        return relayed

    def cut_all(self) -> None:
        """Cuts every request short: the time to drain is over."""
        for relayed in tuple(self._counts.under_way):
            relayed.cut(CutReason.SHUTDOWN)

    async def forward(self, relayed: RelayedRequest, request: NodeRequest) -> CompleteResponse | StreamedResponse:
        """Returns the response to ``request``. A streamed request ends with its stream; the caller ends any other.

        Raises RequestError if no node gives a response.
        """
        body, terms = request.body, request.terms
        self._suspects.check(request.path, body.data, terms.client)
        model = requested_model(self._registry.serving(), body.model)
        keep = terms.keep
        # The same prompt of another owner is another one for prefix caches.
        query = RouteQuery(model, terms.cache_owner + body.prompt_start, b"" if keep is None else keep.key)
        asks_again = keep is not None and keep.after is not None
        dispatch, loop = self._dispatch, self._loop

        def choose(tried: frozenset[bytes]) -> Route:
            return dispatch.choose(relayed, query, tried, body.answers)

        route, rule = choose(NOBODY), None
        while True:
            dispatch.begin(relayed, body, route)
            result = await self._try_node(relayed, request, query, route)
            if not isinstance(result, AttemptFailure):
                return result
            rule = rule or AttemptRule(self._resume_wait_s, asks_again=asks_again)
            asked = relayed.route or route  # another node may have gone on meanwhile
            self._note_failure(relayed, asked, rule.attempts, result)
            rule.failed(asked.decode.boot_id, result, loop.time())
            step = rule.next(choose, loop.time())
            if isinstance(step, Wait):
                step = await self._waits.route(relayed, query, terms.client, step) or rule.give_up()
            if isinstance(step, GiveUp):
                return self._given_up(relayed, request, step)
            self._counts.retried()
            route = step

    def _given_up(self, relayed: RelayedRequest, request: NodeRequest, end: GiveUp) -> CompleteResponse:
        """Returns the answer of a node that is an error, or raises the error that the client gets."""
        if end.losses:
            body, client = request.body.data, request.terms.client
            raise self._suspects.add(request.path, body, relayed.request_id, end.losses, client)
        if end.answer is None:
            raise end.error
        return end.answer

    def _note_failure(self, relayed: RelayedRequest, route: Route, number: int, failure: AttemptFailure) -> None:
        counts_as = failure.kind.counts_as
        level = logging.INFO if counts_as is NodeFailure.REFUSED else logging.WARNING
        name = ", ".join(node.name for node in failure.prefill_lost if node.name) or route.decode.name
        relayed.attempt_failed(counts_as.value)
        if not failure.kind.is_counted:
            self._counts.nodes.failed(route.decode, counts_as)
        decode = route.decode.name
        log.log(level, "request_id=%s attempt=%d decode=%s: %s", relayed.request_id, number, decode, failure.error)
        if counts_as is NodeFailure.UNREACHABLE:
            self._dispatch.note_unreachable(route.decode)
        if counts_as is not NodeFailure.REFUSED:
            self._counts.incidents.add(
                IncidentKind.ATTEMPT_FAILED, failure.error.message, node=name, request=relayed.request_id
            )

    async def _try_node(
        self, relayed: RelayedRequest, request: NodeRequest, query: RouteQuery, route: Route
    ) -> CompleteResponse | StreamedResponse | AttemptFailure:
        node = route.decode
        try:
            response = await self._dispatch.post(relayed, request, route)
        except NodeUnreachable as exc:
            return unreachable(node.name, process_gone=isinstance(exc, NodeRefused))
        except NodeLost as exc:
            return lost(node.name, exc)
        relayed.own_response(response)
        try:
            content_type, journal_bytes = media_type(response.headers), 0
            keep = request.terms.keep
            if keep is not None and (replay := read_replay(response.headers.get(REPLAY_HEADER))) is not None:
                # Another node goes on with this answer, which has an identity since it was asked for first.
                request, journal_bytes = request.with_terms(answer=replay.answer), replay.journal_bytes
            if response.status == 200 and content_type == "text/event-stream":
                return await self._stream(relayed, request, query, response, journal_bytes)
            if content_type == JOURNALED_ANSWER:
                return await self._journaled_answer(relayed, request, query, response)
            answer = take_complete(relayed, response) or await read_complete(relayed, response)
            if answer.status == Gone.status and keep is not None:
                return no_stored_answer(node.name, answer)
            if answer.status == PrefillLost.status:
                return returned(node.name, await self._dispatch.returned(relayed, answer.body))
            return judged(node.name, answer, content_type)
        except NodeLost as exc:
            return lost(node.name, exc)

    async def _stream(
        self,
        relayed: RelayedRequest,
        request: NodeRequest,
        query: RouteQuery,
        response: NodeResponse,
        journal_bytes: int,
    ) -> StreamedResponse:
        stream = EventStream(relayed, response, self._resumption(relayed, request, query), journal_bytes)
        relayed.tells_first_token = True
        await stream.open()
        relayed.got_byte()
        relayed.begin_relaying(response.status)
        return StreamedResponse(response.status, relayed_headers(response.headers), stream)

    def _resumption(self, relayed: RelayedRequest, request: NodeRequest, query: RouteQuery) -> Resumption | None:
        if request.terms.answer is None or relayed.route is None:
            return None
        return self._watched_resumption(relayed, query, RelayJournal(self._journals, request), STREAMED)

    def _watched_resumption(
        self, relayed: RelayedRequest, query: RouteQuery, journal: RelayJournal, content_types: frozenset[str]
    ) -> Resumption:
        """Returns the way of an answer to other nodes, after a loss or from a node that drains."""
        relayed.own_journal(journal)
        resumption = Resumption(self._resumes, relayed, query, journal, content_types)
        self._moves.watch(relayed, resumption)
        return resumption

    async def _journaled_answer(
        self, relayed: RelayedRequest, request: NodeRequest, query: RouteQuery, response: NodeResponse
    ) -> CompleteResponse | AttemptFailure:
        """Returns the answer of the node, or of those that go on with it, or the failure of the last of them."""
        journal = RelayJournal(self._journals, request)
        resumption = self._watched_resumption(relayed, query, journal, RESUMED_TYPES)
        silence_s = self._config.relay.idle_timeout_s
        try:
            answer = await JournaledAnswer(relayed, response, journal, silence_s).read(resumption)
        except ResumeFailed as exc:
            in_time = exc.outcome is not ResumeOutcome.NO_NODE
            kind = FailureKind.NOT_CONTINUED if in_time else FailureKind.NOT_CONTINUED_IN_TIME
            failure = lost(relayed.decode_name, exc, kind)
            if exc.outcome is ResumeOutcome.FAILED:
                raise failure.error from exc
            relayed.open_again()
            return failure
        finally:  # a request that begins again has nothing of this journal
            self._moves.ended(relayed)
            relayed.own_journal(None)
        return judged(relayed.decode_name, answer, media_type(answer.headers))

    def new_identity(self, path: str) -> AnswerIdentity | None:
        """Returns the identity for the answer to a request to ``path``; None if no other node may go on with it."""
        if not self._resumes_answers or path not in COMPLETION_ROUTES:
            return None
        return AnswerIdentity(new_id(), int(time.time()))

    def _node_lost(self, node: NodeInfo) -> None:
        self._counts.nodes.failed(node, NodeFailure.LOST)

    def _ended(self, relayed: RelayedRequest) -> None:
        self._deadlines.discard(relayed)
        self._moves.ended(relayed)
        record = relayed.record()
        self._counts.ended(relayed, record)
        # Those who have no key leave nothing behind, or they could push out what others have left.
        if relayed.status != UNAUTHORIZED:
            self._tracing.parts.add_record(record, traced=record.span is not None)

    def _live_parts(self, request_id: str) -> list[TimelinePart]:
        if not self._tracing.parts.wanted:
            return []
        return [relayed.record().part() for relayed in self._counts.under_way if relayed.request_id == request_id]
