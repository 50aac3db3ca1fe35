"""The routing policies: each chooses a node, and an alternative, among nodes that all could serve a request.

A policy knows only its arguments and does no I/O. What it may know of a node is the node's ``NodeInfo`` and the number
of requests there (``RequestsAt``, which ``attempts.Attempts.loads`` makes: widen it there). To add a policy, write a
class with the method of ``Policy``, name it in ``pdserve.config.RoutingPolicy``, and enter it in the table at the end.
Decode nodes and prefill nodes each have a policy object of their own.

* ``RoundRobin`` is even where requests are alike.
* ``LeastLoaded`` takes the node with the most room in its batch: the best for one proxy whose view is fresh.
* ``TwoChoices`` takes the less loaded of two nodes drawn by chance (Mitzenmacher, "The power of two choices in
  randomized load balancing", IEEE TPDS 2001): nearly as even as the least loaded, and proxies with old views do not all
  choose the same node.
* ``PrefixAffinity`` sends requests whose prompts begin alike to the same node, whose prefix cache then has that
  beginning. The proxy does not tokenise: it hashes the prompt's first bytes in a chain, each hash over one step more
  than the last. Each hash names a node, by rendezvous hashing (Thaler and Ravishankar 1998): a node that comes or goes
  moves its own share only. A request goes to the node of its shortest beginning, which most other requests share. A
  node takes no more than ``LOAD_FACTOR`` times its fair share of all requests (consistent hashing with bounded loads:
  Mirrokni, Thorup and Zadimoghaddam, arXiv:1608.01350). Beyond that a request goes to the node of its next longer
  beginning: where many conversations have one system prompt, they part there, and each stays where it is. The policy
  remembers nothing, so proxies that know the same nodes and loads agree without talking.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from pdserve.config import RoutingPolicy
from pdserve.wire.discovery import NodeInfo

RequestsAt: TypeAlias = Callable[[NodeInfo], int]
"""Returns the number of requests at a node, as far as this proxy can know it."""


class Policy(Protocol):
    """A routing policy, with the turns that it has given."""

    def select(self, nodes: Sequence[NodeInfo], prompt_start: bytes, load: RequestsAt) -> tuple[NodeInfo, ...]:
        """Returns one of ``nodes`` (at least one) for a request, then an alternative if there is another node.

        ``prompt_start`` is the first bytes of the request's prompt.
        """


def batch_share(node: NodeInfo, load: RequestsAt) -> float:
    """Returns the requests at a node as a share of its batch, so that nodes of different sizes compare."""
    return load(node) / max(node.capacity.max_running, 1)


class RoundRobin:
    """A policy that takes the nodes in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def select(self, nodes: Sequence[NodeInfo], prompt_start: bytes, load: RequestsAt) -> tuple[NodeInfo, ...]:
        first = self._turn % len(nodes)
        self._turn += 1
        if len(nodes) == 1:
            return (nodes[0],)
        return nodes[first], nodes[(first + 1) % len(nodes)]


class LeastLoaded:
    """A policy that takes the node with the smallest share of its batch in use; equal nodes take turns.

    Several proxies that see the same heartbeats all choose the same node: ``TwoChoices`` avoids that.
    """

    def __init__(self) -> None:
        self._turn = 0

    def select(self, nodes: Sequence[NodeInfo], prompt_start: bytes, load: RequestsAt) -> tuple[NodeInfo, ...]:
        first = self._turn % len(nodes)
        self._turn += 1
        in_turn = (*nodes[first:], *nodes[:first])
        return tuple(sorted(in_turn, key=lambda node: batch_share(node, load))[:2])


class TwoChoices:
    """A policy that draws two nodes by chance and takes the less loaded one."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance or random.Random()  # noqa: S311 (nothing secret hangs on it)

    def select(self, nodes: Sequence[NodeInfo], prompt_start: bytes, load: RequestsAt) -> tuple[NodeInfo, ...]:
        drawn = self._chance.sample(nodes, min(2, len(nodes)))
        return tuple(sorted(drawn, key=lambda node: batch_share(node, load)))


LOAD_FACTOR = 1.25
STEP_BYTES = 256
"""About four blocks of 16 tokens of English text."""
MAX_STEPS = 16


class PrefixAffinity:
    """A policy that sends prompts with the same beginning to the same node, as long as that has room."""

    def select(self, nodes: Sequence[NodeInfo], prompt_start: bytes, load: RequestsAt) -> tuple[NodeInfo, ...]:
        beginnings = hash_chain(prompt_start)
        roomy = with_room(nodes, load)
        named = (preferred(nodes, beginning) for beginning in beginnings)
        chosen = next((node for node in named if node.boot_id in roomy), None)
        if chosen is None:
            chosen = next(node for node in rank(nodes, beginnings[-1]) if node.boot_id in roomy)
        others = [node for node in nodes if node is not chosen]
        return (chosen, preferred(others, beginnings[0])) if others else (chosen,)


def hash_chain(prompt_start: bytes) -> list[bytes]:
    """Returns a hash for each beginning of ``prompt_start`` that is a whole number of steps long; at least one."""
    running = hashlib.blake2b(prompt_start[:STEP_BYTES], digest_size=16)
    chain = [running.digest()]
    whole = min(len(prompt_start) // STEP_BYTES, MAX_STEPS)
    for step in range(1, whole):
        running.update(prompt_start[step * STEP_BYTES : (step + 1) * STEP_BYTES])
        chain.append(running.digest())
    return chain


def rank(nodes: Sequence[NodeInfo], key: bytes) -> list[NodeInfo]:
    """Returns ``nodes`` in the order in which ``key`` prefers them. No node changes the order of the others."""
    return sorted(nodes, key=lambda node: _place(key, node))


def preferred(nodes: Sequence[NodeInfo], key: bytes) -> NodeInfo:
    """Returns the first of ``nodes`` in the order of ``rank``."""
    return min(nodes, key=lambda node: _place(key, node))


def _place(key: bytes, node: NodeInfo) -> bytes:
    return hashlib.blake2b(key + node.boot_id, digest_size=8).digest()


def with_room(nodes: Sequence[NodeInfo], load: RequestsAt) -> dict[bytes, NodeInfo]:
    """Returns the nodes that one request more leaves within ``LOAD_FACTOR`` times their share; at least one."""
    loads = [load(node) for node in nodes]
    sizes = [max(node.capacity.max_running, 1) for node in nodes]
    each = LOAD_FACTOR * (sum(loads) + 1) / sum(sizes)
    return {
        node.boot_id: node
        for node, now, size in zip(nodes, loads, sizes, strict=True)
        if now + 1 <= math.ceil(each * size)
    }


_POLICIES: dict[RoutingPolicy, type[RoundRobin | LeastLoaded | TwoChoices | PrefixAffinity]] = {
    RoutingPolicy.ROUND_ROBIN: RoundRobin,
    RoutingPolicy.LEAST_LOADED: LeastLoaded,
    RoutingPolicy.TWO_CHOICES: TwoChoices,
    RoutingPolicy.PREFIX_AFFINITY: PrefixAffinity,
}


def make_policy(policy: RoutingPolicy) -> Policy:
    """Returns a new policy object, for one set of nodes."""
    return _POLICIES[policy]()
