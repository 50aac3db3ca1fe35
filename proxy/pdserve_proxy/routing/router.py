"""Chooses the nodes that serve a request out of one snapshot: a decode node, and the prefill nodes that fit it."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdserve.config import RoutingPolicy
from pdserve.errors import InvalidRequest, NotFound, Unavailable
from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.registry.snapshot import Snapshot
from pdserve_proxy.routing.policies import Policy, RequestsAt, make_policy, preferred

RETRY_AFTER_S = 1
MAX_POLICIES = 256
"""The number of models, or of fingerprints, for which a policy is kept; the oldest is forgotten first."""

Key = TypeVar("Key")


class RouteQuery(msgspec.Struct, frozen=True):
    """What routing looks at in a request."""

    model: str
    prompt_start: bytes = b""
    """The first bytes of its prompt, as they stand in the request body."""
    oldest_protocol: int = 0
    """The first version of the protocol between hosts whose nodes take such a request."""
    key: bytes = b""
    """Names a decode node that every proxy finds, for a client that may ask again; empty if it will not."""


class Route(msgspec.Struct, frozen=True):
    """The nodes of one attempt at a request."""

    decode: NodeInfo
    prefill: tuple[NodeInfo, ...]
    """The chosen prefill node, then an alternative if there is one; empty if ``decode`` prefills by itself."""


class Router:
    """Applies one routing policy to decode nodes, and independently of that to the prefill nodes that fit them.

    Every model has a policy object for its decode nodes, and every fingerprint has one for its prefill nodes.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        self._routing_policy = policy
        self._decode_policies: dict[str, Policy] = {}
        """The policy of each model's decode nodes."""
        self._prefill_policies: dict[tuple[str, str], Policy] = {}
        """The policy of the prefill nodes of each model and fingerprint."""

    def choose(
        self, snapshot: Snapshot, query: RouteQuery, load: RequestsAt, exclude: frozenset[bytes] = frozenset()
    ) -> Route:
        """Returns a route that avoids the decode nodes in ``exclude``. ``load`` returns the requests at a node.

        Raises Unavailable if no pair of nodes can serve the model now, or none that is new enough for the request.
        """
        pairs = snapshot.pairings.get(query.model, ())
        if query.oldest_protocol and any(pair.decode.protocol < query.oldest_protocol for pair in pairs):
            pairs = tuple(pair for pair in pairs if pair.decode.protocol >= query.oldest_protocol)
            if not pairs:
                raise Unavailable(
                    f"no node that serves {query.model!r} is new enough for this route: it needs protocol "
                    f"{query.oldest_protocol}",
                    code="no_route",
                    retry_after_s=RETRY_AFTER_S,
                )
        if exclude:
            pairs = tuple(pair for pair in pairs if pair.decode.boot_id not in exclude)
        if not pairs:
            raise Unavailable(
                f"no decode node with a matching prefill node serves {query.model!r} now",
                code="no_route",
                retry_after_s=RETRY_AFTER_S,
            )
        nodes = [pair.decode for pair in pairs]
        if query.key:
            decode = preferred(nodes, query.key)
        else:
            decode = self._policy_for(self._decode_policies, query.model).select(nodes, query.prompt_start, load)[0]
        fitting = pairs[nodes.index(decode)].prefill
        if not fitting:
            return Route(decode, ())
        policy = self._policy_for(self._prefill_policies, (query.model, decode.fingerprint))
        return Route(decode, policy.select(fitting, query.prompt_start, load))

    def _policy_for(self, policies: dict[Key, Policy], key: Key) -> Policy:
        policy = policies.get(key)
        if policy is None:
            if len(policies) == MAX_POLICIES:
                del policies[next(iter(policies))]
            policy = policies[key] = make_policy(self._routing_policy)
        return policy


def requested_model(snapshot: Snapshot, asked: str | None) -> str:
    """Returns the model that a request means; a request may leave it out where the cluster has only one.

    Raises Unavailable with no node registered, NotFound for an unknown model, InvalidRequest for none among several.
    """
    if not snapshot.models:
        raise Unavailable("no node is registered", code="no_nodes", retry_after_s=RETRY_AFTER_S)
    if asked is None:
        if len(snapshot.models) > 1:
            raise InvalidRequest("'model' is missing, and this cluster serves more than one", param="model")
        return snapshot.models[0]
    if asked not in snapshot.models:
        raise model_not_found(asked)
    return asked


def model_not_found(name: str) -> NotFound:
    return NotFound(f"the model {name[:200]!r} does not exist here", param="model", code="model_not_found")
