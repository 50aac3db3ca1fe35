"""Keeps the journal of every stream, from which another node can resume it: its request and its entries.

The node begins each event with an entry (``pdserve.wire.journal``). ``JournaledEvents`` cuts the entries off, so that
no client sees one, and adds them to the stream's ``RelayJournal``. All journals of a process share the budget of its
``JournalBudget``. A journal that does not fit, or could not be complete, is dropped: its stream goes on, and cannot be
resumed.
"""

from __future__ import annotations

import enum

from pdserve.wire.journal import DONE_ENTRY, MAX_JOURNAL_BYTES, cut
from pdserve_proxy.relay.dispatch import NodeRequest
from pdserve_proxy.relay.whole_events import WholeEvents

GROWTH_BYTES = 1024
"""The budget that a journal takes at once: the entries of some hundred events."""

_DONE = DONE_ENTRY[1:]


class DropReason(enum.StrEnum):
    """Why a journal was dropped before its stream was over."""

    BUDGET = "budget"
    """There was no memory left for it."""
    EVENT = "event"
    """An event was too large to be held back until its end."""


class JournalBudget:
    """The memory that the journals of one process may take."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
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

    __slots__ = ("_budget", "_done", "_entryless", "_taken", "entries", "request", "room")

    def __init__(self, budget: JournalBudget, request: NodeRequest) -> None:
        self._budget = budget
        self._taken = 0
        """The bytes of the budget that the journal has taken."""
        self.request: NodeRequest | None = request
        """The request as it went to the node; None after the journal has been dropped."""
        self.entries = bytearray()
        """The entries of the events that the client has. Whoever adds some calls ``grow`` if there is no room."""
        self.room = 0
        """The bytes of entries for which there is room; -1 after the journal has been dropped."""
        self._done = False
        """Whether the entry of the stream's end came after the journal had been dropped."""
        self._entryless = False
        """Whether an event without an entry has come."""

    @property
    def resumable(self) -> bool:
        """Whether the stream can be resumed: it has entries, which are all that there were."""
        return self.request is not None and bool(self.entries)

    @property
    def done(self) -> bool:
        """Whether the client has the end of the stream."""
        return self._done or self.entries == _DONE or self.entries.endswith(b"\n" + _DONE)

    @property
    def lacks_end(self) -> bool:
        """Whether a stream that ends now breaks off: its node writes a journal, and has not written the end."""
        return not self._entryless and not self.done and (bool(self.entries) or self.request is None)

    def grow(self) -> None:
        """Makes room for the entries that were added, or drops them."""
        if self.request is None:
            self._done = self.done
            self.entries.clear()
            return
        size = len(self.request.body.data) + len(self.request.body.prompt_start) + len(self.entries) + GROWTH_BYTES
        if len(self.entries) > MAX_JOURNAL_BYTES or not self._budget.take(size - self._taken):
            self.drop(DropReason.BUDGET)
            return
        self._taken = size
        self.room = len(self.entries) + GROWTH_BYTES

    def add(self, entries: bytes) -> None:
        self.entries += entries
        if len(self.entries) > self.room:
            self.grow()

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
        self.entries.clear()
        self.room = -1


class JournaledEvents(WholeEvents):
    """Passes a byte stream on in whole events, without their entries, which go to a journal.

    An event without an entry is one with which the node ends its stream itself, like an error event, or it comes from a
    node that writes no journal. Such a stream is not resumed.
    """

    def __init__(self, journal: RelayJournal) -> None:
        super().__init__()
        self._journal = journal

    def feed(self, piece: bytes) -> bytes:
        # This is one event with its entry, as nearly every piece is: every token of every client passes here.
        if not self._tail and piece.startswith(b":") and piece.endswith(b"\n\n"):
            start = piece.find(b"\n") + 1
            if piece.find(b"\n", start) == len(piece) - 2:
                journal = self._journal
                journal.entries += piece[1:start]
                if len(journal.entries) > journal.room:
                    journal.grow()
                return piece[start:]
        # Of an event that is not held back any more, the client has the beginning, and ``_tail`` ends that.
        before = b"-" + self._tail if self._inside else b""
        return self._cut(before, super().feed(piece))

    def rest(self) -> bytes:
        before = b"-" + self._tail if self._inside else b""
        return self._cut(before, super().rest())

    def _cut(self, before: bytes, events: bytes) -> bytes:
        """Returns ``events``, which follow ``before``, without entries."""
        if not events:
            return b""
        parts = None if self._inside or before else _entries_and_lines(events)
        if parts is not None:
            entries, shown = parts
            self._journal.add(entries)
            return shown
        shown, entries = cut(before + events)
        if self._inside or before:
            self._journal.drop(DropReason.EVENT)
        elif shown.count(b"\n\n") != entries.count(b"\n"):
            self._journal.add_entryless()
        self._journal.add(entries)
        return shown[len(before) :]


def _entries_and_lines(events: bytes) -> tuple[bytes, bytes] | None:
    """Returns what ``cut`` does, the entries first, in less time, if each event is an entry and one line of data."""
    lines = events.split(b"\n")
    if len(lines) % 3 != 1 or any(lines[2::3]):
        return None
    entries = b"\n" + b"\n".join(lines[0::3])
    if entries.count(b"\n:") != len(lines) // 3:
        return None
    return entries.replace(b"\n:", b"\n")[1:], b"\n\n".join(lines[1::3]) + b"\n\n"
