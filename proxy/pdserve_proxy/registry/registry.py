"""Holds the registered nodes: the registry, and its mirror in a worker process. Neither does any I/O.

The registry takes discovery messages and ``now`` and returns what to answer. It drops a node when the node deregisters,
when ``missed_heartbeats`` intervals pass without a message from it, or when another process registers under its URL
(the node was restarted, and a port has only one owner). Only time in which this process listened counts as
silence: ``extend_leases`` leaves out the time in which it did not. A node's role is the one that the node named last.

A node that fell silent is lost, and the relay, which may have sent it requests, is told. A node that deregistered still
answers what it has; one whose URL another process has taken over answers, or its host's kernel resets its connections.
"""

from __future__ import annotations

import dataclasses
import math
import re
from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from urllib.parse import urlsplit

import msgspec

from pdserve.errors import MalformedFrame
from pdserve.wire.discovery import MAX_MET, Ack, Deregister, NodeHeartbeat, NodeInfo, NodeLoad, Register, Role
from pdserve.wire.proxy_workers import KnownNode, Nodes, NodesChanged
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.version import SPOKEN, Spoken
from pdserve_proxy.recent import RecentCounts
from pdserve_proxy.registry.snapshot import (
    Reachability,
    RegisteredNode,
    RegistryView,
    RegistryWatcher,
    Serving,
    Snapshot,
    take_serving,
    take_snapshot,
    takes_prompts,
)

MAX_NODES = 4096
MAX_LOST = MAX_NODES
"""The number of lost nodes that are remembered: all that there may be can fall silent at once, and workers hear of the
losses from what is remembered."""
MAX_HELD_BEATS = 8
"""The heartbeats for which a node that refuses again and again is left out each time."""
MAX_PREFILLED = 4096
"""The number of fingerprints that are remembered."""

_LABEL = "[A-Za-z0-9_-]{1,63}"
_URL = re.compile(
    rf"https?://(?:{_LABEL}(?:\.{_LABEL})*\.?|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9]+)?\])(?::\d{{1,5}})?(?:/[!-~]*)?"
)


@dataclasses.dataclass(slots=True)
class _Refusals:
    """What is remembered of a node that refused: each time it comes or goes, requests look at all nodes anew."""

    held_beats: int
    """The heartbeats for which it is left out, the one that brings it back included."""
    heard: int = 0
    """Its heartbeats since it refused."""

    @property
    def holds(self) -> bool:
        return self.heard < self.held_beats

    @property
    def forgotten(self) -> bool:
        return self.heard >= self.held_beats + MAX_HELD_BEATS


class _NodeTable(RegistryView):
    """What the registry and its mirror have in common: the nodes, by boot id, and who is told when they change.

    What a heartbeat costs does not grow with the nodes: it changes one entry, and drops the snapshot.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, RegisteredNode] = {}
        self._refusals: dict[bytes, _Refusals] = {}
        self._draining: frozenset[bytes] = frozenset()
        self._prefilled: dict[str, None] = {}
        """The fingerprints that have had a prefill node, in the order in which they came."""
        self._proxies: Counter[int] = Counter()
        """How many nodes know of so many proxies."""
        self._snapshot: Snapshot | None = None
        self._serving: Serving | None = None
        self._on_loss: Callable[[NodeInfo], None] | None = None
        self._on_change: list[Callable[[], object]] = []
        self._holding = self._held_back = False
        """Whether changes are told later, and whether there is one to tell then."""
        self._on_node: list[Callable[[bytes], object]] = []

    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            self._snapshot = take_snapshot(self._nodes.values(), self.serving(), self.live_proxies)
        return self._snapshot

    def serving(self) -> Serving:
        if self._serving is None:
            self._serving = take_serving(self._nodes.values(), self._prefilled)
        return self._serving

    def load(self, boot_id: bytes) -> NodeLoad | None:
        node = self._nodes.get(boot_id)
        return None if node is None else node.load

    @property
    def live_proxies(self) -> int:
        # A node that cannot reach a proxy knows too few of them, and none knows too many for longer than a lease.
        return max(self._proxies, default=1)

    def known(self, boot_id: bytes) -> RegisteredNode | None:
        """Returns a registered node with what is known of it now."""
        return self._nodes.get(boot_id)

    def mark_unreachable(self, boot_id: bytes) -> None:
        node = self._nodes.get(boot_id)
        if node is None or node.state is Reachability.UNREACHABLE:
            return
        before = self._refusals.get(boot_id)
        self._refusals[boot_id] = _Refusals(min(2 * before.held_beats, MAX_HELD_BEATS) if before else 1)
        self._put(dataclasses.replace(node, state=Reachability.UNREACHABLE))

    def on_loss(self, callback: Callable[[NodeInfo], None]) -> None:
        self._on_loss = callback

    def on_change(self, callback: Callable[[], object]) -> None:
        self._on_change.append(callback)

    def on_node(self, callback: Callable[[bytes], object]) -> None:
        self._on_node.append(callback)

    @property
    def draining(self) -> frozenset[bytes]:
        return self._draining

    @property
    def prefilled(self) -> frozenset[str]:
        """Fingerprints that have had a prefill node."""
        return frozenset(self._prefilled)

    def _put(self, node: RegisteredNode) -> None:
        """Adds a node, or takes over what is known of it now."""
        boot_id = node.info.boot_id
        before = self._nodes.get(boot_id)
        self._nodes[boot_id] = node
        self._proxies[node.proxies] += 1
        if before is not None:
            self._forget_proxies(before.proxies)
        drains = boot_id in self._draining
        if node.state is Reachability.DRAINING and not drains:
            self._draining |= {boot_id}
        elif drains and node.state is Reachability.SERVING:
            self._draining -= {boot_id}
        if before is not None and _is_routed_alike(before, node):
            self._heard(boot_id)
        else:
            self._changed(boot_id)

    def _state_heard(self, boot_id: bytes, draining: bool) -> Reachability:
        """Returns what a node is that has just been heard."""
        refusals = self._refusals.get(boot_id)
        if refusals is not None:
            refusals.heard += 1
            if refusals.forgotten:
                del self._refusals[boot_id]
        if draining:
            return Reachability.DRAINING
        return Reachability.UNREACHABLE if refusals is not None and refusals.holds else Reachability.SERVING

    def _remove(self, boot_id: bytes) -> RegisteredNode | None:
        self._refusals.pop(boot_id, None)
        node = self._nodes.pop(boot_id, None)
        if node is not None:
            self._forget_proxies(node.proxies)
            self._draining -= {boot_id}
            self._changed(boot_id)
        return node

    def _forget_proxies(self, proxies: int) -> None:
        self._proxies[proxies] -= 1
        if not self._proxies[proxies]:
            del self._proxies[proxies]

    def _note_prefilled(self, fingerprint: str) -> None:
        if fingerprint in self._prefilled:
            return
        self._prefilled[fingerprint] = None
        self._serving = None
        if len(self._prefilled) > MAX_PREFILLED:
            del self._prefilled[next(iter(self._prefilled))]

    def _heard(self, boot_id: bytes) -> None:
        """Tells that a node is what it was, and may be as busy as it was not."""
        self._snapshot = None
        for heard in self._on_node:
            heard(boot_id)
        if boot_id in self._draining:
            self._tell_change()

    def _changed(self, boot_id: bytes) -> None:
        """Tells that a node has come or gone, or is another than before."""
        self._snapshot = self._serving = None
        for heard in self._on_node:
            heard(boot_id)
        self._tell_change()

    def _tell_change(self) -> None:
        if self._holding:
            self._held_back = True
            return
        for callback in self._on_change:
            callback()

    @contextmanager
    def _one_change(self) -> Iterator[None]:
        """Tells of all that changes in the block once, at its end: those who are told look at all their answers."""
        self._holding, self._held_back = True, False
        try:
            yield
        finally:
            self._holding = False
            if self._held_back:
                self._tell_change()

    def _tell_loss(self, info: NodeInfo) -> None:
        if self._on_loss is not None:
            self._on_loss(info)


def _is_routed_alike(before: RegisteredNode, now: RegisteredNode) -> bool:
    return before.state is now.state and (before.info is now.info or before.info == now.info)


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """The nodes of one model that others fetch KV blocks from: prompts', or those of answers."""

    model: str
    fingerprint: str
    of_prompts: bool

    @classmethod
    def met_by(cls, info: NodeInfo) -> _Group:
        """Returns whom a node fetches from: a prefill node has the blocks of answers returned to it."""
        return cls(info.model, info.fingerprint, of_prompts=info.role.answers)

    @classmethod
    def all_of(cls, info: NodeInfo) -> list[_Group]:
        """Returns the groups that a node belongs to."""
        offers = (takes_prompts(info), True), (info.role.answers and bool(info.control), False)
        return [cls(info.model, info.fingerprint, of_prompts) for belongs, of_prompts in offers if belongs]


class Registry(_NodeTable):
    """The nodes of one cluster. Times are seconds on one monotonic clock of the caller's."""

    def __init__(
        self,
        heartbeat_s: float,
        missed_heartbeats: int,
        max_nodes: int = MAX_NODES,
        watcher: RegistryWatcher | None = None,
        own_id: bytes = b"",
    ) -> None:
        """``own_id`` is the boot id by which nodes know this proxy."""
        super().__init__()
        self.generated_lately = RecentCounts()
        """How many tokens nodes have generated in each of the last steps of time, by their heartbeats."""
        self._watcher = watcher
        self._own_id = own_id
        self._max_nodes = max_nodes
        self.heartbeat_s = heartbeat_s
        self._lease_s = heartbeat_s * missed_heartbeats
        self._at: dict[str, bytes] = {}
        """The boot id of the node at each URL, which has one owner."""
        self._on_machine: dict[str, dict[bytes, None]] = {}
        """The boot ids of the nodes whose engines compute on each machine."""
        self._heard_s: OrderedDict[bytes, float] = OrderedDict()
        """When each node's last message came, on a clock that stands still while this process does not listen; the one
        that has been silent for longest is the first."""
        self._unheard_s = 0.0
        """Seconds in which this process did not listen: the clock of ``_heard_s`` is behind by them."""
        self._lost: dict[bytes, None] = {}
        """The boot ids of lost nodes, in the order of their losses."""
        self._fetched_from: dict[_Group, list[bytes]] = {}
        """The boot ids of the nodes that others fetch KV blocks from, in ascending order."""
        self._unmet: dict[bytes, None] = {}
        """The boot ids of nodes that have not met others so far."""

    def handle(self, message: Register | NodeHeartbeat | Deregister, now: float) -> Ack | None:
        """Handles one message of a node and returns the answer to it.

        Raises MalformedFrame, and changes nothing, for a registration or a role that cannot be used.
        """
        match message:
            case Register(node=info, met=met):
                return Ack(info.boot_id, self._register(info, met, now))
            case NodeHeartbeat(boot_id=boot_id, role=role):
                known = self._heartbeat(message, now)
                return Ack(boot_id, known, role if known else None)
            case Deregister(boot_id=boot_id):
                self._drop(boot_id)
                return None

    def to_meet(self, boot_id: bytes) -> tuple[PrefillTarget, ...]:
        """Returns the nodes that a node is to connect to before it fetches KV blocks from them, at most ``MAX_MET``.

        Of more, it takes those whose boot ids follow its own. These are random, so each is met by as many as any
        other, and one that comes or goes changes the choice of few.
        """
        node = self._nodes.get(boot_id)
        if node is None:
            return ()
        ring = self._fetched_from.get(_Group.met_by(node.info), [])
        first = bisect_right(ring, boot_id)
        nearest = (*ring[first : first + MAX_MET], *ring[: min(first, MAX_MET)])
        chosen = [self._nodes[each].info for each in dict.fromkeys(nearest) if each != boot_id][:MAX_MET]
        return tuple([PrefillTarget(info.name, info.control, info.boot_id) for info in chosen])

    @property
    def unmet(self) -> tuple[bytes, ...]:
        """The boot ids of the nodes that have not met others so far."""
        return tuple(self._unmet)

    def expire(self, now: float) -> tuple[RegisteredNode, ...]:
        """Drops the nodes that have missed too many heartbeats, and returns them.

        The caller handles all messages that have come before it calls this.
        """
        silent_since = now - self._unheard_s - self._lease_s
        silent = takewhile(lambda heard: heard[1] <= silent_since, self._heard_s.items())
        lost = tuple([self._nodes[boot_id] for boot_id, _ in silent])
        with self._one_change():
            for node in lost:
                self._lose(node.info)
        return lost

    def extend_leases(self, missed_s: float) -> None:
        """Extends every lease by ``missed_s``, a time in which this process did not listen.

        The caller calls it before it handles the messages that came in that time.
        """
        self._unheard_s += missed_s

    def next_expiry(self) -> float | None:
        """Returns when ``expire`` has to be called if no message comes until then; None without nodes."""
        heard_s = next(iter(self._heard_s.values()), None)
        return None if heard_s is None else heard_s + self._unheard_s + self._lease_s

    def node(self, boot_id: bytes) -> NodeInfo | None:
        """Returns what a registered node is now."""
        node = self._nodes.get(boot_id)
        return None if node is None else node.info

    def neighbours(self, machine: str) -> list[NodeInfo]:
        """Returns the registered nodes whose engines compute on this machine."""
        return [self._nodes[boot_id].info for boot_id in self._on_machine.get(machine, ())]

    def is_lost(self, boot_id: bytes) -> bool:
        """Returns whether a node is among ``lost``."""
        return boot_id in self._lost

    @property
    def lost(self) -> tuple[bytes, ...]:
        """Boot ids of the last nodes that were dropped for their silence and have not come back."""
        return tuple(self._lost)

    def _register(self, info: NodeInfo, met: bool, now: float) -> bool:
        _check(info)
        known = self._nodes.get(info.boot_id)
        if known is not None and msgspec.structs.replace(known.info, role=info.role) != info:
            raise MalformedFrame(
                f"node {info.name} ({info.url}) registered with the boot id of {known.info.name} ({known.info.url}), "
                "or as another than before; a process has a boot id of its own and stays what it is"
            )
        before = self._at.get(info.url)
        if before is not None and before != info.boot_id:
            self._drop(before)
        if known is None and len(self._nodes) >= self._max_nodes:
            return False
        self._at[info.url] = info.boot_id
        self._join_machine(info)
        self._note_role(info)
        self._lost.pop(info.boot_id, None)
        # A node that drains says so in its next heartbeat, and not here.
        state = self._state_heard(info.boot_id, info.boot_id in self._draining)
        load, proxies = (known.load, known.proxies) if known else (NodeLoad(), 1)
        self._renew_lease(RegisteredNode(info, load, state, now, proxies, met))
        return True

    def _heartbeat(self, heartbeat: NodeHeartbeat, now: float) -> bool:
        node = self._nodes.get(heartbeat.boot_id)
        if node is None:
            return False
        info = node.info
        if heartbeat.role not in (None, info.role):
            info = msgspec.structs.replace(info, role=heartbeat.role)
            _check(info)
            self._note_role(info)
        state = self._state_heard(heartbeat.boot_id, heartbeat.draining)
        # This proxy lives, whether or not the node has named it.
        proxies = len({*heartbeat.proxies, self._own_id} - {b""}) or 1
        # The first heartbeat tells of all the tokens since the node's start.
        if node.load != NodeLoad():
            self.generated_lately.add(now, max(0, heartbeat.load.generated_tokens - node.load.generated_tokens))
        self._renew_lease(RegisteredNode(info, heartbeat.load, state, now, proxies, heartbeat.met))
        if self._watcher is not None:
            self._watcher.heard_from(heartbeat.boot_id, heartbeat.load)
        return True

    def _note_role(self, info: NodeInfo) -> None:
        if (known := self.node(info.boot_id)) is not None:
            self._leave_groups(known)
        if takes_prompts(info):
            self._note_prefilled(info.fingerprint)
        for group in _Group.all_of(info):
            insort(self._fetched_from.setdefault(group, []), info.boot_id)

    def _lose(self, info: NodeInfo) -> None:
        self._lost[info.boot_id] = None
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]
        self._drop(info.boot_id)
        self._tell_loss(info)

    def _renew_lease(self, node: RegisteredNode) -> None:
        boot_id = node.info.boot_id
        # In this order even if the caller's clock does not quite keep to it.
        latest_s = self._heard_s[next(reversed(self._heard_s))] if self._heard_s else -math.inf
        self._heard_s[boot_id] = max(node.seen_s - self._unheard_s, latest_s)
        self._heard_s.move_to_end(boot_id)
        self._put(node)
        if node.met:
            self._unmet.pop(boot_id, None)
        else:
            self._unmet[boot_id] = None

    def _drop(self, boot_id: bytes) -> None:
        node = self._nodes.get(boot_id)
        if node is None:
            return
        del self._heard_s[boot_id], self._at[node.info.url]
        self._leave_machine(node.info)
        self._leave_groups(node.info)
        self._unmet.pop(boot_id, None)
        self._remove(boot_id)
        if self._watcher is not None:
            self._watcher.forget(boot_id)

    def _leave_groups(self, info: NodeInfo) -> None:
        for group in _Group.all_of(info):
            self._fetched_from[group].remove(info.boot_id)
            if not self._fetched_from[group]:
                del self._fetched_from[group]

    def _join_machine(self, info: NodeInfo) -> None:
        if info.compute is not None:
            self._on_machine.setdefault(info.compute.machine, {})[info.boot_id] = None

    def _leave_machine(self, info: NodeInfo) -> None:
        if info.compute is None:
            return
        there = self._on_machine[info.compute.machine]
        del there[info.boot_id]
        if not there:
            del self._on_machine[info.compute.machine]


def _check(info: NodeInfo) -> None:
    theirs = Spoken(info.protocol, info.oldest_protocol)
    if SPOKEN.common(theirs) is None:
        raise MalformedFrame(f"a node registered that speaks protocol {theirs}; this proxy speaks {SPOKEN}")
    for field in ("name", "url", "control", "model", "fingerprint", "version"):
        if not getattr(info, field).isprintable():
            raise MalformedFrame(f"a node registered with unprintable characters in its {field}")
    if not _is_url(info.url):
        raise MalformedFrame(
            f"node {info.name} registered with {info.url!r} as its URL; it must be http://host:port or https://host:port"
        )
    # A decode or mixed node whose engine cannot be fetched from has none.
    needs_control = info.role is Role.PREFILL or info.control
    if needs_control and not info.control.startswith("tcp://"):
        raise MalformedFrame(
            f"{info.role.value} node {info.name} registered with {info.control!r} as its control address; "
            "it must be tcp://host:port"
        )


def _is_url(text: str) -> bool:
    """Returns whether requests can be sent to ``text``: a host, a port, and perhaps the beginning of a path."""
    if _URL.fullmatch(text) is None:
        return False
    try:
        parts = urlsplit(text)
        return parts.port != 0 and not parts.query and not parts.fragment
    except ValueError:  # a port above 65535, or brackets around what is no address
        return False


class RegistryMirror(_NodeTable):
    """A copy of the supervisor's registry in a worker process."""

    def __init__(self, watcher: RegistryWatcher) -> None:
        super().__init__()
        self._watcher = watcher

    def take(self, message: Nodes) -> None:
        """Takes over what the registry holds now.

        A node that this worker found unreachable stays so until the node's next heartbeat.
        """
        gone = self._nodes.keys() - {entry.info.boot_id for entry in message.nodes}
        self._take(message, tuple(gone))

    def take_changes(self, message: NodesChanged) -> None:
        """Takes over what has changed in the registry since its last message."""
        self._take(message, message.gone)

    def _take(self, message: Nodes | NodesChanged, gone: Iterable[bytes]) -> None:
        for fingerprint in message.prefilled:
            self._note_prefilled(fingerprint)
        lost = frozenset(message.lost)
        with self._one_change():
            for boot_id in gone:
                node = self._remove(boot_id)
                if node is not None:
                    self._watcher.forget(boot_id)
                    if boot_id in lost:
                        self._tell_loss(node.info)
            for entry in message.nodes:
                self._renew(entry)

    def _renew(self, entry: KnownNode) -> None:
        boot_id = entry.info.boot_id
        known = self._nodes.get(boot_id)
        if known is not None and known.seen_s == entry.seen_s:
            return
        # Each message brings an object of its own; the one that is known spares a comparison at each heartbeat.
        info = known.info if known is not None and known.info == entry.info else entry.info
        state = self._state_heard(boot_id, entry.draining)
        self._put(RegisteredNode(info, entry.load, state, entry.seen_s, entry.proxies, entry.met))
        if known is not None or entry.load != NodeLoad():  # the registration itself brings no load
            self._watcher.heard_from(boot_id, entry.load)
