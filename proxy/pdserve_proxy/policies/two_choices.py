"""The less loaded of two nodes drawn by chance (Mitzenmacher, "The power of two choices in randomized load balancing",
IEEE TPDS 2001): nearly as even as the least loaded, and proxies with old views do not all run to one node."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.policies.selector import LoadOf, share_of


class TwoChoices:
    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance or random.Random()  # noqa: S311 (nothing secret hangs on it)

    def select(self, nodes: Sequence[NodeInfo], lead: bytes, load: LoadOf) -> tuple[NodeInfo, ...]:
        drawn = self._chance.sample(nodes, min(2, len(nodes)))
        return tuple(sorted(drawn, key=lambda node: share_of(node, load)))
