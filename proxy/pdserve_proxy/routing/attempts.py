"""How much is at each node: what it last said, and what this proxy has sent it and seen end since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.registry.snapshot import Snapshot
from pdserve_proxy.routing.policies import LoadOf


@dataclass(slots=True)
class Attempt:
    """One attempt that is under way. ``end_at`` may be called more than once."""

    _on_end_at: Callable[[bytes, int], None]
    _nodes: dict[bytes, int]
    """With what the attempt counts as there."""

    def end_at(self, *boot_ids: bytes) -> None:
        """It is over at these nodes."""
        for boot_id in boot_ids:
            count = self._nodes.pop(boot_id, 0)
            if count:
                self._on_end_at(boot_id, count)

    def end_everywhere(self) -> None:
        self.end_at(*tuple(self._nodes))


class Attempts:
    """Of one proxy process: what other processes send shows in the next heartbeat."""

    def __init__(self) -> None:
        self._here: dict[bytes, int] = {}
        self._reported: dict[bytes, int] = {}
        """Of what is here, how much the node's last heartbeat had in it."""

    def begin(self, *nodes: tuple[NodeInfo, int]) -> Attempt:
        """An attempt at these nodes, each with the requests that it is for the node's engine: at least one."""
        counts = {node.boot_id: count for node, count in nodes}
        for boot_id, count in counts.items():
            self._here[boot_id] = self._here.get(boot_id, 0) + count
        return Attempt(self._end, counts)

    def heard_from(self, boot_id: bytes) -> None:
        """A heartbeat came: what is here now is in the load that it tells."""
        self._reported[boot_id] = self._here.get(boot_id, 0)

    def forget(self, boot_id: bytes) -> None:
        """The node is gone from the registry."""
        self._reported.pop(boot_id, None)

    def loads(self, snapshot: Snapshot) -> LoadOf:
        """The number of requests at each node of ``snapshot``, as its engine counts them: each answer is one."""

        def load(node: NodeInfo) -> int:
            said = snapshot.loads[node.boot_id]
            since = self._here.get(node.boot_id, 0) - self._reported.get(node.boot_id, 0)
            return max(0, said.running + said.waiting + since)

        return load

    def _end(self, boot_id: bytes, count: int) -> None:
        self._here[boot_id] -= count
        if not self._here[boot_id]:
            del self._here[boot_id]
