"""The nodes among which a policy chooses, kept in the orders in which policies look at them.

What a choice costs must not grow with the nodes, or hardly: a proxy chooses for each request. So the order by load is
kept up to date node by node, as attempts begin and end and heartbeats come, and is made only for a policy that asks for
it. All nodes are looked at again only when one comes or goes: then there are new ``Candidates``, which go on with the
same ``Turns``.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache

from pdserve.wire.discovery import NodeInfo

_PLACES = struct.Struct("<8Q")
"""A hash gives eight places on the ring: the points of a node, or the probes of a key."""
_ROUND = 2**64
_CACHED_NODES = 8192

MAX_TURNS = 8192
"""The number of nodes of which the last turn is remembered; those that had theirs longest ago are forgotten first."""


class Turns:
    """The turn that each node had last, which outlives the groups of nodes that choices are made among."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[bytes, int] = {}
        """By boot id, in the order of the turns."""

    def last(self, boot_id: bytes) -> int:
        """Returns the turn that a node had last; 0 if none is remembered."""
        return self._last.get(boot_id, 0)

    def give(self, boot_id: bytes) -> int:
        """Gives a node the next turn, and returns that."""
        self._turn += 1
        self._last.pop(boot_id, None)
        self._last[boot_id] = self._turn
        if len(self._last) > MAX_TURNS:
            del self._last[next(iter(self._last))]
        return self._turn


class Candidates:
    """Nodes that all could serve a request, at least one, each with the number of requests there."""

    def __init__(self, nodes: Sequence[NodeInfo], load: Callable[[bytes], int], turns: Turns | None = None) -> None:
        """``load`` returns the number of requests at a node, by its boot id, as far as this proxy can know it.

        ``turns`` are those that the nodes have had so far; None for none.
        """
        self.nodes = tuple(nodes)
        self._load = load
        self._places = {node.boot_id: place for place, node in enumerate(self.nodes)}
        self._loads = [load(node.boot_id) for node in self.nodes]
        self.total_load = sum(self._loads)
        self.total_size = sum(map(size_of, self.nodes))
        self._given = turns or Turns()
        self._turns = [self._given.last(node.boot_id) for node in self.nodes]
        """The turn in which each node was served last."""
        self._order: list[tuple[float, int, int]] | None = None
        """The nodes by their share, then by their turn; None as long as nobody has asked for it."""
        self._ring: HashRing | None = None

    def changed(self, boot_id: bytes) -> None:
        """Takes over the load of one node, which may have changed."""
        place = self._places.get(boot_id)
        if place is None:
            return
        load = self._load(boot_id)
        if load != self._loads[place]:
            self._move(place, load, self._turns[place])

    def load(self, node: NodeInfo) -> int:
        return self._loads[self._places[node.boot_id]]

    def share(self, node: NodeInfo) -> float:
        """Returns the requests at a node as a share of its batch, so that nodes of different sizes compare."""
        return self.load(node) / size_of(node)

    def by_share(self) -> Iterator[NodeInfo]:
        """Yields the nodes with the smallest share first, of equal ones those that were ``served`` longest ago."""
        if self._order is None:
            self._order = sorted(map(self._rank, range(len(self.nodes))))
        for _, _, place in self._order:
            yield self.nodes[place]

    def served(self, node: NodeInfo) -> None:
        """Notes that it was the turn of ``node``."""
        place = self._places[node.boot_id]
        self._move(place, self._loads[place], self._given.give(node.boot_id))

    def owner(self, key: bytes, others_than: Container[bytes] = frozenset()) -> NodeInfo | None:
        """Returns the node whose ``key`` is, if those with these boot ids are left out; None if no node is left.

        All proxies that know the same nodes find the same one, and a node that comes or goes moves its own keys only.
        """
        place = self._hash_ring.owner(key, others_than)
        return None if place is None else self.nodes[place]

    def after(self, key: bytes) -> Iterator[NodeInfo]:
        """Yields all nodes in an order that ``key`` names, the same at all proxies that know the same nodes."""
        for place in self._hash_ring.after(key):
            yield self.nodes[place]

    @property
    def _hash_ring(self) -> HashRing:
        if self._ring is None:
            self._ring = HashRing([node.boot_id for node in self.nodes])
        return self._ring

    def _move(self, place: int, load: int, turn: int) -> None:
        before = self._rank(place)
        self.total_load += load - self._loads[place]
        self._loads[place], self._turns[place] = load, turn
        if self._order is not None:
            del self._order[bisect_left(self._order, before)]
            insort(self._order, self._rank(place))

    def _rank(self, place: int) -> tuple[float, int, int]:
        return self._loads[place] / size_of(self.nodes[place]), self._turns[place], place


def size_of(node: NodeInfo) -> int:
    """Returns how many requests a node runs at a time."""
    return max(node.capacity.max_running, 1)


class HashRing:
    """Says to which of its members a key belongs, so that proxies which know the same nodes agree without talking.

    Each member is known by its place among them, has several points on a ring, and each key several probes. A key
    belongs to the member of the point that comes soonest behind a probe of it: consistent hashing with several probes
    (Appleton and O'Reilly, "Multi-probe consistent hashing", arXiv:1505.00062). The probes bound the largest share: a
    node is seldom soonest for all of a key's neighbours. They do nothing for a node whose only point lies close behind
    another one, so several points bound the smallest share. Eight of each serve both, and a ring of so few points is
    quickly made anew when nodes come and go.
    """

    def __init__(self, members: Sequence[bytes]) -> None:
        self._members = members
        owners = {point: place for place, member in enumerate(members) for point in _points(member)}
        self._points = sorted(owners)
        self._places = [owners[point] for point in self._points]

    def owner(self, key: bytes, others_than: Container[bytes] = frozenset()) -> int | None:
        """Returns the place of the member to which ``key`` belongs if those in ``others_than`` are left out.

        Returns None if no member is left. What it costs grows with the logarithm of the members, and with those that
        lie next to a probe and are left out.
        """
        found: tuple[int, int] | None = None
        for probe in _probes(key):
            for place, distance in self._behind(probe):
                if found is not None and distance >= found[0]:
                    break
                if self._members[place] not in others_than:
                    found = distance, place
                    break
            if found is None:  # no other probe finds one either
                return None
        return None if found is None else found[1]

    def after(self, key: bytes) -> Iterator[int]:
        """Yields the places of all members in the order in which they lie behind the first probe of ``key``."""
        yielded: set[int] = set()
        for place, _ in self._behind(_probes(key)[0]):
            if place not in yielded:
                yielded.add(place)
                yield place

    def _behind(self, probe: int) -> Iterator[tuple[int, int]]:
        """Yields the member of each point behind ``probe``, with the point's distance from there."""
        count = len(self._points)
        first = bisect_left(self._points, probe)
        for step in range(count):
            index = (first + step) % count
            yield self._places[index], (self._points[index] - probe) % _ROUND


def _probes(key: bytes) -> tuple[int, ...]:
    return _PLACES.unpack(hashlib.blake2b(key, digest_size=_PLACES.size, person=b"probes").digest())


@lru_cache(maxsize=_CACHED_NODES)
def _points(member: bytes) -> tuple[int, ...]:
    return _PLACES.unpack(hashlib.blake2b(member, digest_size=_PLACES.size, person=b"points").digest())
