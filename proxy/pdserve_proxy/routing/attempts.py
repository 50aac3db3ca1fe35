"""Counts the requests at each node: those of its last heartbeat, and those that this proxy has sent it since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.wire.discovery import NodeInfo, NodeLoad


@dataclass(slots=True)
class Attempt:
    """One attempt that is under way."""

    _on_end_at: Callable[[bytes, int], None]
    _nodes: dict[bytes, int]
    """The number of requests that the attempt counts as at each node."""

    def end_at(self, *boot_ids: bytes) -> None:
        """Ends the attempt at these nodes. A second call for the same node does nothing."""
        for boot_id in boot_ids:
            count = self._nodes.pop(boot_id, 0)
            if count:
                self._on_end_at(boot_id, count)

    def end_everywhere(self) -> None:
        self.end_at(*tuple(self._nodes))


class Attempts:
    """The attempts of one proxy process. The requests of other processes show in the nodes' next heartbeats."""

    def __init__(self) -> None:
        self._under_way: dict[bytes, int] = {}
        self._said: dict[bytes, int] = {}
        """The requests at each node by its last heartbeat."""
        self._reported: dict[bytes, int] = {}
        """The part of what is under way that the node's last heartbeat counted."""
        self._on_load: list[Callable[[bytes], object]] = []

    def on_load(self, callback: Callable[[bytes], object]) -> None:
        """From now on calls ``callback`` too with the boot id of each node whose load may have changed."""
        self._on_load.append(callback)

    def begin(self, *nodes: tuple[NodeInfo, int]) -> Attempt:
        """Begins an attempt at ``nodes``, each with the number of requests that it is for the node's engine."""
        counts = {node.boot_id: count for node, count in nodes}
        for boot_id, count in counts.items():
            self._under_way[boot_id] = self._under_way.get(boot_id, 0) + count
            self._tell(boot_id)
        return Attempt(self._end, counts)

    def heard_from(self, boot_id: bytes, load: NodeLoad) -> None:
        """Notes the load in a heartbeat, which counts the attempts that are under way now."""
        self._said[boot_id] = load.running + load.waiting
        self._reported[boot_id] = self._under_way.get(boot_id, 0)
        self._tell(boot_id)

    def forget(self, boot_id: bytes) -> None:
        """Forgets the heartbeat of a node that the registry has dropped."""
        self._said.pop(boot_id, None)
        self._reported.pop(boot_id, None)
        self._tell(boot_id)

    def under_way(self, boot_id: bytes) -> int:
        """Returns the number of requests at a node, as ``begin`` counts them."""
        return self._under_way.get(boot_id, 0)

    def load(self, boot_id: bytes) -> int:
        """Returns the number of requests at a node as its engine counts them: one an answer."""
        since = self._under_way.get(boot_id, 0) - self._reported.get(boot_id, 0)
        return max(0, self._said.get(boot_id, 0) + since)

    def _end(self, boot_id: bytes, count: int) -> None:
        self._under_way[boot_id] -= count
        if not self._under_way[boot_id]:
            del self._under_way[boot_id]
        self._tell(boot_id)

    def _tell(self, boot_id: bytes) -> None:
        for callback in self._on_load:
            callback(boot_id)
