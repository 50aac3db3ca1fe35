"""The routing policies: each chooses a node, and an alternative, among nodes that all could serve a request.

A policy knows only its arguments and does no I/O. What it may know of a node is the node's ``NodeInfo`` and what
``Candidates`` have: loads, and the orders in which a policy may look at nodes without looking at all of them. A cluster
may have thousands of nodes, and each request costs a choice. To add a policy, write a class with the method of
``Policy``, name it in ``pdserve.config.RoutingPolicy``, and enter it in the table at the end. Decode nodes and prefill
nodes each have a policy object of their own.

* ``RoundRobin`` is even where requests are alike.
* ``LeastLoaded`` takes the node with the most free places in its batch: the best for one proxy whose view is fresh.
* ``TwoChoices`` takes the less loaded of two nodes drawn by chance (Mitzenmacher, "The power of two choices in
  randomized load balancing", IEEE TPDS 2001): nearly as even as the least loaded, and proxies with old views do not all
  choose the same node.
* ``PrefixAffinity`` sends requests whose prompts begin alike to the same node, whose prefix cache then has that
  beginning. The proxy does not tokenise: it hashes the prompt's first bytes in a chain, each hash over one step more
  than the last. Each hash names a node (``HashRing``): a node that comes or goes moves its own share only. A request
  goes to the node of its shortest beginning, which most other requests share. A node takes no more than ``LOAD_FACTOR``
  times its fair share of all requests (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam,
  arXiv:1608.01350). Beyond that a request goes to the node of its next longer beginning: where many conversations have
  one system prompt, they part there, and each stays where it is. The policy remembers nothing, so proxies that know the
  same nodes and loads agree without talking.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from pdserve.config import RoutingPolicy
from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.routing.candidates import Candidates, size_of

NOBODY: frozenset[bytes] = frozenset()


class Policy(Protocol):
    """A routing policy, with the turns that it has given."""

    def select(
        self, nodes: Candidates, prompt_start: bytes, exclude: frozenset[bytes] = NOBODY
    ) -> tuple[NodeInfo, ...]:
        """Returns one of ``nodes`` for a request, then an alternative if there is another node.

        It leaves out the nodes whose boot ids are in ``exclude``, and returns nothing if no other is left.
        ``prompt_start`` is the first bytes of the request's prompt.
        """


class RoundRobin:
    """A policy that takes the nodes in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def select(
        self, nodes: Candidates, prompt_start: bytes, exclude: frozenset[bytes] = NOBODY
    ) -> tuple[NodeInfo, ...]:
        everyone, turn = nodes.nodes, self._turn
        self._turn += 1
        count = len(everyone)
        if count == 1 and not exclude:
            return everyone
        chosen: list[NodeInfo] = []
        for step in range(turn, turn + count):
            node = everyone[step % count]
            if node.boot_id not in exclude:
                chosen.append(node)
                if len(chosen) == 2:
                    break
        return tuple(chosen)


class LeastLoaded:
    """A policy that takes the node with the smallest share of its batch in use; equal nodes take turns.

    Several proxies that see the same heartbeats all choose the same node: ``TwoChoices`` avoids that.
    """

    def select(
        self, nodes: Candidates, prompt_start: bytes, exclude: frozenset[bytes] = NOBODY
    ) -> tuple[NodeInfo, ...]:
        chosen = tuple(islice((node for node in nodes.by_share() if node.boot_id not in exclude), 2))
        if chosen:
            nodes.served(chosen[0])
        return chosen


class TwoChoices:
    """A policy that draws two nodes by chance and takes the less loaded one."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self._chance = chance or random.Random()  # noqa: S311 (nothing secret hangs on it)

    def select(
        self, nodes: Candidates, prompt_start: bytes, exclude: frozenset[bytes] = NOBODY
    ) -> tuple[NodeInfo, ...]:
        count = len(nodes.nodes)
        # With as many more as may have to be left out, two are left wherever there are two.
        places = self._chance.sample(range(count), min(count, 2 + len(exclude)))
        drawn = (node for node in map(nodes.nodes.__getitem__, places) if node.boot_id not in exclude)
        return tuple(sorted(islice(drawn, 2), key=nodes.share))


LOAD_FACTOR = 1.25
STEP_BYTES = 256
"""About four blocks of 16 tokens of English text."""
MAX_STEPS = 16


class PrefixAffinity:
    """A policy that sends prompts with the same beginning to the same node, as long as that has a free place."""

    def select(
        self, nodes: Candidates, prompt_start: bytes, exclude: frozenset[bytes] = NOBODY
    ) -> tuple[NodeInfo, ...]:
        beginnings = hash_chain(prompt_start)
        each = LOAD_FACTOR * (nodes.total_load + 1) / nodes.total_size

        def has_room(node: NodeInfo | None) -> bool:
            return node is not None and nodes.load(node) + 1 <= math.ceil(each * size_of(node))

        named = (nodes.owner(beginning, exclude) for beginning in beginnings)
        chosen = next(filter(has_room, named), None)
        if chosen is None:
            others = (node for node in nodes.after(beginnings[-1]) if node.boot_id not in exclude)
            # One always has a free place, but it may be left out.
            chosen = next(filter(has_room, others), None) or nodes.owner(beginnings[0], exclude)
        if chosen is None:
            return ()
        other = nodes.owner(beginnings[0], exclude | {chosen.boot_id})
        return (chosen,) if other is None else (chosen, other)


def hash_chain(prompt_start: bytes) -> list[bytes]:
    """Returns a hash for each beginning of ``prompt_start`` that is a whole number of steps long; at least one."""
    running = hashlib.blake2b(prompt_start[:STEP_BYTES], digest_size=16)
    chain = [running.digest()]
    whole = min(len(prompt_start) // STEP_BYTES, MAX_STEPS)
    for step in range(1, whole):
        running.update(prompt_start[step * STEP_BYTES : (step + 1) * STEP_BYTES])
        chain.append(running.digest())
    return chain


_POLICIES: dict[RoutingPolicy, Callable[[random.Random | None], Policy]] = {
    RoutingPolicy.ROUND_ROBIN: lambda chance: RoundRobin(),
    RoutingPolicy.LEAST_LOADED: lambda chance: LeastLoaded(),
    RoutingPolicy.TWO_CHOICES: TwoChoices,
    RoutingPolicy.PREFIX_AFFINITY: lambda chance: PrefixAffinity(),
}


def looks_at_loads(policy: RoutingPolicy) -> bool:
    """Returns whether a policy's choice depends on the nodes' loads."""
    return policy is not RoutingPolicy.ROUND_ROBIN


def make_policy(policy: RoutingPolicy, chance: random.Random | None = None) -> Policy:
    """Returns a new policy object, for one set of nodes. ``chance`` is for policies that draw nodes."""
    return _POLICIES[policy](chance)
