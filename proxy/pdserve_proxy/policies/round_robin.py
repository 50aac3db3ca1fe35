"""Nodes in turn: even where requests are alike."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.policies.selector import LoadOf


class RoundRobin:
    def __init__(self) -> None:
        self._turn = 0

    def select(self, nodes: Sequence[NodeInfo], lead: bytes, load: LoadOf) -> tuple[NodeInfo, ...]:
        first = self._turn % len(nodes)
        self._turn += 1
        if len(nodes) == 1:
            return (nodes[0],)
        return nodes[first], nodes[(first + 1) % len(nodes)]
