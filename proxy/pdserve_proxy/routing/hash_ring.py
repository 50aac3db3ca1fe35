"""Says which node a key belongs to, so that proxies which know the same nodes agree without talking.

Each node has several points on a ring, and each key several probes. A key belongs to the node of the point that comes
soonest behind a probe of it: consistent hashing with several probes (Appleton and O'Reilly, "Multi-probe consistent
hashing", arXiv:1505.00062). The probes bound the largest share: a node is seldom soonest for all of a key's neighbours.
They do nothing for a node whose only point lies close behind another one, so several points bound the smallest share.
Eight of each serve both, and a ring of so few points is quickly made anew when nodes come and go.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache

_PLACES = struct.Struct("<8Q")
"""A hash gives eight places on the ring: the points of a node, or the probes of a key."""
_ROUND = 2**64
_KEPT_NODES = 8192


class HashRing:
    """Members on a ring, each of which is known by its place among them."""

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


@lru_cache(maxsize=_KEPT_NODES)
def _points(member: bytes) -> tuple[int, ...]:
    return _PLACES.unpack(hashlib.blake2b(member, digest_size=_PLACES.size, person=b"points").digest())
