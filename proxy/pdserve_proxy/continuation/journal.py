"""Keeps the journal of every answer, from which another node can resume it: its request and its entries.

The node begins each event of a stream with an entry (``pdserve.control.journal``). ``relay.event_stream`` cuts them
off, so that no client sees one, and adds them to the stream's ``RelayJournal``. All journals of a process share the
budget of its ``JournalBudget``. A journal that does not fit, or could not be complete, is dropped: its answer goes on,
and cannot be resumed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from pdserve.control.journal import DONE_ENTRY, MAX_JOURNAL_BYTES, Journal, parse
from pdserve_proxy.relay.dispatch import NodeRequest

LARGEST_SHARE = 32
"""One journal may take this part of the budget, so that a few requests with large bodies do not take it all."""
GROWTH_BYTES = 1024
"""The budget that a journal takes at once: the entries of some hundred events."""

_ANY = 2**63
"""Above every number in an entry: the node that goes on says whether the request has such a choice and token."""
_DONE = (DONE_ENTRY, DONE_ENTRY.rstrip())


class DropReason(enum.StrEnum):
    """Why a journal was dropped before its stream was over."""

    BUDGET = "budget"
    """There was no memory left for it."""
    EVENT = "event"
    """An event was too large to be held back until its end."""


class JournalBudget:
    """The memory that the journals of one process may take."""

    def __init__(self, limit_bytes: int, most_bytes: int) -> None:
        """``most_bytes`` is what one journal may take."""
        self._limit_bytes = limit_bytes
        self.most_bytes = most_bytes
        self.taken_bytes = 0
        self.dropped = dict.fromkeys(DropReason, 0)
        """The number of journals that were dropped."""

    def take(self, size: int) -> bool:
        """Takes ``size`` bytes of the budget, if it has so many left. Returns whether it had."""
        if self.taken_bytes + size > self._limit_bytes:
            return False
        self.taken_bytes += size
        return True

    def give_back(self, size: int) -> None:
        self.taken_bytes -= size


class RelayJournal:
    """The journal of one stream, which has to be freed in the end."""

    __slots__ = (
        "_budget",
        "_done",
        "_entryless",
        "_freed",
        "_taken",
        "capacity",
        "entries",
        "on_blocks_wanted",
        "request",
    )

    def __init__(self, budget: JournalBudget, request: NodeRequest) -> None:
        self._budget = budget
        self._taken = 0
        """The bytes of the budget that the journal has taken."""
        self.request: NodeRequest | None = request
        """The request as it went to the node; None after the journal has been dropped."""
        self.entries = bytearray()
        """The entries of the events that the client has, each with its colon, and with an end of line or without.

        Whoever adds some calls ``grow`` if they take more than ``capacity``.
        """
        self.capacity = 0
        """The bytes that the entries may take now; -1 after the journal has been dropped."""
        self._done = False
        """Whether the entry of the stream's end came after the journal had been dropped."""
        self._entryless = False
        """Whether an event without an entry has come."""
        self._freed = 0
        """The number of entries that the journal had, and has no more."""
        self.on_blocks_wanted: Callable[[int], None] | None = None
        """Called when the node wishes that another one goes on, with the tokens for which that should have blocks."""

    @property
    def resumable(self) -> bool:
        """Whether the stream can be resumed: it has entries, which are all that there were."""
        return self.request is not None and bool(self.entries)

    @property
    def done(self) -> bool:
        """Whether the client has the end of the stream."""
        return self._done or self.entries.endswith(_DONE)

    def lines(self) -> bytes:
        """Returns the entries as another node gets them: one a line, without their colons."""
        return _lines(self.entries)

    def read_from(self, start: int) -> Journal:
        """Returns what the entries say that came when there were ``start`` bytes of them. Raises JournalError."""
        later = self.entries[start:]
        return parse(_lines(later), _ANY, _ANY) if later else Journal()

    @property
    def count(self) -> int:
        """The number of entries that have come."""
        return self._freed + self.entries.count(b":")

    @property
    def lacks_end(self) -> bool:
        """Whether a stream that ends now breaks off: its node writes a journal, and has not written the end."""
        return not self._entryless and not self.done and (bool(self.entries) or self.request is None)

    def grow(self) -> None:
        """Takes more of the budget for the entries that were added, or drops them."""
        if self.request is None:
            self._done = self.done
            self._forget()
            return
        size = len(self.request.body.data) + len(self.request.body.prompt_start) + len(self.entries) + GROWTH_BYTES
        too_large = len(self.entries) > MAX_JOURNAL_BYTES or size > self._budget.most_bytes
        if too_large or not self._budget.take(size - self._taken):
            self.drop(DropReason.BUDGET)
            return
        self._taken = size
        self.capacity = len(self.entries) + GROWTH_BYTES

    def keep(self, entries: bytes) -> None:
        """Adds entries as they come from a node, the last one with its end of line or without."""
        self.entries += entries
        if len(self.entries) > self.capacity:
            self.grow()

    def add(self, entries: bytes) -> None:
        """Adds entries in the form that ``cut`` gives."""
        self.keep(b"".join([b":%b\n" % line for line in entries.splitlines()]))

    def want_blocks(self, tokens: int) -> None:
        """Passes a wish of the node on, if there is one: ``tokens`` is 0 otherwise."""
        if tokens and self.on_blocks_wanted is not None:
            self.on_blocks_wanted(tokens)

    def drop(self, reason: DropReason) -> None:
        """Frees the journal, whose stream goes on, and counts it at the first call."""
        if self.request is not None:
            self._budget.dropped[reason] += 1
        self._done = self.done
        self.free()

    def add_entryless(self) -> None:
        """Notes an event without an entry: what comes now is for the node to say, and the stream is not resumed."""
        self._entryless = True
        self.free()

    def free(self) -> None:
        """Gives all that the journal has taken back. Every call but the first does nothing."""
        self._budget.give_back(self._taken)
        self._taken = 0
        self.request = None
        self.on_blocks_wanted = None
        self._forget()
        self.capacity = -1

    def _forget(self) -> None:
        self._freed = self.count
        self.entries.clear()


def _lines(entries: bytearray) -> bytes:
    return bytes(entries).replace(b"\n", b"").replace(b":", b"\n")[1:] + b"\n"
