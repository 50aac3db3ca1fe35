"""Lets the work of several clients wait, and serves the clients in turns, whoever has more of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ClientTurns(Generic[Item]):
    """Items that wait, each for one client or several. An item is served once, in the first turn of any of these."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[bytes, dict[Item, None]] = OrderedDict()
        """The items of each client in the order in which they came, the client first whose turn is next."""

    def __bool__(self) -> bool:
        """Returns whether anything waits."""
        return bool(self._waiting)

    def count(self, client: bytes) -> int:
        """Returns how many items wait for a client."""
        return len(self._waiting.get(client, ()))

    def add(self, client: bytes, item: Item) -> None:
        """Lets an item wait for a client, for whom it may wait already."""
        self._waiting.setdefault(client, {})[item] = None

    def discard(self, item: Item, client: bytes | None = None) -> bool:
        """Takes an item out, for all clients or for one. Returns whether it waited."""
        among = self._waiting if client is None else {client} & self._waiting.keys()
        clients = [client for client in among if item in self._waiting[client]]
        for client in clients:
            items = self._waiting[client]
            del items[item]
            if not items:
                del self._waiting[client]
        return bool(clients)

    def take(self) -> Item | None:
        """Takes out the oldest item of the client whose turn it is; None if nothing waits."""
        if not self._waiting:
            return None
        client = next(iter(self._waiting))
        item = next(iter(self._waiting[client]))
        self._waiting.move_to_end(client)
        self.discard(item)
        return item


class WaitingTurns(Generic[Item]):
    """Items that wait for threads, which take them in the turns of their clients. All methods are for any thread."""

    def __init__(self) -> None:
        self._turns: ClientTurns[Item] = ClientTurns()
        self._changed = threading.Condition()
        self._over = False

    def put(self, client: bytes, item: Item) -> None:
        """Lets an item wait for a thread."""
        with self._changed:
            self._turns.add(client, item)
            self._changed.notify()

    def discard(self, client: bytes, item: Item) -> bool:
        """Takes an item of a client out. Returns whether it waited."""
        with self._changed:
            return self._turns.discard(item, client)

    def end(self) -> None:
        """Has every ``take`` return None, whatever waits."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def take(self) -> Item | None:
        """Waits for an item, and returns that whose turn it is; None after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._turns or self._over)
            return None if self._over else self._turns.take()
