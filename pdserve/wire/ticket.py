"""Proxy → decode or mixed node, in the HTTP header ``x-pdserve-ticket``: which prefill node to use, and until when.

The header is the sealed frame (purpose ``TICKET``) in unpadded base64url. A node that belongs to a proxy serves no
request without one.

A ticket is good once, and from when the proxy signed it until its request's deadline (give or take what the hosts'
clocks may differ by). A request to a node that is given thousands at once may wait for minutes until its ticket is
looked at: for a connection, in the node's sockets, or for a turn of its event loop. That wait is no replay. When the
deadline has passed the proxy has given the request up, so refusing it then costs nobody an answer.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.wire.ids import BootId

TICKET_HEADER = "x-pdserve-ticket"
MAX_DEADLINE_S = 86_400.0
"""What ``--request-timeout-s`` allows at most."""


class PrefillTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefill engine that fits the decode node."""

    name: Annotated[str, msgspec.Meta(max_length=512)]
    control: Annotated[str, msgspec.Meta(max_length=512)]
    boot_id: BootId


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One attempt at one client request. It says what to do, so a field that the node does not know is refused."""

    request_id: Annotated[str, msgspec.Meta(max_length=128)]
    """What the client sees as ``x-request-id``; a label for logs, never a key."""
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1_000)]
    node: BootId
    """The node that it is for."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)]
    """Seconds that the whole request may take from when this was signed. The ticket is good for as long."""
    prefill: tuple[PrefillTarget, ...] = ()
    """In the order to be tried; empty means that the node prefills by itself."""
