"""Which nodes serve a request: a decode node, and the prefill nodes that fit it, out of one snapshot."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdserve.config import RoutingPolicy
from pdserve.errors import InvalidRequest, NotFound, Unavailable
from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.registry.snapshot import Snapshot
from pdserve_proxy.routing.policies import LoadOf, Selector, make_selector

RETRY_AFTER_S = 1
MAX_SELECTORS = 256
"""For as many models, or fingerprints, what a policy remembers is kept; the oldest is forgotten first."""

Key = TypeVar("Key")


class RouteQuery(msgspec.Struct, frozen=True):
    """What of a request routing looks at."""

    model: str
    lead: bytes = b""
    """The leading bytes of its prompt, as they stand in the request body."""


class Route(msgspec.Struct, frozen=True):
    """Where one attempt at a request goes."""

    decode: NodeInfo
    prefill: tuple[NodeInfo, ...]
    """The chosen prefill node, then an alternative if there is one; empty if ``decode`` prefills by itself."""


class Router:
    """Applies one policy to decode nodes, and independently of that to the prefill nodes that fit them.

    Nodes that serve different models, or prefill nodes that fit different decode nodes, are chosen from apart.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._of_decode: dict[str, Selector] = {}
        """By model."""
        self._of_prefill: dict[tuple[str, str], Selector] = {}
        """By model and fingerprint."""

    def choose(
        self, snapshot: Snapshot, query: RouteQuery, load: LoadOf, exclude: frozenset[bytes] = frozenset()
    ) -> Route:
        """A route that avoids decode nodes with the boot ids in ``exclude``. ``load`` tells the requests at a node.

        Raises Unavailable if no pair of nodes can serve the model now.
        """
        pairs = snapshot.pairings.get(query.model, ())
        if exclude:
            pairs = tuple(pair for pair in pairs if pair.decode.boot_id not in exclude)
        if not pairs:
            raise Unavailable(
                f"no decode node with a matching prefill node serves {query.model!r} now",
                code="no_route",
                retry_after_s=RETRY_AFTER_S,
            )
        nodes = [pair.decode for pair in pairs]
        decode = self._selector(self._of_decode, query.model).select(nodes, query.lead, load)[0]
        fitting = pairs[nodes.index(decode)].prefill
        if not fitting:
            return Route(decode, ())
        selector = self._selector(self._of_prefill, (query.model, decode.fingerprint))
        return Route(decode, selector.select(fitting, query.lead, load))

    def _selector(self, selectors: dict[Key, Selector], key: Key) -> Selector:
        selector = selectors.get(key)
        if selector is None:
            if len(selectors) == MAX_SELECTORS:
                del selectors[next(iter(selectors))]
            selector = selectors[key] = make_selector(self._policy)
        return selector


def requested_model(snapshot: Snapshot, asked: str | None) -> str:
    """The model that a request means; a request may leave it out where the cluster has only one.

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
