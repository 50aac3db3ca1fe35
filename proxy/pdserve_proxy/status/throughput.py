"""Makes rates and gaps of what nodes have counted since their start, by comparing what they said at two times.

It learns only while somebody looks: each report adds one look, and the first one after a while has nothing to compare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pdserve.wire.discovery import GapCounts, NodeLoad
from pdserve_proxy.registry.snapshot import RegisteredNode

SPACING_S = 2.0
"""Looks that are closer are not remembered, however many people look."""
SHARES = (0.5, 0.95, 0.99)


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds that so many of a hundred did not exceed; None where there is nothing to tell."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class TokenRates:
    """Tokens a second; None while there are no two looks to compare."""

    prompt: float | None = None
    generated: float | None = None
    accepted_drafts: float = 0.0
    """Those generated tokens that were guessed ahead."""


@dataclass(frozen=True, slots=True)
class _Look:
    at_s: float
    load: NodeLoad


class Throughput:
    """The last looks at each node, by boot id: a node that was restarted counts anew."""

    def __init__(self, rate_s: float, window_s: float) -> None:
        """Rates are over ``rate_s``, gaps over ``window_s``."""
        self._rate_s = rate_s
        self._window_s = window_s
        self._looks: dict[bytes, deque[_Look]] = {}
        self._newest: dict[bytes, _Look] = {}

    def note(self, nodes: Iterable[RegisteredNode]) -> None:
        """Looks at ``nodes``, and forgets all others."""
        newest: dict[bytes, _Look] = {}
        remembered: dict[bytes, deque[_Look]] = {}
        nodes = tuple(nodes)
        for node in nodes:
            boot_id, look = node.info.boot_id, _Look(node.seen_s, node.load)
            newest[boot_id] = look
            looks = remembered[boot_id] = self._looks.get(boot_id) or deque()
            if node.load != NodeLoad() and (not looks or look.at_s - looks[-1].at_s >= SPACING_S):
                looks.append(look)
            while len(looks) > 1 and look.at_s - looks[0].at_s > self._window_s:
                looks.popleft()
        self._newest, self._looks = newest, remembered

    def rates_of(self, boot_id: bytes) -> TokenRates:
        """Returns the rates of one node."""
        looks, newest = self._looks.get(boot_id), self._newest.get(boot_id)
        if not looks or newest is None:
            return TokenRates()
        before = looks[0]
        for look in looks:
            if newest.at_s - look.at_s < self._rate_s:
                break
            before = look
        seconds = newest.at_s - before.at_s
        if seconds <= 0:
            return TokenRates()
        return TokenRates(
            max(0, newest.load.prompt_tokens - before.load.prompt_tokens) / seconds,
            max(0, newest.load.generated_tokens - before.load.generated_tokens) / seconds,
            max(0, newest.load.accepted_drafts - before.load.accepted_drafts) / seconds,
        )

    def total(self) -> TokenRates:
        """Returns the rates of all nodes together, without those that were looked at once only."""
        rates = {boot_id: self.rates_of(boot_id) for boot_id in self._newest}
        prompt = [rate.prompt for rate in rates.values() if rate.prompt is not None]
        generated = [rate.generated for rate in rates.values() if rate.generated is not None]
        return TokenRates(sum(prompt) if prompt else None, sum(generated) if generated else None)

    def gaps(self) -> Percentiles:
        """Returns the percentiles of the gaps between tokens, of all nodes."""
        pieces: list[tuple[float, float, int]] = []
        for boot_id, looks in self._looks.items():
            if looks:
                pieces += _between(looks[0].load.gaps, self._newest[boot_id].load.gaps)
        pieces.sort(key=lambda piece: piece[1])
        return Percentiles(*[_percentile(pieces, share) for share in SHARES])


def _between(before: GapCounts, after: GapCounts) -> list[tuple[float, float, int]]:
    """Returns how many gaps came since ``before``, with the bounds that they lie between."""
    if len(after.counts) != len(after.bounds_s) + 1:
        return []
    alike = before.bounds_s == after.bounds_s and len(before.counts) == len(after.counts)
    known = before.counts if alike else (0,) * len(after.counts)
    # What lies above the last bound is as long as that at least, and nothing says how much longer.
    lows, highs = (0.0, *after.bounds_s), (*after.bounds_s, after.bounds_s[-1] if after.bounds_s else 0.0)
    new = (max(0, now - then) for now, then in zip(after.counts, known, strict=True))
    return [(low, high, count) for low, high, count in zip(lows, highs, new, strict=True) if count]


def _percentile(pieces: list[tuple[float, float, int]], share: float) -> float | None:
    """Returns the value that ``share`` of all does not exceed, as if each piece's were spread evenly over it."""
    wanted = share * sum(count for _, _, count in pieces)
    for low, high, count in pieces:
        if wanted <= count:
            return low + (high - low) * wanted / count
        wanted -= count
    return None
