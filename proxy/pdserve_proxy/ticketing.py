"""Tickets: what the proxy tells a decode node about one attempt, signed, in an HTTP header."""

from __future__ import annotations

import base64

from pdserve.wire.frame import Purpose, Sealer, Secrets
from pdserve.wire.ticket import PrefillTarget, Ticket
from pdserve_proxy.routing import Route


class TicketOffice:
    """Signs the tickets of one proxy process."""

    def __init__(self, secret: bytes | Secrets, boot_id: bytes) -> None:
        self._sealer = Sealer(secret, Purpose.TICKET, boot_id)

    def issue(self, route: Route, *, request_id: str, attempt: int, deadline_s: float) -> str:
        """The header's value. ``deadline_s`` counts from now."""
        ticket = Ticket(
            request_id=request_id,
            attempt=attempt,
            node=route.decode.boot_id,
            deadline_s=deadline_s,
            prefill=tuple([PrefillTarget(info.name, info.control, info.boot_id) for info in route.prefill]),
        )
        return base64.urlsafe_b64encode(self._sealer.seal(ticket)).rstrip(b"=").decode("ascii")
