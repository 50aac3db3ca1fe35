"""Events on their way from the transfer thread to the engine's thread."""

from __future__ import annotations

import threading
from collections import deque

from pdserve.wire.ids import TransferId
from pdserve_kvtransfer.events import (
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    TransferEvent,
)


class Outbox:
    """Thread-safe. Makes a cancel final in the engine's eyes at once, whatever is already on its way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[TransferEvent] = deque()
        self._news = False
        self._open: set[TransferId] = set()
        self._cancelled: set[TransferId] = set()

    def opened(self, transfer_id: TransferId) -> None:
        """A fetch was ordered. Raises ValueError if it is alive already."""
        with self._lock:
            if transfer_id in self._open:
                raise ValueError(f"transfer {transfer_id} is being fetched already")
            self._open.add(transfer_id)

    def cancel(self, transfer_id: TransferId) -> bool:
        """From now on its end is ``FetchCancelled``. False if the engine has seen its end already."""
        with self._lock:
            if transfer_id not in self._open:
                return False
            self._cancelled.add(transfer_id)
            return True

    def put(self, event: TransferEvent) -> None:
        with self._lock:
            self._events.append(event)
            self._news = True

    def take_news(self) -> bool:
        """Whether anything was put since the last call."""
        with self._lock:
            news, self._news = self._news, False
            return news

    def drain(self) -> list[TransferEvent]:
        """All events so far, oldest first."""
        with self._lock:
            events = [seen for event in self._events if (seen := self._as_seen(event)) is not None]
            self._events.clear()
            return events

    def _as_seen(self, event: TransferEvent) -> TransferEvent | None:
        if isinstance(event, FirstTokenArrived):
            return None if event.transfer_id in self._cancelled else event
        if not isinstance(event, FetchLanded | FetchFailed | FetchCancelled):
            return event
        transfer_id = event.transfer_id
        self._open.discard(transfer_id)
        if transfer_id not in self._cancelled:
            return event
        self._cancelled.discard(transfer_id)
        return FetchCancelled(transfer_id, () if isinstance(event, FetchLanded) else event.quarantined)
