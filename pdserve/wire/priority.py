"""The order in which requests take turns, in the proxy's queue and on nodes: by arrival, moved by their priorities."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

MAX_PRIORITY = 100
PRIORITY_S = 5.0
"""A request goes before those that came so much earlier, for each number by which its priority is lower."""

Priority: TypeAlias = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""Requests with a lower number get their places first."""


def turn_at(arrived: float, priority: int) -> float:
    """Returns the time by which waiting requests take turns.

    A request that waits overtakes later ones of a higher priority in the end, so none waits for ever.
    """
    return arrived + priority * PRIORITY_S
