"""What a client's request carries besides its tokens: one value, from the proxy to the engine.

The proxy begins it and signs it in a ticket. The node that answers adds what the body says, and gives it to its engine.
The engine gives the part that concerns the prompt, ``PromptTerms``, to a prefill node. Each process takes in the values
that it is given here, and passes them on as one. A new one is a field here, and a reader.

A ticket goes from the proxy to a decode or mixed node, in the HTTP header ``x-pdserve-ticket``. It is a sealed frame
(purpose ``TICKET``) in unpadded base64url. A node that belongs to a proxy serves no request without one.

A ticket is valid once, from the proxy's signature until its request's deadline (give or take the difference between the
hosts' clocks). If a node gets thousands of requests at once, a request may wait for minutes before the node opens its
ticket: for a connection, in the node's sockets, or for a turn of its event loop. Such a wait is no replay. After the
deadline the proxy has given the request up, so a refusal takes no answer from any client.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.control.journal import DIGEST_BYTES, MAX_JOURNAL_BYTES
from pdserve.wire.ids import BootId, RequestId
from pdserve.wire.timeline import TraceContext

MAX_HISTORY_BYTES = 2**30
KEY_BYTES = 16
MAX_CLIENT_BYTES = 32
MAX_DEADLINE_S = 86_400.0
"""The largest value of ``--request-timeout-s``."""

MAX_PRIORITY = 100
PRIORITY_S = 5.0
"""A request goes before those that came so much earlier, for each number by which its priority is lower."""

Priority: TypeAlias = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""Requests with a lower number get their places first."""


def turn_at(arrived: float, priority: int) -> float:
    """Returns the time by which waiting requests take turns, in the proxy's queue and on nodes.

    A request that waits overtakes later ones of a higher priority in the end, so none waits for ever.
    """
    return arrived + priority * PRIORITY_S


MAX_TTFT_MS = 600_000
MAX_ITL_MS = 60_000

TtftMs: TypeAlias = Annotated[float, Meta(ge=1, le=MAX_TTFT_MS)]
"""The first token should come so many milliseconds after the request, at most."""
ItlMs: TypeAlias = Annotated[float, Meta(ge=1, le=MAX_ITL_MS)]
"""Each later token should come so many milliseconds after the one before it, at most."""


class RequestTargets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The latencies that a client asks for, in place of those that the node aims at. None leaves one to the node."""

    ttft_ms: TtftMs | None = None
    itl_ms: ItlMs | None = None


NO_OWN_TARGETS = RequestTargets()


class PrefillTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefill engine that fits the decode node."""

    name: Annotated[str, Meta(max_length=512)]
    control: Annotated[str, Meta(max_length=512)]
    boot_id: BootId


class AnswerIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all attempts at one client request share, so that a resumed answer is the same answer."""

    id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Random bytes. The answer's ``id`` is made of them, and the seeds of a request that names none."""
    created: Annotated[int, Meta(ge=0, lt=2**53)]
    """When the proxy got the request, in seconds since 1970: the answer's ``created``."""


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Announces the journal that follows the client's own body in the body of the request."""

    journal_bytes: Annotated[int, Meta(ge=0, le=MAX_JOURNAL_BYTES)]
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    """The journal's ``pdserve.control.journal.digest``."""
    prepare: bool = False
    """Whether the node is only to fetch what holders have of the answer's KV cache: the node that answers goes on, and
    the real request follows. The node generates nothing."""


class Storing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says that the proxy stores responses (``/v1/responses``)."""

    stored: bool
    """Whether it stores this one."""
    history_bytes: Annotated[int, Meta(ge=0, le=MAX_HISTORY_BYTES)] = 0
    """The size of the items before the request's own: a JSON list, which follows the client's own body."""


_Digest = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class EventPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place behind an event of a replayable answer."""

    tag: Annotated[str, Meta(pattern=r"\A[0-9a-f]{4}\Z")]
    """Names the log in which events are counted: each node that goes on with an answer has one of its own."""
    events: Annotated[int, Meta(ge=0, lt=2**40)]
    """How many events come before the place."""


class Keep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Has the node store the answer for a client that may ask again, or send it once more if the node has it."""

    key: _Digest
    """Names the answer among all answers of the cluster."""
    owner: _Digest
    """Stands for the owner of the client's API key. Nobody else gets the answer."""
    body: _Digest
    """Stands for the client's request. No other request gets the answer."""
    after: EventPlace | None = None
    """The last event that the client has; None if the client wants the complete answer."""


class PromptTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What an engine has to know of the request whose prompt it computes, at whichever node it is."""

    request_id: RequestId = ""
    """The label that the client sees as ``x-request-id``, for log lines. It is never a key."""
    priority: Priority = 0
    cache_salt: str = ""
    """Prompts share cached blocks only if their salts are equal."""
    trace: TraceContext | None = None
    """The span that the receiver's spans hang from: each process names its own. None if nobody exports it."""


NO_PROMPT_TERMS = PromptTerms()


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What a client's request carries besides its tokens.

    The node sets ``priority`` and ``cache_salt``, ``own_targets`` and ``movable`` by what the body says, whatever its
    ticket has there.
    """

    prompt: PromptTerms = NO_PROMPT_TERMS
    deadline_s: Annotated[float, Meta(gt=0, le=MAX_DEADLINE_S)]
    """The seconds that are left for the whole request when the sender says so. A ticket is valid for as long."""
    client: Annotated[bytes, Meta(max_length=MAX_CLIENT_BYTES)] = b""
    """Stands for the client: what a node does for one client takes turns with what it does for others."""
    cache_owner: Annotated[bytes, Meta(max_length=KEY_BYTES)] = b""
    """Stands for the owner of the client's API key. Prompts find each other's cached blocks only under the same owner;
    empty where all share them. The node makes the salt of it and of what the client asks for."""
    prefill: tuple[PrefillTarget, ...] = ()
    """The prefill nodes, in the order to be tried; empty means that the node prefills by itself."""
    holders: tuple[PrefillTarget, ...] = ()
    """Engines that may hold blocks of the request's KV cache, its answer's included, in the order to be tried."""
    own_targets: RequestTargets = NO_OWN_TARGETS
    """How soon the client wants the tokens."""
    gives_back: bool = False
    """Whether the request ends when a prefill node is lost with it, instead of going on at this node. Only the proxy
    knows how many nodes were lost with one request, which may be what they died of."""
    movable: bool = False
    """Whether another node can go on with the answers while this one still has them (``MoveWanted``)."""
    answer: AnswerIdentity | None = None
    """The answer's identity. With one, the node writes a journal (``control.journal``) into a streamed answer."""
    resume: Resume | None = None
    """The answer goes on after the tokens of this journal. Needs ``answer``."""
    storing: Storing | None = None
    """What the proxy stores of responses; None if it stores none."""
    keep: Keep | None = None
    """Has the node store the answer; None if its client will not ask again."""

    @property
    def fetch_only(self) -> bool:
        """Whether the engine only fetches into its prefix cache what holders have, and then ends the request."""
        return self.resume is not None and self.resume.prepare


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
