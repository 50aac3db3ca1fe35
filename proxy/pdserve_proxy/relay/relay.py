"""Relays a client's request to a decode node and the response back, with one upstream request per attempt.

Each attempt carries a signed ticket, in an HTTP header, that describes the attempt to the decode node. Another node
replaces one that cannot be reached or does not take the request (503, 401), as long as there is one that fits. A node
that is lost with the request before its first byte is replaced once, if need be by one that comes a little later. After
the first byte, another node goes on with the client's stream (``resume``), or the stream ends with an error event
(``event_stream``). An answer in one piece goes on too, if its node has journaled it (``whole_answer``), and otherwise
begins again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import msgspec

from pdserve.config import ProxyConfig, Switch
from pdserve.errors import BadUpstream, Gone, PrefillLost, RequestError, Unavailable
from pdserve.http.tls import Trust
from pdserve.tracing.tracing import Tracing
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.ids import new_id
from pdserve.wire.kept_answer import KEPT_HEADER, read_replay
from pdserve.wire.status import IncidentKind
from pdserve.wire.ticket import AnswerIdentity
from pdserve.wire.timeline import RequestLane
from pdserve.wire.version import DIALECTS, KEPT_ANSWERS
from pdserve.wire.whole_answer import JOURNALED_ANSWER
from pdserve_proxy.continuation.journal import LARGEST_SHARE, JournalBudget, RelayJournal
from pdserve_proxy.continuation.losses import MAX_LOSSES, LostNode, ReturnedRequest, Suspects
from pdserve_proxy.continuation.move import PlannedMoves
from pdserve_proxy.continuation.resume import STREAMED, ResumeFailed, Resumes, Resumption
from pdserve_proxy.continuation.turns import ResumeLimit, ResumeTurns
from pdserve_proxy.records.access_log import RequestCounts
from pdserve_proxy.records.node_counts import AttemptFailureKind
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.complete_answer import RESUMED_TYPES, JournaledAnswer, WholeResponse, kept, read_whole
from pdserve_proxy.relay.dispatch import Dispatch, NodeRequest, TicketSigner, writes_journals
from pdserve_proxy.relay.event_stream import EventStream
from pdserve_proxy.relay.outcomes import CutReason, ResumeOutcome
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.relay.route_wait import MissedNodes, RouteWait
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.routing.router import RETRY_AFTER_S, Route, RouteQuery, requested_model
from pdserve_proxy.upstream.expiry_queue import ExpiryQueue
from pdserve_proxy.upstream.node_connection import NodeLost, NodeRefused, NodeResponse, NodeUnreachable, media_type
from pdserve_proxy.upstream.node_pool import NodePool

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 16
"""The attempts at one request. Where so many nodes in a row are busy, more attempts only add to their load."""
UNAUTHORIZED = 401
COMPLETION_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
DIALECT_ROUTES = frozenset({"/v1/messages", "/v1/messages/count_tokens", "/v1/responses"})
"""The routes that nodes of older versions do not have."""


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """A response whose first byte has come."""

    status: int
    headers: dict[str, str]
    body: EventStream


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """A failed attempt, after which another node may serve the request."""

    kind: AttemptFailureKind
    error: RequestError
    answer: WholeResponse | None = None
    """The node's own answer, if it gave one."""
    counted: bool = False
    """Whether the failures of nodes behind it are counted already, or are none."""
    given_back: bool = False
    """Whether the node that was asked lives, and has lost its prefill node or the link to it."""
    prefill_lost: tuple[LostNode, ...] = ()
    """The prefill nodes that are lost, if it is not the node that was asked."""
    lacks_answer: bool = False
    """Whether the node only does not have the answer that a client asks for again."""
    may_come_back: bool = False
    """Whether the node that could not be asked may be there again soon, with the answers that it keeps."""
    has_waited: bool = False
    """Whether the request has waited already for a node that goes on with its answer."""

    @property
    def loses_decode(self) -> bool:
        return self.kind is AttemptFailureKind.LOST and not self.given_back


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
        self._registry = registry
        self._attempts = attempts
        self._tickets = tickets
        self._counts = counts
        budget = config.relay.journal_mib * 2**20
        self._journals = counts.journals = JournalBudget(budget, budget // LARGEST_SHARE)
        self._suspects = suspects or Suspects(config.relay.suspect_s)
        self._tracing = tracing or Tracing()
        self._tracing.lanes.live = self._live_lanes

    async def __aenter__(self) -> Self:
        relay = self._config.relay
        self._pool = NodePool(
            connect_timeout_s=relay.connect_timeout_s, max_connections=relay.max_connections, trust=self._trust
        )
        self._counts.watch(self._registry, self._attempts)
        nodes = self._counts.nodes
        self._dispatch = Dispatch(self._config, self._registry, self._attempts, self._tickets, self._pool, nodes)
        waits = RouteWait(self._registry)
        self._missed = MissedNodes(relay, self._dispatch, waits)
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

    async def forward(self, relayed: RelayedRequest, request: NodeRequest) -> WholeResponse | StreamedResponse:
        """Returns the response to ``request``. A streamed request ends with its stream; the caller ends any other.

        Raises RequestError if no node gives a response.
        """
        self._suspects.check(request.path, request.body.data, request.client)
        request = self._with_identity(request)
        model = requested_model(self._registry.serving(), request.body.model)
        oldest, key = DIALECTS if request.path in DIALECT_ROUTES else 0, b""
        if request.keep is not None:
            if self._keeps_answers(model):
                oldest, key = max(oldest, KEPT_ANSWERS), request.keep.key
            elif request.keep.after is None:
                request = msgspec.structs.replace(request, keep=None)
            else:
                raise Gone(
                    f"no node that serves {model!r} is new enough to keep answers: send the request without "
                    "'Last-Event-ID'",
                    code="answer_not_kept",
                )
        # The same prompt of another owner is another one for prefix caches.
        query = RouteQuery(model, request.cache_owner + request.body.prompt_start, oldest, key)
        tried: frozenset[bytes] = frozenset()
        failures: dict[bytes, AttemptFailure] = {}
        """The last failure of each node, in their order."""
        losses: dict[bytes, str] = {}
        asked_again_s: dict[bytes, float] = {}
        """When each node that failed may be asked again, once no other one is left."""
        # No node dies of a request without a body: what is lost with it is a connection.
        looks_for_kept = request.keep is not None and request.keep.after is not None
        until_s = 0.0
        for number in range(MAX_ATTEMPTS):
            try:
                route = self._dispatch.choose(relayed, query, tried, request.body.answers)
            except RequestError:
                if not failures:
                    raise
                until_s = until_s or self._missed.until_s()
                if looks_for_kept:
                    found = await self._missed.route(relayed, query, request.client, asked_again_s, until_s)
                elif losses:
                    found = await self._missed.another(relayed, query, asked_again_s, until_s)
                else:
                    break
                if found is None:
                    break
                route = found
            if number:
                self._counts.retried()
            self._dispatch.begin(relayed, request.body, route)
            result = await self._try_node(relayed, request, query, route)
            if not isinstance(result, AttemptFailure):
                return result
            route = relayed.route or route  # another node may have gone on meanwhile
            if not result.given_back:
                tried |= {route.decode.boot_id}
            self._note_failure(relayed, route, number, result)
            failures.pop(route.decode.boot_id, None)
            failures[route.decode.boot_id] = result
            never = not result.may_come_back if looks_for_kept else result.loses_decode
            asked_again_s[route.decode.boot_id] = math.inf if never else self._missed.again_s()
            if result.has_waited:
                until_s = asyncio.get_running_loop().time()
            if result.kind is AttemptFailureKind.LOST and not looks_for_kept:
                # Two decode nodes may tell of the same prefill node.
                for lost in [node.boot_id for node in result.prefill_lost] or [route.decode.boot_id]:
                    losses.setdefault(lost, result.error.message)
                if len(losses) >= MAX_LOSSES:
                    body, told = request.body.data, list(losses.values())
                    raise self._suspects.add(request.path, body, relayed.request_id, told, request.client)
        # A node that has a kept answer may be the one that could not be asked: then the client may try again.
        asked = list(failures.values())
        failure = next((one for one in reversed(asked) if not one.lacks_answer), asked[-1])
        if failure.answer is None:
            raise failure.error
        return failure.answer

    def _keeps_answers(self, model: str) -> bool:
        """Returns whether a node keeps answers, if there is any at all that serves ``model`` now."""
        pairs = self._registry.serving().pairings.get(model, ())
        return not pairs or any(pair.decode.protocol >= KEPT_ANSWERS for pair in pairs)

    def _note_failure(self, relayed: RelayedRequest, route: Route, number: int, failure: AttemptFailure) -> None:
        level = logging.INFO if failure.kind is AttemptFailureKind.REFUSED else logging.WARNING
        name = ", ".join(node.name for node in failure.prefill_lost if node.name) or route.decode.name
        relayed.attempt_failed(failure.kind.value)
        if not failure.counted:
            self._counts.nodes.failed(route.decode, failure.kind)
        decode = route.decode.name
        log.log(level, "request_id=%s attempt=%d decode=%s: %s", relayed.request_id, number, decode, failure.error)
        if failure.kind is AttemptFailureKind.UNREACHABLE:
            self._dispatch.note_unreachable(route.decode)
        if failure.kind is not AttemptFailureKind.REFUSED:
            self._counts.incidents.add(
                IncidentKind.ATTEMPT_FAILED, failure.error.message, node=name, request=relayed.request_id
            )

    async def _try_node(
        self, relayed: RelayedRequest, request: NodeRequest, query: RouteQuery, route: Route
    ) -> WholeResponse | StreamedResponse | AttemptFailure:
        node = route.decode
        try:
            response = await self._dispatch.post(relayed, request, route)
        except NodeUnreachable as exc:
            error = Unavailable(
                f"node {node.name} cannot be reached", code="upstream_unreachable", retry_after_s=RETRY_AFTER_S
            )
            gone = isinstance(exc, NodeRefused)
            return AttemptFailure(AttemptFailureKind.UNREACHABLE, error, may_come_back=not gone)
        except NodeLost as exc:
            return _lost(node.name, exc)
        relayed.own_response(response)
        try:
            content_type, journal_bytes = response.content_type, 0
            if request.keep is not None and (replay := read_replay(response.headers.get(KEPT_HEADER))) is not None:
                # Another node goes on with this answer, which has an identity since it was asked for first.
                request, journal_bytes = msgspec.structs.replace(request, answer=replay.answer), replay.journal_bytes
            if response.status == 200 and content_type == "text/event-stream":
                return await self._stream(relayed, request, query, response, journal_bytes)
            if content_type == JOURNALED_ANSWER:
                return await self._journaled_answer(relayed, request, query, response)
            answer = await read_whole(relayed, response)
            if answer.status == Gone.status and request.keep is not None:
                return _not_kept(node.name, answer)
            if answer.status == PrefillLost.status:
                return _given_back(node.name, await self._dispatch.returned(relayed, answer.body))
            return _judge(node.name, answer, content_type)
        except NodeLost as exc:
            return _lost(node.name, exc)

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
        return StreamedResponse(response.status, kept(response.headers), stream)

    def _resumption(self, relayed: RelayedRequest, request: NodeRequest, query: RouteQuery) -> Resumption | None:
        if request.answer is None or relayed.route is None:
            return None
        journal = RelayJournal(self._journals, request) if writes_journals(relayed.route.decode) else None
        return self._watched_resumption(relayed, query, journal, STREAMED)

    def _watched_resumption(
        self, relayed: RelayedRequest, query: RouteQuery, journal: RelayJournal | None, content_types: frozenset[str]
    ) -> Resumption:
        """Returns the way of an answer to other nodes. An answer with a journal also leaves nodes that drain."""
        relayed.own_journal(journal)
        resumption = Resumption(self._resumes, relayed, query, journal, content_types)
        if journal is not None:
            self._moves.watch(relayed, resumption)
        return resumption

    async def _journaled_answer(
        self, relayed: RelayedRequest, request: NodeRequest, query: RouteQuery, response: NodeResponse
    ) -> WholeResponse | AttemptFailure:
        """Returns the answer of the node, or of those that go on with it, or the failure of the last of them."""
        journal = RelayJournal(self._journals, request)
        resumption = self._watched_resumption(relayed, query, journal, RESUMED_TYPES)
        silence_s = self._config.relay.idle_timeout_s
        try:
            answer = await JournaledAnswer(relayed, response, journal, silence_s).read(resumption)
        except ResumeFailed as exc:
            waited = exc.outcome is ResumeOutcome.NO_NODE
            failure = replace(_lost(relayed.decode_name, exc), counted=True, has_waited=waited)
            if exc.outcome is ResumeOutcome.FAILED:
                raise failure.error from exc
            relayed.open_again()
            return failure
        finally:  # a request that begins again has nothing of this journal
            self._moves.ended(relayed)
            relayed.own_journal(None)
        return _judge(relayed.decode_name, answer, media_type(answer.headers))

    def _with_identity(self, request: NodeRequest) -> NodeRequest:
        """Returns ``request`` with an identity of its answer, if there is one that other nodes may go on with."""
        if self._config.relay.resume is Switch.OFF or request.path not in COMPLETION_ROUTES:
            return request
        return msgspec.structs.replace(request, answer=AnswerIdentity(new_id(), int(time.time())))

    def _node_lost(self, node: NodeInfo) -> None:
        self._counts.nodes.failed(node, AttemptFailureKind.LOST)

    def _ended(self, relayed: RelayedRequest) -> None:
        self._deadlines.discard(relayed)
        self._moves.ended(relayed)
        record = relayed.record()
        self._counts.ended(relayed, record)
        # Those who have no key leave nothing behind, or they could push out what others have left.
        if relayed.status != UNAUTHORIZED:
            self._tracing.lanes.add_record(record, traced=record.span is not None)

    def _live_lanes(self, request_id: str) -> list[RequestLane]:
        if not self._tracing.lanes.wanted:
            return []
        return [relayed.record().lane() for relayed in self._counts.under_way if relayed.request_id == request_id]


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


def _not_kept(node: str, answer: WholeResponse) -> AttemptFailure:
    """Returns the failure of a node that does not have the answer which a client asks for again; another one may."""
    error = Gone(f"node {node} does not have this answer", code="answer_not_kept")
    return AttemptFailure(AttemptFailureKind.REFUSED, error, answer, counted=True, lacks_answer=True)


def _given_back(node: str, request: ReturnedRequest) -> AttemptFailure:
    """Returns the failure of a node that gives a request back. It is a loss only if a prefill node is lost."""
    if request.lost:
        error = BadUpstream(f"{request.why}, says node {node}", code="upstream_lost")
        return AttemptFailure(AttemptFailureKind.LOST, error, counted=True, given_back=True, prefill_lost=request.lost)
    broken = Unavailable(
        f"node {node} has lost its link to a prefill node, which lives",
        code="upstream_busy",
        retry_after_s=RETRY_AFTER_S,
    )
    return AttemptFailure(AttemptFailureKind.REFUSED, broken, counted=True, given_back=True)


def _lost(node: str, exc: NodeLost | ResumeFailed) -> AttemptFailure:
    error = BadUpstream(f"node {node} was lost before it answered: {exc}", code="upstream_lost")
    return AttemptFailure(AttemptFailureKind.LOST, error, may_come_back=True)
