"""Has another node go on with a stream whose node was lost, drains, or runs out of blocks.

    RELAYING ──▶ lost ──▶ a node ──▶ a turn ──▶ its first events ──▶ RELAYING
                             │                       └──▶ it is lost too, or gives an unfit answer: failed
                             └──▶ no node in time: no_node

The node gets the request as the first one did, with the journal of what the client has, and goes on behind that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from pdserve.config import RelayConfig
from pdserve.errors import PrefillLost, Unavailable
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.status import IncidentKind
from pdserve.wire.timeline import MomentKind
from pdserve_proxy.continuation.journal import RelayJournal
from pdserve_proxy.continuation.losses import MAX_LOSSES, LostNode, Suspects
from pdserve_proxy.continuation.turns import ResumeTurn, ResumeTurns
from pdserve_proxy.records.access_log import RequestCounts
from pdserve_proxy.records.node_counts import NodeFailure
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.dispatch import REFUSALS, Dispatch, NodeRequest
from pdserve_proxy.relay.outcomes import MoveOutcome, MoveReason, ResumeOutcome
from pdserve_proxy.relay.relayed_request import RelayedRequest, RelayPhase
from pdserve_proxy.relay.route_wait import RouteWait
from pdserve_proxy.routing.router import RETRY_AFTER_S, Kind, Route, RouteQuery
from pdserve_proxy.upstream.node_connection import NodeLost, NodeResponse, NodeUnreachable

log = logging.getLogger(__name__)

MAX_RESUMES_OF_ONE = 8
"""The times that one request is resumed."""
MAX_HOLDERS = 4
"""The nodes that are asked for a stream's blocks, one after another."""
REFUSALS_IN_A_ROW = 4
"""After so many nodes have refused a stream, it waits: where so many are busy, more attempts only add to their load."""
NEXT_EVENT_S = 0.25
"""A stream leaves its node behind the next event, or after so many seconds without one."""

STREAMED = frozenset({"text/event-stream"})
"""The content type with which a node goes on with a stream."""

Begin: TypeAlias = Callable[[NodeResponse], Awaitable[bytes]]
"""Takes a node's response over and returns its first events. Raises NodeLost."""


class ResumeFailed(Exception):
    """The stream does not go on. The message says why."""

    def __init__(self, outcome: ResumeOutcome, why: str, lost: str = "") -> None:
        """``lost`` says which nodes were lost with it, if that is why."""
        super().__init__(why)
        self.outcome = outcome
        self.lost = lost


@dataclass(frozen=True, slots=True)
class LostStream:
    """A stream whose node was lost, or is left, or an answer in one piece that has a journal as a stream has."""

    relayed: RelayedRequest
    content_types: frozenset[str]
    """The content types with which another node goes on."""
    request: NodeRequest
    query: RouteQuery
    journal: RelayJournal
    node: NodeInfo
    """The node that was lost, or is left."""
    holders: tuple[NodeInfo, ...] = ()
    """Nodes that may hold blocks of the answer's KV cache, the likeliest first."""
    needs_places: bool = False
    """Whether only nodes with places for all of its answers can go on: it can stay where it is until there is one."""
    needs_tokens: int = 0
    """Only nodes with free blocks for so many tokens can go on: it leaves a node that has too few."""

    @property
    def entries(self) -> bytes:
        """The journal's entries as of now: what the client has."""
        return self.journal.lines()


@dataclass(frozen=True, slots=True)
class Declined:
    """A node does not go on with a stream; another one may."""

    why: str
    lost: bool = False
    """Whether the node was lost with the stream, which may be what killed it."""
    prefill_lost: tuple[LostNode, ...] = ()
    """The prefill nodes that were lost with the stream, which the node returns."""
    link_lost: bool = False
    """Whether it returns the stream because its link to a prefill node broke, which lives."""


@dataclass(frozen=True, slots=True)
class PlannedCut:
    """An answer leaves its node by plan."""

    to: Route
    """The nodes that are prepared."""
    reason: MoveReason


NO_WORK = Declined("it takes no requests any more")


class Resumption:
    """The way of one stream to another node, each time that its node is lost."""

    def __init__(
        self,
        resumes: Resumes,
        relayed: RelayedRequest,
        query: RouteQuery,
        journal: RelayJournal,
        content_types: frozenset[str] = STREAMED,
    ) -> None:
        """``content_types`` are those with which a node goes on."""
        self._resumes = resumes
        self._content_types = content_types
        self._relayed = relayed
        self._query = query
        self.journal = journal
        """What the stream can be resumed from."""
        self._count = 0
        self._holders: tuple[NodeInfo, ...] = ()
        self._cut: PlannedCut | None = None
        """Set when the present node is left by plan."""
        self.moves_for_blocks = 0
        """How often the answer has left a node that had no blocks left."""
        self._left_s = 0.0
        """When the last event of a node came that is left by plan, or a little later."""
        self._gone: asyncio.Future[Declined | None] | None = None
        """Settled when the stream is at the node that is prepared, or has to stay."""

    @property
    def planned(self) -> bool:
        """Whether the present node is left by plan, and not lost."""
        return self._cut is not None

    @property
    def may_be_resumable(self) -> bool:
        """Whether there is a journal, or will be one when something has come."""
        return self.journal.request is not None

    def leaving(self) -> LostStream | None:
        """Returns the stream as another node can go on with it now; None if none can."""
        try:
            return self._lost_stream(left=True)
        except ResumeFailed:
            return None

    def is_at(self, node: NodeInfo) -> bool:
        """Returns whether ``node`` has the stream now, in the attempt that has begun last, and is not lost."""
        relayed = self._relayed
        return relayed.phase is not RelayPhase.RESUMING and relayed.route is not None and relayed.route.decode is node

    def move_to(self, route: Route, reason: MoveReason = MoveReason.DRAIN) -> asyncio.Future[Declined | None]:
        """Leaves the present node after its next event, for that of ``route``, which is prepared.

        Returns a future that is done when the stream is elsewhere, or has to stay. It has a result if that is because
        of the prepared node, and another one may take the stream.
        """
        loop = asyncio.get_running_loop()
        gone = self._gone = loop.create_future()
        asked_s = loop.time()

        def cut_over() -> None:
            if gone.done() or self._gone is not gone:
                return
            if self.leaving() is None:
                gone.set_result(None)
            elif not self._resumes.takes_work(self._query, route.decode):
                gone.set_result(NO_WORK)
            else:
                now_s = loop.time()
                self._left_s = now_s if now_s < asked_s + NEXT_EVENT_S else asked_s
                self._cut = PlannedCut(route, reason)
                self._relayed.leave_node()

        self._relayed.after_next_event(NEXT_EVENT_S, cut_over)
        return gone

    async def go_on(self, begin: Begin, loss: NodeLost) -> bytes:
        """Returns the first events of the node that goes on. Raises ResumeFailed.

        ``loss`` says why the node that has the stream is lost. It tells nothing if that is left by plan.
        """
        gone, self._gone = self._gone, None  # a loss before the cut: there is nothing to cut any more
        try:
            return await self._go_on(begin, loss)
        finally:
            if gone is not None and not gone.done():
                gone.set_result(None)

    async def _go_on(self, begin: Begin, loss: NodeLost) -> bytes:
        relayed, counts = self._relayed, self._resumes.counts
        loop = asyncio.get_running_loop()
        cut, self._cut = self._cut, None
        from_s = (loss.heard_s or loop.time()) if cut is None else self._left_s
        try:
            # It cannot stay any more: if need be, it waits for a place.
            stream = replace(self._lost_stream(left=cut is not None), needs_places=False)
            self._holders = stream.holders
            events = stream.journal.count
            if cut is None:
                relayed.note(MomentKind.LOST)
            relayed.begin_resuming("lost" if cut is None else "left")
            data = await self._resumes.resume(stream, begin, cut)
        except ResumeFailed as exc:
            counts.resume_ended(exc.outcome)
            counts.incidents.add(
                IncidentKind.ATTEMPT_FAILED,
                f"no other node goes on with its answer: {exc}",
                node=relayed.decode_name,
                request=relayed.request_id,
            )
            raise
        except asyncio.CancelledError:
            if relayed.cut_short is not None:
                counts.resume_ended(ResumeOutcome.FAILED)
            raise
        gap_s = loop.time() - from_s
        if cut is None:
            counts.resume_ended(ResumeOutcome.RESUMED, gap_s)
            if relayed.route is not None:
                counts.nodes.resumed(relayed.route.decode)
            self._count += 1
        else:
            self.moves_for_blocks += cut.reason is MoveReason.BLOCKS
            back = relayed.route is not None and relayed.route.decode.boot_id == stream.node.boot_id
            counts.move_ended(cut.reason, MoveOutcome.STAYED if back else MoveOutcome.MOVED, gap_s)
        why = str(loss) if cut is None else cut.reason.value
        counts.incidents.add(
            IncidentKind.RESUMED if cut is None else IncidentKind.MOVED,
            f"its answer goes on at {relayed.decode_name}: {why}",
            node=stream.node.name,
            request=relayed.request_id,
        )
        relayed.note(MomentKind.RESUMED if cut is None else MomentKind.MOVED, gap_s)
        log.info(
            "request_id=%s %s from=%s to=%s events=%d gap_s=%.3f: %s",
            relayed.request_id,
            "resumed" if cut is None else "moved",
            stream.node.name,
            relayed.decode_name,
            events,
            gap_s,
            why,
        )
        return data

    def _lost_stream(self, *, left: bool) -> LostStream:
        """Returns the stream whose node was lost, or is ``left`` and may be asked for blocks. Raises ResumeFailed."""
        journal, route = self.journal, self._relayed.route
        if journal.request is None or not journal.resumable or route is None:
            raise ResumeFailed(ResumeOutcome.NOT_RESUMABLE, "there is no complete journal of it")
        if not left and self._count == MAX_RESUMES_OF_ONE:
            raise ResumeFailed(ResumeOutcome.FAILED, f"it was resumed {MAX_RESUMES_OF_ONE} times already")
        # What a node returned before another one went on stays where it is: the newest come first.
        newest = (route.decode, *route.prefill) if left else route.prefill
        held = {node.boot_id: node for node in (*newest, *self._holders)}
        return LostStream(
            relayed=self._relayed,
            content_types=self._content_types,
            request=journal.request,
            query=self._query,
            journal=journal,
            node=route.decode,
            holders=tuple(held.values())[:MAX_HOLDERS],
            needs_places=left,
        )


class Resumes:
    """Finds the nodes that go on with the streams of one proxy process, for so many streams at a time.

    A stream waits for a node for ``resume_wait_s``. When there is one, it waits for its turn until the request's
    deadline, which does not count: others are being resumed meanwhile. A request with which a second decode node is
    lost before it has said anything goes to no third one: it may be what they died of. A stream may lose a prefill
    node besides, because that one may have died together with its decode node.
    """

    def __init__(
        self,
        config: RelayConfig,
        registry: RegistryView,
        dispatch: Dispatch,
        counts: RequestCounts,
        suspects: Suspects,
        waits: RouteWait,
        turns: ResumeTurns,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._wait_s = config.resume_wait_s
        self._registry = registry
        self._dispatch = dispatch
        self.counts = counts
        self._suspects = suspects
        self._turns = turns
        self._waits = waits

    async def resume(self, stream: LostStream, begin: Begin, cut: PlannedCut | None = None) -> bytes:
        """Returns the first events of the node that goes on with ``stream``. Raises ResumeFailed.

        After a ``cut``, the node that is prepared is asked first, without a turn: its own move has one. A node that was
        left for want of blocks may be asked again, if that one declines. It may still have the answer's blocks in its
        prefix cache, but it may also refuse the request like any other.
        """
        until_s = self._loop.time() + self._wait_s
        asked_again_s: dict[bytes, float] = {}
        if cut is None or cut.reason is not MoveReason.BLOCKS:
            asked_again_s[stream.node.boot_id] = math.inf
        refusals, losses = 0, {stream.node.boot_id: f"node {stream.node.name} was lost with its answer"}
        if cut is not None:
            losses.clear()  # the node is left in good health
            answer = await self._ask_prepared(stream, cut.to, begin)
            if isinstance(answer, bytes):
                return answer
            if answer.lost:
                losses[cut.to.decode.boot_id] = answer.why
            self._note_declined(stream, cut.to.decode, answer, asked_again_s)
        while True:
            route = await self.route(stream, asked_again_s, until_s)
            # A stream that no node can go on with takes no turn from others.
            waits, began_s = self._turns.none_left, self._loop.time()
            async with self._turns.turn() as turn:
                if waits:
                    until_s += self._loop.time() - began_s
                    found = self.choose(stream, asked_again_s)
                    if found is None:
                        continue
                    route = found
                try:
                    answer = await self._ask(stream, route, begin, turn)
                except ResumeFailed as exc:
                    if not exc.lost:
                        raise
                    losses[route.decode.boot_id] = exc.lost
                    if len(losses) >= MAX_LOSSES:
                        self._suspect(stream, losses.values())
                        raise
                    answer = Declined(exc.lost)
            if isinstance(answer, bytes):
                return answer
            for node in answer.prefill_lost:  # two nodes may tell of the same one
                losses.setdefault(node.boot_id, answer.why)
            # Decode and prefill node may have died together: one more may be tried.
            if len(losses) > MAX_LOSSES:
                self._suspect(stream, losses.values())
                raise ResumeFailed(ResumeOutcome.FAILED, answer.why)
            if answer.link_lost or answer.prefill_lost:  # the same node may go on at once
                stream.relayed.begin_resuming()
            else:
                self._note_declined(stream, route.decode, answer, asked_again_s)
            refusals += 1
            if refusals % REFUSALS_IN_A_ROW == 0:
                await asyncio.sleep(RETRY_AFTER_S)
            if self._loop.time() >= until_s:
                raise ResumeFailed(ResumeOutcome.NO_NODE, f"{refusals} attempts were refused in {self._wait_s:g} s")

    def _suspect(self, stream: LostStream, losses: Iterable[str]) -> None:
        request = stream.request
        self._suspects.add(
            request.path, request.body.data, stream.relayed.request_id, list(losses), request.terms.client
        )

    def _note_declined(
        self, stream: LostStream, node: NodeInfo, answer: Declined, asked_again_s: dict[bytes, float]
    ) -> None:
        asked_again_s[node.boot_id] = self._loop.time() + RETRY_AFTER_S
        request_id = stream.relayed.request_id
        log.info("request_id=%s decode=%s does not resume: %s", request_id, node.name, answer.why)
        stream.relayed.begin_resuming()

    async def _ask_prepared(self, stream: LostStream, route: Route, begin: Begin) -> bytes | Declined:
        """Does ``_ask``. If this node is lost, it is the first one, since the old one was left in good health."""
        try:
            return await self._ask(stream, route, begin)
        except ResumeFailed as exc:
            return Declined(str(exc), lost=bool(exc.lost))

    async def _ask(
        self, stream: LostStream, route: Route, begin: Begin, turn: ResumeTurn | None = None
    ) -> bytes | Declined:
        """Returns the first events of the node of ``route``, or why it does not go on and another one may.

        Raises ResumeFailed if no other one should.
        """
        node, relayed = route.decode, stream.relayed
        self._dispatch.begin(relayed, stream.request.body, route)
        try:
            holders = self.known(stream.holders, node)
            response = await self._dispatch.post(relayed, stream.request, route, stream.entries, holders)
            relayed.own_response(response)
            if response.status == 200 and response.content_type in stream.content_types:
                return await begin(response)
        except NodeUnreachable as exc:
            self._registry.mark_unreachable(node.boot_id)
            self.counts.nodes.failed(node, NodeFailure.UNREACHABLE)
            return Declined(f"it cannot be reached: {exc}")
        except NodeLost as exc:
            self.counts.nodes.failed(node, NodeFailure.LOST)
            why = f"node {node.name} was lost with it too: {exc}"
            raise ResumeFailed(ResumeOutcome.FAILED, why, why) from exc
        except Unavailable as exc:  # which says nothing about the node
            return Declined(exc.message)
        if response.status == PrefillLost.status:
            if turn is not None:
                turn.end()  # the looks at a prefill node that stands still take a while
            back = await self._dispatch.returned(relayed, response.take_complete())
            return Declined(back.why, prefill_lost=back.lost, link_lost=not back.lost)
        if response.status not in REFUSALS:
            raise ResumeFailed(ResumeOutcome.FAILED, f"node {node.name} answered with status {response.status}")
        self.counts.nodes.failed(node, NodeFailure.REFUSED)
        return Declined(f"it answered with status {response.status}")

    async def route(self, stream: LostStream, asked_again_s: Mapping[bytes, float], until_s: float) -> Route:
        """Returns a route to a node that may be asked now, when there is one. Raises ResumeFailed."""
        route = await self._waits.route(lambda: self.choose(stream, asked_again_s), until_s, asked_again_s.values())
        if route is None:
            raise ResumeFailed(ResumeOutcome.NO_NODE, f"no other node could go on within {self._wait_s:g} s")
        return route

    def choose(self, stream: LostStream, asked_again_s: Mapping[bytes, float]) -> Route | None:
        """Returns a route to a node that may be asked now, if there is one: if possible one with the same kernels."""
        now_s, node = self._loop.time(), stream.node
        excluded = self._full(stream).union(boot_id for boot_id, at_s in asked_again_s.items() if at_s > now_s)
        # Nodes of other kernels may round differently.
        for kernels in (node.kernels, None):
            query = msgspec.structs.replace(
                stream.query, kind=Kind(node.fingerprint, node.formats, node.capacity.max_model_len, kernels)
            )
            with suppress(Unavailable):
                return self._dispatch.choose(stream.relayed, query, excluded)
        return None

    def takes_work(self, query: RouteQuery, node: NodeInfo) -> bool:
        """Returns whether ``node`` is one of those that requests go to now."""
        return node.boot_id in self._registry.serving().decode_nodes.get(query.model, ())

    def known(self, holders: Sequence[NodeInfo], asking: NodeInfo) -> list[NodeInfo]:
        """Returns the holders that are registered and can be fetched from, without the node that is to ask them."""
        registered = (node for node in holders if self._registry.load(node.boot_id) is not None)
        return [node for node in registered if node.control and node.boot_id != asking.boot_id]

    def _full(self, stream: LostStream) -> frozenset[bytes]:
        """Returns the decode nodes that lack places or blocks, if the stream needs some: only a planned move does."""
        if not (stream.needs_places or stream.needs_tokens):
            return frozenset()
        nodes = [pair.decode for pair in self._registry.serving().pairings.get(stream.query.model, ())]
        full: set[bytes] = set()
        if stream.needs_places:
            full |= {node.boot_id for node in nodes if not self._dispatch.has_places(stream.request.body, node)}
        if stream.needs_tokens:
            full |= {node.boot_id for node in nodes if not self._dispatch.has_blocks(stream.needs_tokens, node)}
        return frozenset(full)
