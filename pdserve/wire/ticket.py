"""Proxy → decode or mixed node, in the HTTP header ``x-pdserve-ticket``: which prefill node to use, and until when.

The header is the sealed frame (purpose ``TICKET``) in unpadded base64url. A node that belongs to a proxy serves no
request without one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.wire.ids import BootId

TICKET_HEADER = "x-pdserve-ticket"


class PrefillTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefill engine that fits the decode node."""

    name: Annotated[str, msgspec.Meta(max_length=512)]
    control: Annotated[str, msgspec.Meta(max_length=512)]
    boot_id: BootId


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One attempt at one client request."""

    request_id: Annotated[str, msgspec.Meta(max_length=128)]
    """What the client sees as ``x-request-id``; a label for logs, never a key."""
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1_000)]
    node: BootId
    """The node that it is for."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0)]
    """Seconds that the whole request may take from now."""
    prefill: tuple[PrefillTarget, ...] = ()
    """In the order to be tried; empty means that the node prefills by itself."""
