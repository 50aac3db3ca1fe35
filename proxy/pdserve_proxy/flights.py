"""How many requests are at each node: what it last said, and what this proxy has sent it and seen end since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.wire.discovery import NodeInfo
from pdserve_proxy.policies import LoadOf
from pdserve_proxy.snapshot import Snapshot


@dataclass(slots=True)
class Flight:
    """One attempt that is under way. ``land`` may be called more than once."""

    _land: Callable[[bytes], None]
    _nodes: set[bytes]

    def land(self, *boot_ids: bytes) -> None:
        """It is over at these nodes."""
        for boot_id in boot_ids:
            if boot_id in self._nodes:
                self._nodes.remove(boot_id)
                self._land(boot_id)

    def land_all(self) -> None:
        self.land(*tuple(self._nodes))


class Flights:
    """Of one proxy process: what other processes send shows in the next heartbeat."""

    def __init__(self) -> None:
        self._here: dict[bytes, int] = {}
        self._reported: dict[bytes, int] = {}
        """Of what is here, how much the node's last heartbeat had in it."""

    def begin(self, *nodes: NodeInfo) -> Flight:
        boot_ids = {node.boot_id for node in nodes}
        for boot_id in boot_ids:
            self._here[boot_id] = self._here.get(boot_id, 0) + 1
        return Flight(self._end, boot_ids)

    def heard_from(self, boot_id: bytes) -> None:
        """A heartbeat came: what is here now is in the load that it tells."""
        self._reported[boot_id] = self._here.get(boot_id, 0)

    def forget(self, boot_id: bytes) -> None:
        """The node is gone from the registry."""
        self._reported.pop(boot_id, None)

    def loads(self, snapshot: Snapshot) -> LoadOf:
        """The number of requests at each node of ``snapshot``."""

        def load(node: NodeInfo) -> int:
            said = snapshot.loads[node.boot_id]
            since = self._here.get(node.boot_id, 0) - self._reported.get(node.boot_id, 0)
            return max(0, said.running + said.waiting + since)

        return load

    def _end(self, boot_id: bytes) -> None:
        self._here[boot_id] -= 1
        if not self._here[boot_id]:
            del self._here[boot_id]
