"""Requests whose prompts begin alike go to the same node, whose prefix cache then has that beginning.

The proxy does not tokenise: a beginning is a chain of hashes over the prompt's leading bytes, a step longer each. A
request goes where the longest beginning that it shares with an earlier one went. A first one is placed by rendezvous
hashing (Thaler and Ravishankar 1998), so that proxies agree and a node that comes or goes moves its own share only. In
both cases a node takes no more than ``LOAD_FACTOR`` times its fair share of all requests; those beyond go to the next
node in order (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, arXiv:1608.01350).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.policies.selector import LoadOf

LOAD_FACTOR = 1.25
STEP_BYTES = 256
"""About four blocks of 16 tokens of English text."""
MAX_STEPS = 16
MAX_BEGINNINGS = 65_536
"""Remembered at most, the least recently used forgotten first; about 10 MiB."""


class PrefixAffinity:
    def __init__(self) -> None:
        self._places: OrderedDict[bytes, bytes] = OrderedDict()

    def select(self, nodes: Sequence[NodeInfo], lead: bytes, load: LoadOf) -> tuple[NodeInfo, ...]:
        beginnings = hash_chain(lead)
        roomy = with_room(nodes, load)
        chosen = self._place_of(beginnings, roomy)
        ranked = [node for node in rank(nodes, beginnings[0]) if node is not chosen]
        if chosen is None:
            chosen = next(node for node in ranked if node.boot_id in roomy)
            ranked.remove(chosen)
        self._remember(beginnings, chosen)
        return (chosen, *ranked[:1])

    def _place_of(self, beginnings: Sequence[bytes], roomy: Mapping[bytes, NodeInfo]) -> NodeInfo | None:
        """Where the longest of them went that is remembered, if there is room."""
        for beginning in reversed(beginnings):
            place = self._places.get(beginning, b"")
            if place in roomy:
                return roomy[place]
        return None

    def _remember(self, beginnings: Sequence[bytes], node: NodeInfo) -> None:
        for beginning in beginnings:
            self._places[beginning] = node.boot_id
            self._places.move_to_end(beginning)
        while len(self._places) > MAX_BEGINNINGS:
            self._places.popitem(last=False)


def hash_chain(lead: bytes) -> list[bytes]:
    """A hash for each beginning of ``lead`` that is a whole number of steps long; at least one."""
    running = hashlib.blake2b(lead[:STEP_BYTES], digest_size=16)
    chain = [running.digest()]
    whole = min(len(lead) // STEP_BYTES, MAX_STEPS)
    for step in range(1, whole):
        running.update(lead[step * STEP_BYTES : (step + 1) * STEP_BYTES])
        chain.append(running.digest())
    return chain


def rank(nodes: Sequence[NodeInfo], key: bytes) -> list[NodeInfo]:
    """``nodes`` in the order in which ``key`` prefers them; the others' order does not depend on any one of them."""
    return sorted(nodes, key=lambda node: hashlib.blake2b(key + node.boot_id, digest_size=8).digest())


def with_room(nodes: Sequence[NodeInfo], load: LoadOf) -> dict[bytes, NodeInfo]:
    """Those that stay within ``LOAD_FACTOR`` times their share, by batch size, with one request more; at least one."""
    loads = [load(node) for node in nodes]
    sizes = [max(node.capacity.max_running, 1) for node in nodes]
    each = LOAD_FACTOR * (sum(loads) + 1) / sum(sizes)
    return {
        node.boot_id: node
        for node, now, size in zip(nodes, loads, sizes, strict=True)
        if now + 1 <= math.ceil(each * size)
    }
