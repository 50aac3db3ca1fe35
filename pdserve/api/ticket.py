"""The proxy's ticket on a request: what makes a node that belongs to a proxy serve it."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable

from pdserve.errors import Unauthorized, WireError
from pdserve.wire.frame import Opener, Purpose, Secrets
from pdserve.wire.ticket import Ticket

MAX_TICKET_CHARS = 16_384


class TicketGate:
    """Checks tickets for one node. Each is good once, and until its request's deadline, however long it queued."""

    def __init__(self, secret: bytes | Secrets, boot_id: bytes, clock: Callable[[], float] = time.time) -> None:
        self._opener = Opener(
            secret, Purpose.TICKET, Ticket, ordered=False, lifetime_s=lambda t: t.deadline_s, clock=clock
        )
        self._boot_id = boot_id

    def admit(self, header: str | None) -> Ticket:
        """The ticket in a request's header. Raises Unauthorized with what is wrong about it."""
        if header is None:
            raise Unauthorized(
                "this node takes requests from its proxy only: clients talk to the proxy", code="no_ticket"
            )
        try:
            ticket = self._opener.open(_frame(header))
        except WireError as exc:
            raise Unauthorized(f"the proxy's ticket is not acceptable: {exc}", code="bad_ticket") from exc
        if ticket.node != self._boot_id:
            raise Unauthorized("the proxy's ticket is for another start of this node", code="wrong_node")
        return ticket


def _frame(header: str) -> bytes:
    if len(header) > MAX_TICKET_CHARS:
        raise Unauthorized("the proxy's ticket is too long", code="bad_ticket")
    try:
        return base64.b64decode(header.encode("ascii") + b"=" * (-len(header) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as exc:
        raise Unauthorized("the proxy's ticket is not base64url", code="bad_ticket") from exc
