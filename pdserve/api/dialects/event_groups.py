"""Writes the events of a dialect's stream, so that another node can go on behind any of them.

Every event has an entry of its own (``pdserve.wire.journal``). One delta may bring several events: they are a *group*.
The entry of the group's first event names all of its tokens, and the entries of the others name none:

    :0 314 8              a block ends
    :0                    the next one begins
    :0                    its first text
    :0 2290               more text
    …
    :done                 the last event

So a journal that ends within a group has all tokens of that group. The node that goes on makes the group once more, out
of the same tokens, and leaves out the events that the client has. No entry says that the choice is over, because the
events after the last text are a group too: the node that goes on learns from the tokens that they end the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.wire.journal import DONE_ENTRY, Journal, JournaledChoice, entry

_encoder = msgspec.json.Encoder()


class EventGroups:
    """Encodes the events of one stream. Each event is a struct whose tag is the event's name."""

    def __init__(self, journal: Journal, *, journaled: bool, numbered: bool) -> None:
        """``journal`` is what the client has from other nodes. Where events are ``numbered``, each says its place."""
        choice = journal.choices.get(0, JournaledChoice())
        self._repeated = len(choice.last_group)
        """How many tokens of the next group have an entry."""
        self._skip = choice.empty_since + bool(choice.groups)
        """How many events of the next groups the client has."""
        self._journaled = journaled
        self._numbered = numbered
        self._unwritten: Sequence[int] = ()
        """The tokens that no entry has yet, because no event shows them."""
        self.number = journal.events
        """The number of events that the client has."""

    def write(self, token_ids: Sequence[int], events: Sequence[msgspec.Struct], *, last: bool = False) -> bytes:
        """Returns the events of ``token_ids`` that the client lacks. The ``last`` group ends the stream."""
        lacking = events[self._skip :]
        self._skip -= len(events) - len(lacking)
        token_ids, self._repeated = token_ids[self._repeated :], 0
        token_ids = [*self._unwritten, *token_ids] if self._unwritten else token_ids
        self._unwritten = () if lacking else token_ids
        parts = []
        for place, event in enumerate(lacking, 1):
            if self._journaled:
                parts.append(DONE_ENTRY if last and place == len(lacking) else entry(0, token_ids))
                token_ids = ()
            parts.append(self._encode(event))
        return b"".join(parts)

    def write_unjournaled(self, events: Sequence[msgspec.Struct]) -> bytes:
        """Returns events behind which no node goes on."""
        return b"".join(map(self._encode, events))

    def _encode(self, event: msgspec.Struct) -> bytes:
        data = _encoder.encode(event)
        if self._numbered:
            data = b'%b,"sequence_number":%d}' % (data[:-1], self.number)
        self.number += 1
        return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), data)
