"""What every policy is: a choice among nodes that all could do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from pdserve.wire.discovery import NodeInfo

LoadOf: TypeAlias = Callable[[NodeInfo], int]
"""How many requests are at a node, as far as this proxy can know."""


class Selector(Protocol):
    def select(self, nodes: Sequence[NodeInfo], lead: bytes, load: LoadOf) -> tuple[NodeInfo, ...]:
        """Out of ``nodes`` (at least one) the node for a request, then an alternative if there is another node.

        ``lead`` are the leading bytes of the request's prompt.
        """


def share_of(node: NodeInfo, load: LoadOf) -> float:
    """Requests at a node as a share of what its batch can hold, so that nodes of different sizes compare."""
    return load(node) / max(node.capacity.max_running, 1)
