"""What a node has to tell one proxy, and when.

ANNOUNCING ──Ack(known)──▶ REGISTERED      sends Register every interval until one is acknowledged
REGISTERED ──Ack(not known)──▶ ANNOUNCING  the proxy was restarted, or dropped us: Register at once
REGISTERED ──silence──▶ ANNOUNCING         ``MISSED_ACKS`` intervals without an answer
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from pdserve.wire.discovery import Ack, Heartbeat, Load, NodeInfo, Register, ToProxy

MISSED_ACKS = 3


class LinkState(enum.Enum):
    ANNOUNCING = "announcing"
    REGISTERED = "registered"


class Standing(enum.Enum):
    """How a proxy answers a node; the value says it to people."""

    ACCEPTED = "knows this node"
    UNREACHED = "cannot be reached: nothing that speaks pdserve's control protocol listens there"
    SILENT = "does not answer: its cluster secret is another one, its clock is wrong, or it hangs"
    TURNED_AWAY = "turns this node away: its registry is full"


class Link:
    """Sans-IO; times are seconds on one monotonic clock."""

    def __init__(self, node: NodeInfo, heartbeat_s: float, load: Callable[[], Load], now: float) -> None:
        self.state = LinkState.ANNOUNCING
        self._node = node
        self._heartbeat_s = heartbeat_s
        self._load = load
        self._due_s = now
        self._heard_s = now
        self._turned_away = False

    def standing(self, *, connected: bool) -> Standing:
        """``connected`` is whether there was a connection for the last message."""
        if self.state is LinkState.REGISTERED:
            return Standing.ACCEPTED
        if not connected:
            return Standing.UNREACHED
        return Standing.TURNED_AWAY if self._turned_away else Standing.SILENT

    @property
    def due_s(self) -> float:
        """When ``tick`` has something to send next."""
        return self._due_s

    def tick(self, now: float) -> ToProxy | None:
        """The message to send now, if one is due."""
        if now < self._due_s:
            return None
        self._due_s = now + self._heartbeat_s
        if self.state is LinkState.REGISTERED and now - self._heard_s >= MISSED_ACKS * self._heartbeat_s:
            self.state = LinkState.ANNOUNCING
        if self.state is LinkState.REGISTERED:
            return Heartbeat(self._node.boot_id, self._load())
        return Register(self._node)

    def unsent(self, now: float) -> None:
        """The last message found no connection; there is one now, so it is due again."""
        self._due_s = now

    def acknowledged(self, ack: Ack, now: float) -> None:
        """Take the proxy's answer. One about another boot of this node is ignored."""
        if ack.boot_id != self._node.boot_id:
            return
        self._heard_s = now
        self._turned_away = not ack.known
        if ack.known:
            self.state = LinkState.REGISTERED
        elif self.state is LinkState.REGISTERED:
            self.state = LinkState.ANNOUNCING
            self._due_s = now
