"""Proxy → decode or mixed node, in the HTTP header ``x-pdserve-ticket``: the terms of a request.

The header is the sealed frame (purpose ``TICKET``) in unpadded base64url. A node that belongs to a proxy serves no
request without one.

A ticket is valid once, from the proxy's signature until its request's deadline (give or take the difference between the
hosts' clocks). If a node gets thousands of requests at once, a request may wait for minutes before the node opens its
ticket: for a connection, in the node's sockets, or for a turn of its event loop. Such a wait is no replay. After the
deadline the proxy has given the request up, so a refusal takes no answer from any client.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pdserve.wire.ids import BootId
from pdserve.wire.terms import Terms

TICKET_HEADER = "x-pdserve-ticket"
MAX_PREPARED_BYTES = 2**20
"""The most bytes of the answer to a ticket that only prepares."""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A ticket for one attempt at one client request. It says what to do, so a node refuses fields it does not know."""

    attempt: Annotated[int, msgspec.Meta(ge=0, le=1_000)]
    node: BootId
    """The node that the ticket is for."""
    terms: Terms


class Prepared(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a ticket with ``Resume.prepare``, as JSON: the node can go on with an answer.

    It says how much of the answer it would have to replay.
    """

    prepared: bool
    block_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The tokens of a block; 0 if the node does not say."""
    lacking: dict[int, Annotated[int, msgspec.Meta(ge=0)]] = {}
    """The tokens, prompt included, whose blocks the node does not have: by choice, those that are over left out."""


def decode_prepared(data: bytes) -> Prepared:
    """Returns what the node says, or as much as nothing if that is something else: it has prepared all the same."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return Prepared(True)


_decoder = msgspec.json.Decoder(Prepared)
