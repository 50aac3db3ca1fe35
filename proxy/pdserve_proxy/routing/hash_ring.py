"""Says which node a key belongs to, so that proxies which know the same nodes agree without talking.

Each node has one point on a ring, and each key several probes. A key belongs to the node whose point comes soonest
behind a probe of it: consistent hashing with several probes (Appleton and O'Reilly, "Multi-probe consistent hashing",
arXiv:1505.00062). Many probes make the nodes' shares as even as many points for each node would, and a ring of few
points is quickly made anew when nodes come and go.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache

PROBES = 16
_HALF = struct.Struct(f"<{PROBES // 2}Q")
_POINT = struct.Struct("<Q")
_ROUND = 2**64
_KEPT_POINTS = 8192


class HashRing:
    """Members on a ring, each of which is known by its place among them."""

    def __init__(self, members: Sequence[bytes]) -> None:
        self._members = members
        order = sorted(range(len(members)), key=lambda place: (_point(members[place]), members[place]))
        self._points = [_point(members[place]) for place in order]
        self._places = order

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
        for place, _ in self._behind(_probes(key)[0]):
            yield place

    def _behind(self, probe: int) -> Iterator[tuple[int, int]]:
        """Yields all members behind ``probe``, each with its distance from there."""
        count = len(self._points)
        first = bisect_left(self._points, probe)
        for step in range(count):
            index = (first + step) % count
            yield self._places[index], (self._points[index] - probe) % _ROUND


def _probes(key: bytes) -> tuple[int, ...]:
    halves = (hashlib.blake2b(key, digest_size=64, person=half).digest() for half in (b"first", b"second"))
    return tuple([probe for half in halves for probe in _HALF.unpack(half)])


@lru_cache(maxsize=_KEPT_POINTS)
def _point(member: bytes) -> int:
    point: int = _POINT.unpack(hashlib.blake2b(member, digest_size=8).digest())[0]
    return point
