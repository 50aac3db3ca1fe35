"""Chooses the nodes that serve a request: a decode node, and the prefill nodes that fit it.

What a choice costs hardly grows with the nodes: groups of nodes among which requests choose are held, with their loads,
until a node comes or goes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from pdserve.config import FEW_PROMPTS, PrefillAnswers, RoutingPolicy
from pdserve.errors import InvalidRequest, NotFound, Unavailable
from pdserve.wire.discovery import NodeInfo, Role
from pdserve_proxy.registry.snapshot import Pairing, Serving
from pdserve_proxy.routing.candidates import Candidates, Turns, size_of
from pdserve_proxy.routing.policies import NOBODY, Policy, looks_at_loads, make_policy

RETRY_AFTER_S = 1
MAX_POLICIES = 256
"""The number of models, or of fingerprints, for which a policy is remembered; the oldest is forgotten first."""

MAX_NAMED = 8
"""The number of models that an error names."""

MAX_GROUPS = 1024
"""The number of groups of nodes that are remembered; all are forgotten when there are more."""

Key = TypeVar("Key")
# Names of their own: each request looks these up.
_MIXED, _OFF, _AUTO = Role.MIXED, PrefillAnswers.OFF, PrefillAnswers.AUTO


class Loads(Protocol):
    """The number of requests at each node, as far as this proxy can know it."""

    def load(self, boot_id: bytes) -> int: ...

    def on_load(self, callback: Callable[[bytes], object]) -> None:
        """From now on calls ``callback`` with the boot id of each node whose load may have changed."""


class Kind(msgspec.Struct, frozen=True):
    """What a decode node has to be to go on with another one's answer exactly where that was.

    Nodes of other context lengths would cut a prompt elsewhere, or end the answer elsewhere. Those of other formats
    would read other tool calls from the same tokens.
    """

    fingerprint: str
    formats: str
    max_model_len: int
    kernels: str | None
    """What the node computes with; None if that does not matter."""

    def has(self, node: NodeInfo) -> bool:
        return (
            node.fingerprint == self.fingerprint
            and node.formats == self.formats
            and node.capacity.max_model_len == self.max_model_len
            and self.kernels in (None, node.kernels)
        )


class RouteQuery(msgspec.Struct, frozen=True):
    """What routing looks at in a request."""

    model: str
    prompt_start: bytes = b""
    """The first bytes of its prompt, as they stand in the request body."""
    key: bytes = b""
    """Names a decode node that every proxy finds, for a client that may ask again; empty if it will not."""
    kind: Kind | None = None
    """What the decode node has to be; None if each one will do."""


class Route(msgspec.Struct, frozen=True):
    """The nodes of one attempt at a request."""

    decode: NodeInfo
    prefill: tuple[NodeInfo, ...]
    """The chosen prefill node, then an alternative if there is one; empty if ``decode`` prefills by itself."""


class _DecodeGroup(msgspec.Struct, frozen=True):
    """The decode nodes that all could serve the same requests."""

    candidates: Candidates
    policy: Policy
    pairings: dict[bytes, Pairing]
    """Their pairings, by their boot ids."""


class Router:
    """Applies one routing policy to decode nodes, and independently of that to the prefill nodes that fit them.

    Every model has a policy object for its decode nodes, and every fingerprint has one for its prefill nodes.
    """

    def __init__(self, policy: RoutingPolicy, loads: Loads, chance: random.Random | None = None) -> None:
        """``chance`` is for policies that draw nodes."""
        self._routing_policy = policy
        self._chance = chance
        self._loads = loads
        self._decode_policies: dict[str, Policy] = {}
        """The policy of each model's decode nodes."""
        self._prefill_policies: dict[tuple[str, str], Policy] = {}
        """The policy of the prefill nodes of each model and fingerprint."""
        self._decode_turns, self._prefill_turns = Turns(), Turns()
        self._serving: Serving | None = None
        """The nodes from which the groups are made."""
        self._decode_groups: dict[tuple[str, Kind | None], _DecodeGroup | None] = {}
        """The decode nodes of each model and kind; None where there is no such node."""
        self._prefill_groups: dict[tuple[str, str], tuple[Candidates, Policy]] = {}
        self._groups_of: dict[bytes, list[Candidates]] = {}
        """The groups that each node is in, by its boot id."""
        self._changed: set[bytes] = set()
        """The nodes whose loads may have changed since the last choice. Each request changes some of them twice."""
        if looks_at_loads(policy):
            loads.on_load(self._changed.add)

    def choose(self, serving: Serving, query: RouteQuery, exclude: frozenset[bytes] = frozenset()) -> Route:
        """Returns a route that avoids the decode nodes in ``exclude``.

        Raises Unavailable if no pair of nodes can serve the request now.
        """
        if serving is not self._serving or len(self._decode_groups) + len(self._prefill_groups) >= MAX_GROUPS:
            self._serving = serving
            self._decode_groups.clear()
            self._prefill_groups.clear()
            self._groups_of.clear()
        if self._changed:
            self._take_over_loads()
        group = self._decode_group(serving, query)
        decode = None if group is None else self._decode_node(group, query, exclude)
        if group is None or decode is None:
            raise Unavailable(
                f"no decode node, or none with a matching prefill node, serves {query.model!r} now",
                code="no_route",
                retry_after_s=RETRY_AFTER_S,
            )
        return Route(decode, self._prefill_nodes(group.pairings[decode.boot_id], query))

    def _decode_node(self, group: _DecodeGroup, query: RouteQuery, exclude: frozenset[bytes]) -> NodeInfo | None:
        if query.key:
            return group.candidates.owner(query.key, exclude)
        chosen = group.policy.select(group.candidates, query.prompt_start, exclude)
        return chosen[0] if chosen else None

    def _prefill_nodes(self, pairing: Pairing, query: RouteQuery) -> tuple[NodeInfo, ...]:
        if not pairing.fitting:
            return ()
        key = (query.model, pairing.decode.fingerprint)
        found = self._prefill_groups.get(key)
        if found is None:
            group = self._group(pairing.fitting, self._prefill_turns)
            found = self._prefill_groups[key] = group, self._policy_for(self._prefill_policies, key)
        group, policy = found
        itself = frozenset((pairing.decode.boot_id,)) if pairing.decode.role is _MIXED else NOBODY
        return policy.select(group, query.prompt_start, itself)

    def _decode_group(self, serving: Serving, query: RouteQuery) -> _DecodeGroup | None:
        key = query.model, query.kind
        if key in self._decode_groups:
            return self._decode_groups[key]
        pairings = {
            pair.decode.boot_id: pair
            for pair in serving.pairings.get(query.model, ())
            if query.kind is None or query.kind.has(pair.decode)
        }
        group = None
        if pairings:
            nodes = [pair.decode for pair in pairings.values()]
            policy = self._policy_for(self._decode_policies, query.model)
            group = _DecodeGroup(self._group(nodes, self._decode_turns), policy, pairings)
        self._decode_groups[key] = group
        return group

    def _group(self, nodes: Sequence[NodeInfo], turns: Turns) -> Candidates:
        group = Candidates(nodes, self._loads.load, turns)
        for node in nodes:
            self._groups_of.setdefault(node.boot_id, []).append(group)
        return group

    def _take_over_loads(self) -> None:
        for boot_id in self._changed:
            for group in self._groups_of.get(boot_id, ()):
                group.changed(boot_id)
        self._changed.clear()

    def _policy_for(self, policies: dict[Key, Policy], key: Key) -> Policy:
        policy = policies.get(key)
        if policy is None:
            if len(policies) == MAX_POLICIES:
                del policies[next(iter(policies))]
            policy = policies[key] = make_policy(self._routing_policy, self._chance)
        return policy


def requested_model(serving: Serving, asked: str | None) -> str:
    """Returns the model that a request means; a request may leave it out where the cluster has only one.

    Raises Unavailable with no node registered, NotFound for an unknown model, InvalidRequest for none among several.
    """
    if not serving.models:
        raise Unavailable("no node is registered", code="no_nodes", retry_after_s=RETRY_AFTER_S)
    if asked is None:
        if len(serving.models) > 1:
            raise InvalidRequest("'model' is missing, and this cluster serves more than one", param="model")
        return next(iter(serving.models))
    if asked not in serving.models:
        raise model_not_found(asked, serving.models)
    return asked


def model_not_found(name: str, known: Iterable[str]) -> NotFound:
    """Returns the error for a model that is not among those that are ``known``."""
    names = sorted(known)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    listed = ", ".join(map(repr, names[:MAX_NAMED])) + more
    here = f"; here {'are' if len(names) > 1 else 'is'} {listed}" if names else ""
    return NotFound(f"the model {name[:200]!r} does not exist here{here}", param="model", code="model_not_found")


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A node and what it has to do, as far as this proxy knows."""

    info: NodeInfo
    requests: int
    prompts: int
    """The prompts of this proxy's requests that the node is to compute."""
    queue_s: float
    """How long a prompt would wait there, by the node's last heartbeat: this shows what other proxies have sent."""
    prompt_share: float
    """The share of its latest heartbeats in which it had prompts to compute."""

    def share(self, more: int = 0) -> float:
        """Returns the share of the node's batch that is in use, with so many more requests."""
        return (self.requests + more) / size_of(self.info)


def answers_itself(choice: PrefillAnswers, prefill: NodeWork, decode: NodeWork, answers: int) -> bool:
    """Returns whether ``prefill`` gives so many ``answers`` to a request itself, for which ``decode`` was chosen.

    Where answers are long and prompts short, a prefill node rests while its decode nodes are full. So it takes a
    request that it would only prefill otherwise, if it has no prompt to compute, had few of them lately, and has a
    smaller share of its batch in use than the chosen decode node. Then no KV blocks move. A node that is often asked
    to prefill takes none: its streams would stand still during each prompt. Nodes that divide the cores of one machine
    gain nothing by it: a prefill node that rests lends its cores.
    """
    if not may_answer_itself(choice, prefill.info, decode.info):
        return False
    rests = not prefill.prompts and not prefill.queue_s and prefill.prompt_share < FEW_PROMPTS
    return rests and prefill.share(answers) <= min(1.0, decode.share())


def may_answer_itself(choice: PrefillAnswers, prefill: NodeInfo, decode: NodeInfo) -> bool:
    """Returns whether ``answers_itself`` depends on what the nodes have to do, and is not always False."""
    if choice is _OFF or not _can_replace(prefill, decode):
        return False
    return choice is not _AUTO or not _share_a_machine(prefill, decode)


def _can_replace(prefill: NodeInfo, decode: NodeInfo) -> bool:
    """Returns whether a prefill node takes all requests that ``decode`` takes, and answers them alike."""
    if not prefill.answers == decode.answers != "":
        return False
    ours, theirs = prefill.capacity, decode.capacity
    longest = min(theirs.max_model_len, theirs.num_blocks * theirs.block_size)
    return (
        prefill.role is Role.PREFILL
        and ours.max_model_len == theirs.max_model_len
        and ours.max_running >= theirs.max_running
        and ours.num_blocks * ours.block_size >= longest
    )


def _share_a_machine(one: NodeInfo, other: NodeInfo) -> bool:
    """Returns whether both compute on cores of the same machine. A node on a GPU names no cores."""
    return one.compute is not None and other.compute is not None and one.compute.machine == other.compute.machine
