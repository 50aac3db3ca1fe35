"""Which nodes serve a request: pure choices over a snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import InvalidRequest, NotFound, Unavailable
from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.snapshot import Snapshot

RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Route:
    """Where one attempt at a request goes."""

    decode: NodeInfo
    prefill: tuple[NodeInfo, ...]
    """The chosen prefill node, then an alternative if there is one; empty if ``decode`` prefills by itself."""


class Policy(Protocol):
    def choose(self, snapshot: Snapshot, model: str, exclude: frozenset[bytes] = frozenset()) -> Route:
        """A route for ``model`` that avoids decode nodes with the boot ids in ``exclude``.

        Raises Unavailable if no pair of nodes can serve the model now.
        """


class RoundRobin:
    """Takes decode nodes in turn, and independently of that the prefill nodes that fit each other in turn."""

    def __init__(self) -> None:
        self._decode_turns: Counter[str] = Counter()
        self._prefill_turns: Counter[tuple[str, str]] = Counter()

    def choose(self, snapshot: Snapshot, model: str, exclude: frozenset[bytes] = frozenset()) -> Route:
        candidates = [pair for pair in snapshot.pairings.get(model, ()) if pair.decode.boot_id not in exclude]
        if not candidates:
            raise Unavailable(
                f"no decode node with a matching prefill node serves {model!r} now",
                code="no_route",
                retry_after_s=RETRY_AFTER_S,
            )
        pair = candidates[self._decode_turns[model] % len(candidates)]
        self._decode_turns[model] += 1
        if not pair.prefill:
            return Route(pair.decode, ())
        fitting = (model, pair.decode.fingerprint)
        first = self._prefill_turns[fitting] % len(pair.prefill)
        self._prefill_turns[fitting] += 1
        return Route(pair.decode, (pair.prefill[first:] + pair.prefill[:first])[:2])


def resolve_model(snapshot: Snapshot, asked: str | None) -> str:
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
