"""Names events of a replayable answer, for the client that asks again for what it lacks, and says what a node replays.

A client that sends an idempotency key gets an ``id`` with every event of a stream:

    id: 5f0c…e1.9a3b.17       key of the answer, tag of the node's log, number of events up to this one

Its browser or library sends the last one as ``Last-Event-ID`` when it asks again, at whichever proxy. The key finds the
node, which has the answer, and the node sends the events behind that one. Two nodes that go on with one answer may
put other tokens into their events, so an id also has the tag of the log that it counts in.

The node's response to a proxy that asks again has one more header, ``REPLAY_HEADER``: the answer's identity, by which
another node can go on with it, and the size of the journal of the events that are left out. The body begins with that.
"""

from __future__ import annotations

import re
from hashlib import blake2b

import msgspec

from pdserve.wire.terms import KEY_BYTES, AnswerIdentity, EventPlace

REPLAY_HEADER = "x-pdserve-replay"

_EVENT_ID = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{4})\.(0|[1-9][0-9]{0,8})")
_REPLAY = re.compile(r"([0-9a-f]{32}) ([0-9]{1,15}) ([0-9]{1,12})")


class EventId(msgspec.Struct, frozen=True):
    """What ``Last-Event-ID`` says."""

    key: bytes
    place: EventPlace


def event_id_start(key: bytes, tag: str) -> bytes:
    """Returns the ids of a log's events without their numbers."""
    return f"{key.hex()}.{tag}.".encode()


def read_event_id(text: str) -> EventId | None:
    """Returns the id that a node has written; None if ``text`` is no such id."""
    found = _EVENT_ID.fullmatch(text)
    return None if found is None else EventId(bytes.fromhex(found[1]), EventPlace(found[2], int(found[3])))


def digest(*parts: bytes) -> bytes:
    """Returns a hash of ``parts`` that stands for them in tickets."""
    running = blake2b(b",".join(b"%d" % len(part) for part in parts) + b":", digest_size=KEY_BYTES)
    for part in parts:
        running.update(part)
    return running.digest()


class Replay(msgspec.Struct, frozen=True):
    """What a node says of an answer that it replays."""

    answer: AnswerIdentity
    journal_bytes: int
    """The body begins with so many bytes: the entries of the events that it leaves out."""

    def header(self) -> str:
        """Returns the value of ``REPLAY_HEADER``."""
        return f"{self.answer.id.hex()} {self.answer.created} {self.journal_bytes}"


def read_replay(header: str | None) -> Replay | None:
    """Returns what a node says in ``REPLAY_HEADER``; None if it says nothing that can be read."""
    found = None if header is None else _REPLAY.fullmatch(header)
    if found is None:
        return None
    return Replay(AnswerIdentity(bytes.fromhex(found[1]), int(found[2])), int(found[3]))
