"""Proxy → decode or mixed node, in the HTTP header ``x-pdserve-ticket``: names prefill nodes and a deadline.

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
from pdserve.wire.terms import KEY_BYTES, MAX_DEADLINE_S, AnswerIdentity, Keep, PrefillTarget, Resume, Storing
from pdserve.wire.trace_context import TraceContext

TICKET_HEADER = "x-pdserve-ticket"
MAX_PREPARED_BYTES = 2**20
"""The most bytes of the answer to a ticket that only prepares."""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A ticket for one attempt at one client request. It says what to do, so a node refuses fields it does not know."""

    request_id: Annotated[str, msgspec.Meta(max_length=128)]
    """The label that the client sees as ``x-request-id``. It is for logs, and never a key."""
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1_000)]
    node: BootId
    """The node that the ticket is for."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)]
    """The seconds that the whole request may take after the proxy has signed. The ticket is valid for as long."""
    prefill: tuple[PrefillTarget, ...] = ()
    """The prefill nodes, in the order to be tried; empty means that the node prefills by itself."""
    answer: AnswerIdentity | None = None
    """The answer's identity. With one, the node writes a journal (``pdserve.wire.journal``) into a streamed answer."""
    resume: Resume | None = None
    """The answer goes on after the tokens of this journal. Needs ``answer``."""
    storing: Storing | None = None
    """What the proxy stores of responses; None if it stores none."""
    holders: tuple[PrefillTarget, ...] = ()
    """Engines that may hold blocks of the request's KV cache, its answer's included, in the order to be tried."""
    client: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    """Stands for the client: what the node does for one client takes turns with what it does for others."""
    trace: TraceContext | None = None
    """The span of this attempt; None if nobody exports it."""
    keep: Keep | None = None
    """Has the node keep the answer; None if its client will not ask again."""
    cache_owner: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)] = b""
    """Stands for the owner of the client's API key. Prompts find each other's cached blocks only under the same owner;
    empty where all share them. A client's own ``cache_salt`` keeps prompts of one owner apart."""
    gives_back: bool = False
    """Whether the node gives the request back when a prefill node is lost with it. Only the proxy knows how many nodes
    were lost with one request, which may be what they died of."""


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
