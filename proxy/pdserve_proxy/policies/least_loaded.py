"""The node with the most room: the best choice of one proxy whose view is fresh."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.policies.selector import LoadOf, share_of


class LeastLoaded:
    """Equal ones take turns. Several proxies that see the same heartbeats all run to the same node: see TwoChoices."""

    def __init__(self) -> None:
        self._turn = 0

    def select(self, nodes: Sequence[NodeInfo], lead: bytes, load: LoadOf) -> tuple[NodeInfo, ...]:
        first = self._turn % len(nodes)
        self._turn += 1
        in_turn = (*nodes[first:], *nodes[:first])
        return tuple(sorted(in_turn, key=lambda node: share_of(node, load))[:2])
