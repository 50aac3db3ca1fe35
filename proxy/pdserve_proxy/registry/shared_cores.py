"""Finds engines of one machine that compute with more threads than they have cores.

Two engines on the same cores wait for each other's threads, and each is several times slower. Nothing on their machine
tells them of each other if they run in containers of their own. The proxy knows both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.wire.discovery import ComputeCores, NodeInfo

_NAMED = 8
"""So many nodes, and so many ranges of cores, are named."""


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Nodes whose engines have too few cores together."""

    names: tuple[str, ...]
    cores: frozenset[int]
    threads: int

    def __str__(self) -> str:
        more = f" and {len(self.names) - _NAMED} more" if len(self.names) > _NAMED else ""
        count = len(self.cores)
        return (
            f"{', '.join(self.names[:_NAMED])}{more} share {count} core{'s' if count > 1 else ''} of one machine "
            f"({_ranges(self.cores)}) and compute with {self.threads} threads, which makes each several times slower: "
            "give each node cores of its own with --cores, or each container with a cpuset or a whole number as its "
            "CPU limit"
        )


def crowded_with(newcomer: NodeInfo, neighbours: Iterable[NodeInfo]) -> SharedCores | None:
    """Returns the smallest group of nodes on the newcomer's machine to which it belongs and which lacks cores.

    A node of the newcomer's name is what it replaces, and may be gone. Engines with a quota of CPU time may run on all
    cores and use few at a time: only where all threads of those that are bound to some cores exceed these, they share.
    """
    own = newcomer.compute
    if own is None or not own.machine:
        return None
    there = {newcomer.name: own}
    for node in neighbours:
        if node.name != newcomer.name and node.compute is not None and node.compute.machine == own.machine:
            there[node.name] = node.compute
    # The newcomer's cores with those of each engine on any of them, and with those of all of these.
    places = {
        frozenset(own.cores).union(compute.cores)
        for compute in there.values()
        if not set(own.cores).isdisjoint(compute.cores)
    }
    places.add(frozenset(own.cores).union(*places))
    groups = (_bound_to(place, there) for place in sorted(places, key=lambda place: (len(place), sorted(place))))
    return next((group for group in groups if len(group.names) > 1 and group.threads > len(group.cores)), None)


def _bound_to(place: frozenset[int], there: dict[str, ComputeCores]) -> SharedCores:
    bound = {name: compute for name, compute in there.items() if place.issuperset(compute.cores)}
    return SharedCores(tuple(sorted(bound)), place, sum(compute.threads for compute in bound.values()))


def _ranges(cores: frozenset[int]) -> str:
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    named = [f"{first}-{last}" if last > first else str(first) for first, last in ranges[:_NAMED]]
    return ",".join(named) + ("…" if len(ranges) > _NAMED else "")
