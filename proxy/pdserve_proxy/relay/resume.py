"""Has another node go on with a stream whose node was lost.

    RELAYING ──▶ lost ──▶ a node ──▶ a turn ──▶ its first events ──▶ RELAYING
                             │                       └──▶ it is lost too, or gives an unfit answer: failed
                             └──▶ no node in time: no_node

The node gets the request as the first one did, with the journal of what the client has, and goes on behind that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from pdserve.config import RelayConfig
from pdserve.errors import Unavailable
from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.access_log import RequestCounts
from pdserve_proxy.relay.dispatch import REFUSALS, Dispatch, NodeRequest, writes_journals
from pdserve_proxy.relay.journal import RelayJournal
from pdserve_proxy.relay.relayed_request import RelayedRequest, ResumeOutcome
from pdserve_proxy.routing.router import RETRY_AFTER_S, Route, RouteQuery
from pdserve_proxy.upstream.node_connection import NodeLost, NodeResponse, NodeUnreachable

log = logging.getLogger(__name__)

MAX_RESUMES_OF_ONE = 8
"""The times that one request is resumed."""
REFUSALS_IN_A_ROW = 4
"""After so many nodes have refused a stream, it waits: where so many are busy, more attempts only add to their load."""
PAUSE_S = 0.1
"""Seconds between a change of the registry and the next look at it: changes of many nodes come together."""

Begin: TypeAlias = Callable[[NodeResponse], Awaitable[bytes]]
"""Takes a node's response over and returns its first events. Raises NodeLost."""


class ResumeFailed(Exception):
    """The stream does not go on. The message says why."""

    def __init__(self, outcome: ResumeOutcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class LostStream:
    """A stream whose node was lost."""

    relayed: RelayedRequest
    request: NodeRequest
    query: RouteQuery
    entries: bytes
    """The journal's entries: what the client has."""
    node: NodeInfo
    """The node that was lost."""


@dataclass(frozen=True, slots=True)
class Declined:
    """A node does not go on with a stream; another one may."""

    why: str


class Resumption:
    """The way of one stream to another node, each time that its node is lost."""

    def __init__(
        self, resumes: Resumes, relayed: RelayedRequest, query: RouteQuery, journal: RelayJournal | None
    ) -> None:
        self._resumes = resumes
        self._relayed = relayed
        self._query = query
        self.journal = journal
        """What the stream can be resumed from; None if its node writes no journal."""
        self._count = 0

    async def go_on(self, begin: Begin) -> bytes:
        """Returns the first events of the node that goes on. Raises ResumeFailed."""
        relayed, counts = self._relayed, self._resumes.counts
        loop = asyncio.get_running_loop()
        lost_s = loop.time()
        try:
            stream = self._lost_stream()
            relayed.begin_resuming()
            data = await self._resumes.resume(stream, begin)
        except ResumeFailed as exc:
            counts.resume_ended(exc.outcome)
            raise
        except asyncio.CancelledError:
            if relayed.cut_short is not None:
                counts.resume_ended(ResumeOutcome.FAILED)
            raise
        gap_s = loop.time() - lost_s
        counts.resume_ended(ResumeOutcome.RESUMED, gap_s)
        self._count += 1
        log.info(
            "request_id=%s resumed from=%s to=%s events=%d gap_s=%.3f",
            relayed.request_id,
            stream.node.name,
            relayed.decode_name,
            stream.entries.count(b"\n"),
            gap_s,
        )
        return data

    def _lost_stream(self) -> LostStream:
        journal, route = self.journal, self._relayed.route
        if journal is None or journal.request is None or not journal.resumable or route is None:
            raise ResumeFailed(ResumeOutcome.NOT_RESUMABLE, "there is no whole journal of it")
        if self._count == MAX_RESUMES_OF_ONE:
            raise ResumeFailed(ResumeOutcome.FAILED, f"it was resumed {MAX_RESUMES_OF_ONE} times already")
        return LostStream(self._relayed, journal.request, self._query, journal.lines(), route.decode)


class Resumes:
    """Finds the nodes that go on with the streams of one proxy process, for so many streams at a time.

    A stream waits for a node for ``resume_wait_s``. When there is one, it waits for its turn until the request's
    deadline, which does not count: others are being resumed meanwhile. A request with which a second node is lost
    before it has said anything goes to no third one: it may be what they died of.
    """

    def __init__(self, config: RelayConfig, registry: RegistryView, dispatch: Dispatch, counts: RequestCounts) -> None:
        self._loop = asyncio.get_running_loop()
        self._wait_s = config.resume_wait_s
        self._registry = registry
        self._dispatch = dispatch
        self.counts = counts
        self._turns = asyncio.Semaphore(config.max_resumes)
        self._changed = asyncio.Event()
        """Set when the registry has changed since a stream last looked for a node."""
        registry.on_change(self._changed.set)

    async def resume(self, stream: LostStream, begin: Begin) -> bytes:
        """Returns the first events of the node that goes on with ``stream``. Raises ResumeFailed."""
        until_s = self._loop.time() + self._wait_s
        asked_again_s = {stream.node.boot_id: math.inf}
        refusals = 0
        while True:
            route = await self._route(stream, asked_again_s, until_s)
            # A stream that no node can go on with takes no turn from others.
            waits, began_s = self._turns.locked(), self._loop.time()
            async with self._turns:
                if waits:
                    until_s += self._loop.time() - began_s
                    found = self._choose(stream, asked_again_s)
                    if found is None:
                        continue
                    route = found
                answer = await self._ask(stream, route, begin)
            if isinstance(answer, bytes):
                return answer
            node = route.decode
            asked_again_s[node.boot_id] = self._loop.time() + RETRY_AFTER_S
            request_id = stream.relayed.request_id
            log.info("request_id=%s decode=%s does not resume: %s", request_id, node.name, answer.why)
            stream.relayed.begin_resuming()
            refusals += 1
            if refusals % REFUSALS_IN_A_ROW == 0:
                await asyncio.sleep(RETRY_AFTER_S)
            if self._loop.time() >= until_s:
                raise ResumeFailed(ResumeOutcome.NO_NODE, f"{refusals} attempts were refused in {self._wait_s:g} s")

    async def _ask(self, stream: LostStream, route: Route, begin: Begin) -> bytes | Declined:
        """Returns the first events of the node of ``route``, or why it does not go on and another one may.

        Raises ResumeFailed if no other one should.
        """
        node, relayed = route.decode, stream.relayed
        self._dispatch.begin(relayed, stream.request.body, route)
        try:
            response = await self._dispatch.post(relayed, stream.request, route, stream.entries)
            relayed.own_response(response)
            if response.status == 200 and response.content_type == "text/event-stream":
                return await begin(response)
        except NodeUnreachable as exc:
            self._registry.mark_unreachable(node.boot_id)
            return Declined(f"it cannot be reached: {exc}")
        except NodeLost as exc:
            raise ResumeFailed(ResumeOutcome.FAILED, f"node {node.name} was lost with it too: {exc}") from exc
        except Unavailable as exc:  # which says nothing about the node
            return Declined(exc.message)
        if response.status not in REFUSALS:
            raise ResumeFailed(ResumeOutcome.FAILED, f"node {node.name} answered with status {response.status}")
        return Declined(f"it answered with status {response.status}")

    async def _route(self, stream: LostStream, asked_again_s: Mapping[bytes, float], until_s: float) -> Route:
        """Returns a route to a node that may be asked now, when there is one. Raises ResumeFailed."""
        while True:
            self._changed.clear()
            route = self._choose(stream, asked_again_s)
            if route is not None:
                return route
            now_s = self._loop.time()
            if now_s >= until_s:
                raise ResumeFailed(ResumeOutcome.NO_NODE, f"no other node could go on within {self._wait_s:g} s")
            later_s = [at_s for at_s in asked_again_s.values() if at_s > now_s]
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(until_s, *later_s)):
                    await self._changed.wait()
                    await asyncio.sleep(PAUSE_S)

    def _choose(self, stream: LostStream, asked_again_s: Mapping[bytes, float]) -> Route | None:
        """Returns a route to a node that may be asked now, if there is one."""
        now_s = self._loop.time()
        excluded = frozenset(boot_id for boot_id, at_s in asked_again_s.items() if at_s > now_s)
        try:
            return self._dispatch.choose(stream.query, excluded | self._unfit(stream))
        except Unavailable:
            return None

    def _unfit(self, stream: LostStream) -> frozenset[bytes]:
        """Returns the decode nodes that cannot go on exactly where the lost node was.

        Nodes of other context lengths would cut a prompt elsewhere, or end the answer elsewhere.
        """
        nodes = [pair.decode for pair in self._registry.snapshot().pairings.get(stream.query.model, ())]
        return frozenset(node.boot_id for node in nodes if not _goes_on_like(stream.node, node))


def _goes_on_like(lost: NodeInfo, node: NodeInfo) -> bool:
    same_length = node.capacity.max_model_len == lost.capacity.max_model_len
    return node.fingerprint == lost.fingerprint and same_length and writes_journals(node)
