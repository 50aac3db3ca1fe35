"""A worker's copy of the registry, which its supervisor keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pdserve.wire.discovery import NodeInfo
from pdserve.wire.proxy_workers import KnownNode, Nodes
from pdserve_proxy.snapshot import Node, NodeState, Snapshot, Watcher, take_snapshot


class Mirror:
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._nodes: dict[bytes, Node] = {}
        self._prefilled: frozenset[str] = frozenset()
        self._snapshot: Snapshot | None = None
        self._tell_loss: Callable[[NodeInfo], None] | None = None

    def take(self, message: Nodes) -> None:
        """What the registry holds now. What this worker found unreachable stays so until the node's next heartbeat."""
        before = self._nodes
        self._nodes = {entry.info.boot_id: _renewed(before.get(entry.info.boot_id), entry) for entry in message.nodes}
        self._prefilled = frozenset(message.prefilled)
        self._snapshot = None
        for boot_id, known in before.items():
            node = self._nodes.get(boot_id)
            if node is None:
                self._watcher.forget(boot_id)
                if boot_id in message.lost and self._tell_loss is not None:
                    self._tell_loss(known.info)
            elif node.seen_s != known.seen_s:
                self._watcher.heard_from(boot_id)

    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            self._snapshot = take_snapshot(self._nodes.values(), self._prefilled)
        return self._snapshot

    def on_loss(self, tell: Callable[[NodeInfo], None]) -> None:
        self._tell_loss = tell

    def mark_unreachable(self, boot_id: bytes) -> None:
        node = self._nodes.get(boot_id)
        if node is not None:
            self._nodes[boot_id] = dataclasses.replace(node, state=NodeState.UNREACHABLE)
            self._snapshot = None


def _renewed(known: Node | None, entry: KnownNode) -> Node:
    if known is not None and known.seen_s == entry.seen_s:
        return known
    return Node(entry.info, entry.load, NodeState.SERVING, entry.seen_s)
