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
from pdserve.wire.journal import DIGEST_BYTES, MAX_JOURNAL_BYTES
from pdserve.wire.trace_context import TraceContext

TICKET_HEADER = "x-pdserve-ticket"
MAX_HISTORY_BYTES = 2**30
KEY_BYTES = 16
MAX_DEADLINE_S = 86_400.0
"""The largest value of ``--request-timeout-s``."""


class PrefillTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefill engine that fits the decode node."""

    name: Annotated[str, msgspec.Meta(max_length=512)]
    control: Annotated[str, msgspec.Meta(max_length=512)]
    boot_id: BootId


class AnswerIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all attempts at one client request share, so that a resumed answer is the same answer."""

    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Random bytes. The answer's ``id`` is made of them, and the seeds of a request that names none."""
    created: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    """When the proxy got the request, in seconds since 1970: the answer's ``created``."""


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Announces the journal that follows the client's own body in the body of the request."""

    journal_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_JOURNAL_BYTES)]
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    """The journal's ``pdserve.wire.journal.digest``."""
    prepare: bool = False
    """Whether the node is only to fetch what holders have of the answer's KV cache: the node that answers goes on, and
    the real request follows. The node generates nothing."""


class Storing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says that the proxy stores responses (``/v1/responses``)."""

    kept: bool
    """Whether it keeps this one."""
    history_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_HISTORY_BYTES)] = 0
    """The size of the items before the request's own: a JSON list, which follows the client's own body."""


_Digest = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class EventPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place behind an event of a kept answer."""

    tag: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{4}\Z")]
    """Names the log in which events are counted: each node that goes on with an answer has one of its own."""
    events: Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
    """How many events come before the place."""


class Keep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Has the node keep the answer for a client that may ask again, or send it once more if the node has it."""

    key: _Digest
    """Names the answer among all answers of the cluster."""
    owner: _Digest
    """Stands for the owner of the client's API key. Nobody else gets the answer."""
    body: _Digest
    """Stands for the client's request. No other request gets the answer."""
    after: EventPlace | None = None
    """The last event that the client has; None if the client wants the whole answer."""


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
