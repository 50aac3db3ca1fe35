"""The orders for fetches, the events that a transfer thread gives to its engine, their queue, and its counters."""

from __future__ import annotations

import enum
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from pdserve.control.frame import ClockSkew
from pdserve.wire.discovery import TransportKind
from pdserve.wire.engine_counts import TransferCounts
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken, SamplingParams
from pdserve.wire.terms import NO_PROMPT_TERMS, PrefillTarget, PromptTerms
from pdserve.wire.transfer import UNKNOWN_LOAD, FailureCause, PrefillLoad


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """An order to have ``target`` compute a prompt and put its KV blocks from ``first_block`` on in ``block_ids``."""

    transfer_id: TransferId
    target: PrefillTarget
    token_ids: list[int]
    first_block: int
    block_ids: tuple[int, ...]
    """The local destinations: entry i takes block ``first_block + i`` of the prompt. For a model with cache groups they
    are those of ``moved_blocks``."""
    sampling: SamplingParams
    deadline_s: float
    """The fetch fails after this many seconds from now."""
    child_seeds: tuple[int, ...] = ()
    terms: PromptTerms = NO_PROMPT_TERMS
    paced_blocks: int = 0
    """The number of wanted blocks of a paced fetch; 0 if the fetch is not paced.

    ``block_ids`` of a paced fetch has none or a few of the destinations, and ``accept_blocks`` brings the others.
    """

    @property
    def request_id(self) -> str:
        return self.terms.request_id

    @property
    def num_blocks(self) -> int:
        """The number of wanted blocks."""
        return self.paced_blocks or len(self.block_ids)


@dataclass(frozen=True, slots=True)
class CachedFetchOrder:
    """An order to fetch the blocks with these hashes from ``target``, as far as it has them from the first one on."""

    transfer_id: TransferId
    target: PrefillTarget
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    """The local destinations: entry i takes the block of ``hashes[i]``. For a model with cache groups they are those of
    ``moved_blocks`` for a context of so many blocks."""
    deadline_s: float
    """The fetch fails after this many seconds from now."""
    request_id: str = ""
    """The request's ``x-request-id``, for log lines; empty if it is not known."""
    paced_blocks: int = 0
    """As in ``FetchOrder``."""

    @property
    def first_block(self) -> int:
        return 0

    @property
    def num_blocks(self) -> int:
        """The number of wanted blocks."""
        return self.paced_blocks or len(self.block_ids)


class FailureKind(enum.Enum):
    """Why a transfer failed, as metrics count it."""

    MISFIT = "misfit"
    """The handshake was refused because the two engines differ."""
    PEER_LOST = "peer_lost"
    """The other engine died, restarted, or broke the protocol."""
    LEASE_EXPIRED = "lease_expired"
    """The other engine fell silent."""
    REFUSED = "refused"
    """This prompt cannot be transferred; others can."""
    OVERLOADED = "overloaded"
    """An engine, this one or the other, has too much to do already."""
    FAILED = "failed"
    """The prefill engine gave the transfer up."""
    CORRUPT = "corrupt"
    """What landed or was announced differs from what was sent or asked for."""
    STALLED = "stalled"
    """All blocks were sent, but some did not arrive, and nothing arrives any more."""
    DEADLINE = "deadline"
    """The transfer did not end before its deadline."""
    CLOSED = "closed"
    """This engine is shutting down."""


KIND_OF_CAUSE = {
    FailureCause.NODE: FailureKind.FAILED,
    FailureCause.PROMPT: FailureKind.REFUSED,
    FailureCause.LOAD: FailureKind.OVERLOADED,
    FailureCause.DEADLINE: FailureKind.DEADLINE,
}
"""The kind of failure that both engines count for each cause that a prefill engine names."""


class PushOutcome(enum.Enum):
    """How a push ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """This side gave the push up: the engine did, the deadline passed, or the engine shut down."""
    PEER_LOST = "peer_lost"
    LEASE_EXPIRED = "lease_expired"


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    """The prefill engine has computed the prompt and sent its first token."""

    transfer_id: TransferId
    tokens: tuple[SampledToken, ...]
    """The request's first token, then one for each child."""
    cached_tokens: int
    """How many of the prompt's tokens the prefill engine's own prefix cache held."""
    load: PrefillLoad = UNKNOWN_LOAD
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PrefillNodeMet:
    """A handshake was made, and the prefill engine has said how long its prompts may be."""

    boot_id: bytes
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PeersMet:
    """All engines of the ``meet`` with this number are peers now but those that cannot be."""

    number: int


@dataclass(frozen=True, slots=True)
class LoadHeard:
    """A prefill engine has told its load while fetches from it were under way."""

    boot_id: bytes
    load: PrefillLoad


@dataclass(frozen=True, slots=True)
class BlocksComing:
    """The first ``count`` blocks of a paced fetch can be sent, and wait for destinations."""

    transfer_id: TransferId
    count: int


@dataclass(frozen=True, slots=True)
class BlocksLanded:
    """The first ``count`` blocks of a paced fetch are complete."""

    transfer_id: TransferId
    count: int


@dataclass(frozen=True, slots=True)
class FetchLanded:
    """The fetch is complete: the blocks are in their places, and a prompt's first token is known. This ends it."""

    transfer_id: TransferId
    seconds: float
    """The time from the order to this event."""
    bytes: int
    tail_s: float = 0.0
    """The time from the first token to the last block."""
    tail_bytes: int = 0
    """The bytes that landed in that time."""
    landed: int = 0
    """How many wanted blocks from the first on landed: all that a ``FetchOrder`` wants. Of a ``CachedFetchOrder`` it
    is the number that the other engine had of them, which may be 0. For a model with cache groups it is all or 0."""
    usable: int = 0
    """How many of a ``CachedFetchOrder``'s hashes may be asked for with more success, if nothing landed."""

    @property
    def quarantined(self) -> tuple[int, ...]:
        """No block may still be written to."""
        return ()


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The fetch has failed. This ends it."""

    transfer_id: TransferId
    reason: str
    landed: int
    """This many blocks from the first on are complete and may be used."""
    quarantined: tuple[int, ...]
    """The local blocks that may still be written to, until ``BlocksReleased`` names them."""
    kind: FailureKind = FailureKind.PEER_LOST
    asked: bool = False
    """Whether the other engine was asked and had not given its first token: it may have computed the prompt."""


@dataclass(frozen=True, slots=True)
class FetchCancelled:
    """The answer to ``cancel_fetch``. This ends the fetch."""

    transfer_id: TransferId
    quarantined: tuple[int, ...]

    @property
    def landed(self) -> int:
        """No block may be used."""
        return 0


@dataclass(frozen=True, slots=True)
class BlocksReleased:
    """These quarantined blocks are no longer written to."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PushWanted:
    """A decode engine asks for this prompt's KV cache from ``first_block`` on."""

    transfer_id: TransferId
    token_ids: list[int]
    first_block: int
    sampling: SamplingParams
    deadline_s: float
    child_seeds: tuple[int, ...] = ()
    terms: PromptTerms = NO_PROMPT_TERMS

    @property
    def request_id(self) -> str:
        return self.terms.request_id


@dataclass(frozen=True, slots=True)
class CachedWanted:
    """Another engine asks for the blocks with these hashes, as far as the prefix cache has them from the first one on.

    The engine answers with ``push`` of those blocks, where the block of ``hashes[i]`` has the number i, and then
    ``held``; or with ``fail_push``. For a model with cache groups it pushes ``moved_blocks`` of a context of so many
    blocks, or nothing.
    """

    transfer_id: TransferId
    hashes: tuple[bytes, ...]
    deadline_s: float
    request_id: str = ""
    """The request's ``x-request-id``, for log lines; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class BlocksOffered:
    """Another engine has the blocks with these hashes now, and can be asked for them. It is no part of any transfer."""

    holder: PrefillTarget
    hashes: tuple[bytes, ...]
    """The hashes of a text's blocks, from its first block on."""
    request_id: str = ""
    """The ``x-request-id`` of the request whose text this is, for log lines; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class PushCancelled:
    """The prompt or the blocks are not wanted any more. An engine stops computing the prompt, and its blocks stay held
    until ``PushEnded``."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class BlocksSent:
    """These blocks are not read any more, although their push goes on. Only a thread with ``reports_sent`` says so."""

    transfer_id: TransferId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PushEnded:
    """No block of this push is read any more. Each ``PushWanted`` or ``CachedWanted`` is followed by one such event."""

    transfer_id: TransferId
    outcome: PushOutcome


@dataclass(frozen=True, slots=True)
class TransferThreadDied:
    """A bug ended the transfer thread; this engine can transfer nothing any more."""

    message: str


FetchEnd: TypeAlias = FetchLanded | FetchFailed | FetchCancelled
"""What ends a fetch. Each says which blocks have landed, and which are quarantined."""
FetchEvent: TypeAlias = (
    PrefillNodeMet | FirstTokenArrived | LoadHeard | BlocksComing | BlocksLanded | FetchEnd | BlocksReleased | PeersMet
)
PushEvent: TypeAlias = PushWanted | CachedWanted | PushCancelled | BlocksSent | PushEnded | BlocksOffered
TransferEvent: TypeAlias = FetchEvent | PushEvent | TransferThreadDied


class EventQueue:
    """The events that the engine has not seen yet. Every method is thread-safe.

    A cancelled fetch ends with ``FetchCancelled`` for the engine, even if another end of it is in the queue already.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[TransferEvent] = deque()
        self._news = False
        self._open: set[TransferId] = set()
        self._cancelled: set[TransferId] = set()

    def open(self, transfer_id: TransferId) -> None:
        """Notes that a fetch was ordered. Raises ValueError if it is alive already."""
        with self._lock:
            if transfer_id in self._open:
                raise ValueError(f"transfer {transfer_id} is being fetched already")
            self._open.add(transfer_id)

    def cancel(self, transfer_id: TransferId) -> bool:
        """Makes the fetch end with ``FetchCancelled``. Returns False if the engine has seen its end already."""
        with self._lock:
            if transfer_id not in self._open:
                return False
            self._cancelled.add(transfer_id)
            return True

    def put(self, event: TransferEvent) -> None:
        """Adds an event."""
        with self._lock:
            self._events.append(event)
            self._news = True

    def take_news(self) -> bool:
        """Returns whether an event was put since the last call."""
        with self._lock:
            news, self._news = self._news, False
            return news

    def drain(self) -> list[TransferEvent]:
        """Takes all events so far and returns them, oldest first."""
        with self._lock:
            events = [seen for event in self._events if (seen := self._as_seen(event)) is not None]
            self._events.clear()
            return events

    def _as_seen(self, event: TransferEvent) -> TransferEvent | None:
        if isinstance(event, FirstTokenArrived):
            return None if event.transfer_id in self._cancelled else event
        if not isinstance(event, FetchEnd):
            return event
        transfer_id = event.transfer_id
        self._open.discard(transfer_id)
        if transfer_id not in self._cancelled:
            return event
        self._cancelled.discard(transfer_id)
        return FetchCancelled(transfer_id, event.quarantined)


class TransferStats(TransferCounts, kw_only=True):
    """Totals since the start, except ``quarantined_blocks``, ``clocks`` and ``links``, which are of the present.

    The transfer thread alone changes them.
    """

    failures: Counter[FailureKind] = msgspec.field(default_factory=Counter)
    clocks: ClockSkew = msgspec.field(default_factory=ClockSkew)
    """How far the clocks of other engines are from this one's."""
    quarantined_blocks: int = 0
    links: Counter[TransportKind] = msgspec.field(default_factory=Counter)
    """The links that have moved blocks and are open, each rank's by itself."""

    def snapshot(self) -> TransferStats:
        """Returns a copy that stays as it is. Another thread may call it."""
        return msgspec.structs.replace(self, failures=self.failures.copy(), links=self.links.copy())

    @property
    def failures_by_name(self) -> dict[str, int]:
        """The number of failures of each kind, those that never happened too."""
        return {kind.value: self.failures[kind] for kind in FailureKind}
