"""Sends one attempt at a request to a node: chooses the route, signs the ticket, and opens the one upstream request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from pdserve.config import ProxyConfig
from pdserve.control.frame import Purpose, Sealer, Secrets, to_header
from pdserve.control.journal import digest
from pdserve.errors import PrefillLost
from pdserve.http.errors import ENGINE_GONE_HEADER
from pdserve.http.request import JSON, REQUEST_ID_HEADER
from pdserve.wire.discovery import NodeInfo, NodeLoad, Role, free_share
from pdserve.wire.terms import TICKET_HEADER, PrefillTarget, PromptTerms, Resume, Terms, Ticket
from pdserve_proxy.continuation.losses import ReturnedRequest, judge_returned
from pdserve_proxy.records.node_counts import NodeCounts
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.requests.request_body import GenerationBody
from pdserve_proxy.routing.attempts import Attempt, Attempts
from pdserve_proxy.routing.router import NodeWork, Route, RouteQuery, Router, answers_itself, may_answer_itself
from pdserve_proxy.upstream.node_connection import NodeLost, NodeResponse
from pdserve_proxy.upstream.node_pool import NodePool

REFUSALS = (401, PrefillLost.status, 503)
"""Status codes with which a node does not take a request, or returns it. Its own failures are 500."""

MAX_BROKEN_LINKS = 2
"""A request that has lost links to so many prefill nodes goes without one. To look at each of them takes time."""
MAX_ONLY_PREFILL = 1024
"""So many prefill nodes are remembered as out of this proxy's reach; all are forgotten when there are more."""
_DECODE = Role.DECODE
SPARE_SHARE = 8
"""A node keeps one of so many blocks free when an answer moves there for want of them, or it would soon be the next."""


class NodeRequest(msgspec.Struct, frozen=True):
    """The parts of a client's request that go to a node."""

    path: str
    body: GenerationBody
    accept: str | None
    terms: Terms
    """What is the same in all attempts. Each attempt adds its own nodes, and the time that is left."""

    def with_terms(self, **changes: Any) -> NodeRequest:
        """Returns the request with these fields of its terms changed."""
        return msgspec.structs.replace(self, terms=msgspec.structs.replace(self.terms, **changes))


class Dispatch:
    """Sends the attempts of one proxy process to nodes."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: RegistryView,
        attempts: Attempts,
        tickets: TicketSigner,
        pool: NodePool,
        nodes: NodeCounts,
    ) -> None:
        self._idle_timeout_s = config.relay.idle_timeout_s
        self._registry = registry
        self._attempts = attempts
        self._coming: dict[bytes, list[int]] = {}
        """The tokens of each context that is to come to a node for want of blocks elsewhere, by its boot id. The node's
        load does not show them.
        """
        self._router = Router(config.routing.policy, attempts)
        self._prefill_answers = config.routing.prefill_answers
        self._only_prefill: set[bytes] = set()
        """The boot ids of prefill nodes that this proxy could not reach, and asks for no answers any more."""
        self._tickets = tickets
        self._pool = pool
        self._nodes = nodes

    def choose(self, relayed: RelayedRequest, query: RouteQuery, excluded: frozenset[bytes], answers: int = 0) -> Route:
        """Returns a route by what is known of the nodes now. Raises Unavailable if there is none.

        A prefill node may give so many ``answers`` itself; none with 0.

        A prefill node to which this request has lost a link, or which has failed to answer it, is no part of it: each
        further try could cost another node. After ``MAX_BROKEN_LINKS`` links, the decode node computes the prompt
        itself.
        """
        route, broken = self._router.choose(self._registry.serving(), query, excluded), relayed.broken_links
        if not (broken or excluded):
            return self._with_idle_prefill(route, query, answers)
        left = tuple(node for node in route.prefill if not (node.boot_id in broken or _has_failed(node, excluded)))
        return msgspec.structs.replace(route, prefill=left if len(broken) < MAX_BROKEN_LINKS else ())

    def _with_idle_prefill(self, route: Route, query: RouteQuery, answers: int) -> Route:
        """Returns a route to the prefill node alone, if that is to give so many answers itself; else ``route``.

        A client that may ask again has to find its node again, and what goes on elsewhere goes on at a decode node.
        """
        if not (answers and route.prefill) or query.key or query.kind is not None:
            return route
        first = route.prefill[0]
        if first.boot_id in self._only_prefill or not may_answer_itself(self._prefill_answers, first, route.decode):
            return route
        itself = answers_itself(self._prefill_answers, self._work(first), self._work(route.decode), answers)
        return Route(first, ()) if itself else route

    def note_unreachable(self, node: NodeInfo) -> None:
        """Notes that no connection to a node could be made. One that only prefills needs none from here."""
        if node.role is not Role.PREFILL:
            self._registry.mark_unreachable(node.boot_id)
            return
        if len(self._only_prefill) == MAX_ONLY_PREFILL:
            self._only_prefill.clear()
        self._only_prefill.add(node.boot_id)

    def _work(self, node: NodeInfo) -> NodeWork:
        boot_id, attempts = node.boot_id, self._attempts
        load = self._registry.load(boot_id) or NodeLoad()
        return NodeWork(
            node, attempts.load(boot_id), attempts.prompts(boot_id), load.queue_s, attempts.prompt_share(boot_id)
        )

    def begin(self, relayed: RelayedRequest, body: GenerationBody, route: Route) -> None:
        """Begins an attempt, which counts as load of its nodes until the next one, or until the request's end."""
        # A prefill node computes a prompt once, for however many answers. A mixed node computes most prompts itself.
        prefill = ((route.prefill[0], body.prompts),) if route.prefill and route.decode.role is _DECODE else ()
        self._nodes.began(route.decode)
        relayed.begin_attempt(route, self._attempts.begin((route.decode, body.answers), *prefill))

    def has_places(self, body: GenerationBody, node: NodeInfo) -> bool:
        """Returns whether a request would begin at once at ``node``, which is registered."""
        load, most = self._attempts.load(node.boot_id), node.capacity.max_running
        return load + min(body.answers, most) <= most

    def has_blocks(self, tokens: int, node: NodeInfo) -> bool:
        """Returns whether ``node``, which is registered, could take so many tokens now and would have some blocks left.

        So it is in every cache group: where a window's blocks are all taken, nobody goes on. Where requests wait, it
        could not: they come first.
        """
        load, capacity = self._registry.load(node.boot_id) or NodeLoad(), node.capacity
        coming = (tokens, *self._coming.get(node.boot_id, ()))
        return not load.waiting and free_share(capacity, load, coming) >= 1 / SPARE_SHARE

    def expect_tokens(self, tokens: int, node: NodeInfo) -> Callable[[], None]:
        """Counts a context of so many tokens as there at ``node``, until the caller calls what this returns."""
        self._coming.setdefault(node.boot_id, []).append(tokens)
        return partial(self._end_coming, node.boot_id, tokens)

    def _end_coming(self, boot_id: bytes, tokens: int) -> None:
        self._coming[boot_id].remove(tokens)
        if not self._coming[boot_id]:
            del self._coming[boot_id]  # each start of a node has another id

    def expect(self, body: GenerationBody, node: NodeInfo) -> Attempt:
        """Counts a request as load of ``node``, which it will go to, until the caller ends what this returns."""
        return self._attempts.begin((node, body.answers))

    async def post(
        self,
        relayed: RelayedRequest,
        request: NodeRequest,
        route: Route,
        entries: bytes | None = None,
        holders: Sequence[NodeInfo] = (),
        *,
        prepare: bool = False,
    ) -> NodeResponse:
        """Returns the node's response to the attempt that has begun last, when its head has come.

        With the ``entries`` of a journal the node is asked to go on behind them. It then asks ``holders``, in this
        order, for what it lacks of the KV cache. To ``prepare`` is to do that alone, while the last attempt goes on.

        Raises what ``NodePool.post`` does, also NodeLost for a node that has lost its engine.
        """
        node = route.decode
        body = request.body.data
        resume, keep = None, request.terms.keep
        if keep is not None and keep.after is not None and entries is None:
            # The ticket names the answer and the place in it. A node that has the answer needs no more than that, and
            # whoever has made the place up does not send a large body to one node after the other.
            body = b""
        if entries is not None:
            if keep is not None:
                keep = msgspec.structs.replace(keep, after=None)
            body += entries
            resume = Resume(len(entries), digest(entries), prepare)
        terms = msgspec.structs.replace(
            request.terms,
            prompt=PromptTerms(request_id=relayed.request_id, trace=relayed.attempt_trace),
            deadline_s=relayed.remaining_s,
            prefill=_targets(route.prefill),
            holders=_targets(holders) if holders else (),
            resume=resume,
            keep=keep,
            gives_back=not prepare,
        )
        ticket = Ticket(attempt=relayed.attempts - (not prepare), node=node.boot_id, terms=terms)
        headers = {**JSON, REQUEST_ID_HEADER: relayed.request_id, TICKET_HEADER: self._tickets.sign(ticket)}
        if request.accept is not None:
            headers["accept"] = request.accept
        # An answer in one piece comes when all of it is computed: until then only the deadline bounds the silence.
        silence_s = self._idle_timeout_s if request.body.stream else None
        response = await self._pool.post(node.url, request.path, headers, body, silence_s=silence_s)
        if ENGINE_GONE_HEADER in response.headers:
            response.close()
            raise NodeLost("its engine is lost")
        return response

    async def returned(self, relayed: RelayedRequest, answer: bytes | None) -> ReturnedRequest:
        """Returns why a node returns the request, and asks its prefill node whether it lives.

        If only the link between the two broke, no node asks this prefill node for the request again.
        """
        prefill = relayed.route.prefill if relayed.route is not None else ()
        found = await judge_returned(answer, prefill, self._registry, self._pool)
        relayed.broken_links |= found.unlinked
        return found


class TicketSigner:
    """Signs the tickets of one proxy process."""

    def __init__(self, secret: bytes | Secrets, boot_id: bytes) -> None:
        self._sealer = Sealer(secret, Purpose.TICKET, boot_id)

    def sign(self, ticket: Ticket) -> str:
        """Returns the value of the ticket's header. Its deadline counts from now."""
        return to_header(self._sealer.seal(ticket))


def _has_failed(prefill: NodeInfo, excluded: frozenset[bytes]) -> bool:
    """Returns whether a prefill node was asked for the answer. A mixed node that was may still compute the prompt."""
    return prefill.role is Role.PREFILL and prefill.boot_id in excluded


def _targets(nodes: Sequence[NodeInfo]) -> tuple[PrefillTarget, ...]:
    return tuple([PrefillTarget(info.name, info.control, info.boot_id) for info in nodes])
