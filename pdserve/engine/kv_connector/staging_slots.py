"""Blocks of host memory that KV blocks pass through, and who may have how many of them."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from pdserve.wire.ids import TransferId


class StagingSlots:
    """A transfer gets all of its slots at once, in the order of asking: two that hold half each can never wait for
    each other, and a long prompt is not overtaken for ever.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))
        self._queue: OrderedDict[TransferId, int] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def misfit(self, count: int) -> str | None:
        """Why so many can never be had, if so."""
        if count <= self.total:
            return None
        return f"{count} blocks do not fit the {self.total} of host memory that they pass through (--kv-staging-mib)"

    def ask(self, transfer: TransferId, count: int) -> None:
        """``granted`` will give them, if they fit."""
        self._queue[transfer] = count

    def withdraw(self, transfer: TransferId) -> bool:
        """False if it is not waiting any more."""
        return self._queue.pop(transfer, None) is not None

    def granted(self) -> Iterator[tuple[TransferId, tuple[int, ...]]]:
        """Those whose turn it is, with their slots; lowest first, so that most are neighbours and move in one copy."""
        while self._queue:
            transfer, count = next(iter(self._queue.items()))
            if count > len(self._free):
                return
            del self._queue[transfer]
            yield transfer, tuple(heapq.heappop(self._free) for _ in range(count))

    def give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)
