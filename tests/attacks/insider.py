"""Frames and tickets of a sender that has the cluster's secret, or almost has it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdserve.control.frame import Purpose, Sealer
from pdserve.control.journal import digest
from pdserve.wire.ids import new_id
from pdserve.wire.terms import AnswerIdentity, PrefillTarget, Resume, Ticket
from tests.processes import SECRET as CLUSTER_SECRET
from tests.terms import made_ticket

SECRET = CLUSTER_SECRET.encode()
FOREIGN = b"the secret of another cluster"
ANSWER = AnswerIdentity(bytes(16), 1_700_000_000)


def sealed(
    message: msgspec.Struct,
    purpose: Purpose,
    *,
    receiver: bytes | None = None,
    secret: bytes = SECRET,
    late_s: float = 0.0,
    sender: bytes = b"",
) -> bytes:
    """Returns a frame of a new sender, signed ``late_s`` seconds ago."""
    return Sealer(secret, purpose, sender or new_id(), clock=lambda: time.time() - late_s).seal(message, receiver)


def changed(frame: bytes, part: int, change: Callable[[object], object]) -> bytes:
    """Replaces one part of a frame (version, sender, counter, sent_ms, body, mac) and keeps the old signature."""
    parts = msgspec.msgpack.decode(frame)
    parts[part] = change(parts[part])
    return msgspec.msgpack.encode(parts)


def flipped(data: object) -> bytes:
    """Returns the bytes with their last bit inverted."""
    assert isinstance(data, bytes)
    return data[:-1] + bytes((data[-1] ^ 1,))


def header(frame: bytes) -> str:
    """Returns a frame in the form of a ticket's header."""
    return base64.urlsafe_b64encode(frame).rstrip(b"=").decode()


@dataclass(frozen=True)
class Office:
    """Makes tickets for a node. They are valid unless the test says otherwise."""

    node: bytes

    def ticket(
        self,
        *prefill: PrefillTarget,
        deadline_s: float = 60.0,
        node: bytes = b"",
        answer: AnswerIdentity | None = None,
        resume: Resume | None = None,
    ) -> Ticket:
        return made_ticket(
            node or self.node,
            request_id="attack",
            deadline_s=deadline_s,
            prefill=tuple(prefill),
            answer=answer,
            resume=resume,
        )

    def resuming(self, journal: bytes) -> str:
        """Returns a header that announces ``journal``."""
        resume = Resume(len(journal), digest(journal))
        return header(sealed(self.ticket(answer=ANSWER, resume=resume), Purpose.TICKET))

    def frame(self, *prefill: PrefillTarget, late_s: float = 0.0, deadline_s: float = 60.0) -> bytes:
        return sealed(self.ticket(*prefill, deadline_s=deadline_s), Purpose.TICKET, late_s=late_s)
