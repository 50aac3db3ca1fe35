"""Counts the requests at each node: those of its last heartbeat, and those that this proxy has sent it since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.config import NEWEST_SHARE
from pdserve.wire.discovery import NodeInfo, NodeLoad


@dataclass(slots=True)
class Attempt:
    """One attempt that is under way."""

    _attempts: Attempts
    _nodes: dict[bytes, int]
    """The number of requests that the attempt counts as at each node."""
    _answering: bytes
    _prompts_at: dict[bytes, int]
    """The nodes that are to compute its prompts, until they have, and the heartbeats that each had sent before."""

    def prompt_computed(self) -> None:
        """Ends the attempt at the nodes that only compute its prompts. A second call does nothing."""
        prompts_at, self._prompts_at = self._prompts_at, {}
        for boot_id, beats in prompts_at.items():
            self._attempts.end_prompts(boot_id, beats)
            if boot_id != self._answering:
                self._attempts.end(boot_id, self._nodes.pop(boot_id))

    def end_everywhere(self) -> None:
        """Ends the attempt at all of its nodes. A second call does nothing."""
        if self._prompts_at:
            self.prompt_computed()
        nodes, self._nodes = self._nodes, {}
        for boot_id, count in nodes.items():
            self._attempts.end(boot_id, count)


class Attempts:
    """The attempts of one proxy process. The requests of other processes show in the nodes' next heartbeats."""

    def __init__(self) -> None:
        self._under_way: dict[bytes, int] = {}
        self._beats: dict[bytes, int] = {}
        """How many heartbeats each node has sent."""
        self._prompts: dict[tuple[bytes, int], int] = {}
        """The attempts whose prompts a node is to compute, by the heartbeats that it had sent before they began."""
        self._said: dict[bytes, int] = {}
        """The requests at each node by its last heartbeat."""
        self._reported: dict[bytes, int] = {}
        """The part of what is under way that the node's last heartbeat counted."""
        self._prompt_shares: dict[bytes, float] = {}
        """The share of each node's latest heartbeats in which it had prompts to compute."""
        self._on_load: list[Callable[[bytes], object]] = []

    def on_load(self, callback: Callable[[bytes], object]) -> None:
        """From now on calls ``callback`` too with the boot id of each node whose load may have changed."""
        self._on_load.append(callback)

    def begin(self, answering: tuple[NodeInfo, int], *prefilling: tuple[NodeInfo, int]) -> Attempt:
        """Begins an attempt at these nodes, each with the number of requests that it is for the node's engine.

        Without a node that prefills, the one that answers computes the prompts.
        """
        answering_id = answering[0].boot_id
        counts = {answering_id: answering[1]}
        prompts_at: dict[bytes, int] = {}
        for node, count in prefilling:
            counts[node.boot_id] = count
            self._begin_prompts(node.boot_id, prompts_at)
        if not prefilling:
            self._begin_prompts(answering_id, prompts_at)
        for boot_id, count in counts.items():
            self._under_way[boot_id] = self._under_way.get(boot_id, 0) + count
            if self._on_load:
                self._tell(boot_id)
        return Attempt(self, counts, answering_id, prompts_at)

    def _begin_prompts(self, boot_id: bytes, prompts_at: dict[bytes, int]) -> None:
        beats = prompts_at[boot_id] = self._beats.get(boot_id, 0)
        self._prompts[boot_id, beats] = self._prompts.get((boot_id, beats), 0) + 1

    def heard_from(self, boot_id: bytes, load: NodeLoad) -> None:
        """Notes the load in a heartbeat, which counts the attempts that are under way now."""
        self._said[boot_id] = load.running + load.waiting
        self._reported[boot_id] = self._under_way.get(boot_id, 0)
        self._beats[boot_id] = self._beats.get(boot_id, 0) + 1
        before = self._prompt_shares.get(boot_id, 0.0)
        self._prompt_shares[boot_id] = before + NEWEST_SHARE * ((load.queue_s > 0) - before)
        self._tell(boot_id)

    def forget(self, boot_id: bytes) -> None:
        """Forgets the heartbeat of a node that the registry has dropped."""
        self._said.pop(boot_id, None)
        self._reported.pop(boot_id, None)
        self._prompt_shares.pop(boot_id, None)
        self._beats.pop(boot_id, None)
        self._tell(boot_id)

    def under_way(self, boot_id: bytes) -> int:
        """Returns the number of requests at a node, as ``begin`` counts them."""
        return self._under_way.get(boot_id, 0)

    def load(self, boot_id: bytes) -> int:
        """Returns the number of requests at a node as its engine counts them: one an answer."""
        since = self._under_way.get(boot_id, 0) - self._reported.get(boot_id, 0)
        return max(0, self._said.get(boot_id, 0) + since)

    def prompts(self, boot_id: bytes) -> int:
        """Returns the number of attempts whose prompts a node is to compute, and which its heartbeats may not show yet.

        Older ones show there, if the node has their prompts at all: a decode node computes some itself.
        """
        beats, prompts = self._beats.get(boot_id, 0), self._prompts
        return prompts.get((boot_id, beats), 0) + prompts.get((boot_id, beats - 1), 0)

    def prompt_share(self, boot_id: bytes) -> float:
        """Returns the share of a node's latest heartbeats in which it had prompts to compute; 0 before the first."""
        return self._prompt_shares.get(boot_id, 0.0)

    def end_prompts(self, boot_id: bytes, beats: int) -> None:
        """Notes that a node has computed the prompts of one attempt, or will not: it began after so many heartbeats."""
        left = self._prompts[boot_id, beats] - 1
        if left:
            self._prompts[boot_id, beats] = left
        else:
            del self._prompts[boot_id, beats]

    def end(self, boot_id: bytes, count: int) -> None:
        """Notes that so many requests have ended at a node."""
        left = self._under_way[boot_id] - count
        if left:
            self._under_way[boot_id] = left
        else:
            del self._under_way[boot_id]
        if self._on_load:
            self._tell(boot_id)

    def _tell(self, boot_id: bytes) -> None:
        for callback in self._on_load:
            callback(boot_id)
