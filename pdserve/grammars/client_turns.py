"""Lets the work of several clients wait, and serves the clients in turns, whoever has more of it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ClientTurns(Generic[Item]):
    """Items that wait, each for one client or several. An item is served once, in the first turn of any of these."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, dict[Item, None]] = OrderedDict()
        """The items of each client in the order in which they came, the client first whose turn is next."""

    def count(self, client: bytes) -> int:
        """Returns how many items wait for a client."""
        return len(self._waiting.get(client, ()))

    def add(self, client: bytes, item: Item) -> None:
        """Lets an item wait for a client, for whom it may wait already."""
        self._waiting.setdefault(client, {})[item] = None

    def discard(self, item: Item) -> None:
        """Takes an item out, for all clients."""
        for client in [client for client, items in self._waiting.items() if item in items]:
            items = self._waiting[client]
            del items[item]
            if not items:
                del self._waiting[client]

    def take(self) -> Item | None:
        """Takes out the oldest item of the client whose turn it is; None if nothing waits."""
        if not self._waiting:
            return None
        client = next(iter(self._waiting))
        item = next(iter(self._waiting[client]))
        self._waiting.move_to_end(client)
        self.discard(item)
        return item
