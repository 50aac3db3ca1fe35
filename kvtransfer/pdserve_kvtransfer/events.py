"""What an engine asks of the transfer thread, what it is told, and the queue on which events reach it."""

from __future__ import annotations

import enum
import threading
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import SampledToken, SamplingParams
from pdserve.wire.ticket import PrefillTarget
from pdserve.wire.transfer import UNKNOWN_LOAD, FailureCause, PrefillLoad


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Have ``target`` compute a prompt, and its KV blocks from ``first_block`` on put into ``block_ids``."""

    transfer_id: TransferId
    target: PrefillTarget
    token_ids: list[int]
    first_block: int
    block_ids: tuple[int, ...]
    """Local destinations: entry i takes block ``first_block + i`` of the prompt."""
    sampling: SamplingParams
    deadline_s: float
    """From now; the fetch fails when it has passed."""
    child_seeds: tuple[int, ...] = ()
    cache_salt: str = ""
    request_id: str = ""
    """The client's label, for log lines; empty if it is not known."""
    paced_blocks: int = 0
    """If not 0, so many blocks are wanted; ``block_ids`` has none or a few, and ``accept_blocks`` brings the others."""

    @property
    def num_blocks(self) -> int:
        return self.paced_blocks or len(self.block_ids)


class FailureKind(enum.Enum):
    """Why a transfer did not end well, as metrics count it."""

    MISFIT = "misfit"
    """The handshake was refused: the two engines differ."""
    PEER_LOST = "peer_lost"
    """The other engine died, restarted, or broke the protocol."""
    LEASE_EXPIRED = "lease_expired"
    """The other engine fell silent."""
    REFUSED = "refused"
    """This prompt cannot be transferred; others can."""
    OVERLOADED = "overloaded"
    """An engine, this one or the other, has too much to do already."""
    FAILED = "failed"
    """The prefill engine gave it up."""
    CORRUPT = "corrupt"
    """A block landed that is not the one that was sent."""
    STALLED = "stalled"
    """Everything was sent, but not everything came, and nothing comes any more."""
    DEADLINE = "deadline"
    CLOSED = "closed"
    """This engine is shutting down."""


KIND_OF_CAUSE = {
    FailureCause.NODE: FailureKind.FAILED,
    FailureCause.PROMPT: FailureKind.REFUSED,
    FailureCause.LOAD: FailureKind.OVERLOADED,
    FailureCause.DEADLINE: FailureKind.DEADLINE,
}
"""What the prefill engine says, as both engines count it."""


class PushOutcome(enum.Enum):
    """How a push ended."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """Given up by this side: by the engine, at the deadline, or at shutdown."""
    PEER_LOST = "peer_lost"
    LEASE_EXPIRED = "lease_expired"


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    transfer_id: TransferId
    tokens: tuple[SampledToken, ...]
    """The request's, then one for each child."""
    cached_tokens: int
    """Of the prompt, how many the prefill engine's own prefix cache held."""
    load: PrefillLoad = UNKNOWN_LOAD


@dataclass(frozen=True, slots=True)
class PrefillNodeMet:
    """A handshake was made, and the prefill engine has said what it can take."""

    boot_id: bytes
    max_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class LoadHeard:
    """What a prefill engine says of itself while fetches from it are under way."""

    boot_id: bytes
    load: PrefillLoad


@dataclass(frozen=True, slots=True)
class BlocksComing:
    """Of a paced fetch, so many blocks from the first on can be sent, and wait for destinations."""

    transfer_id: TransferId
    count: int


@dataclass(frozen=True, slots=True)
class BlocksLanded:
    """Of a paced fetch, so many blocks from the first on are complete."""

    transfer_id: TransferId
    count: int


@dataclass(frozen=True, slots=True)
class FetchLanded:
    """Every block is in its place and the first token is known. Terminal."""

    transfer_id: TransferId
    seconds: float
    """From the order."""
    bytes: int
    tail_s: float = 0.0
    """From the first token to the last block."""
    tail_bytes: int = 0
    """What landed in that time."""


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """Terminal."""

    transfer_id: TransferId
    reason: str
    landed: int
    """How many blocks from the first on are complete and may be used."""
    quarantined: tuple[int, ...]
    """Local blocks that may still be written to, until ``BlocksReleased`` names them."""
    kind: FailureKind = FailureKind.PEER_LOST


@dataclass(frozen=True, slots=True)
class FetchCancelled:
    """The answer to ``cancel_fetch``. Terminal."""

    transfer_id: TransferId
    quarantined: tuple[int, ...]


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
    cache_salt: str = ""
    request_id: str = ""
    """The client's label, for log lines; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class PushCancelled:
    """Nobody wants this prompt any more: stop computing it. Its blocks stay held until ``PushEnded``."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class BlocksSent:
    """These blocks of a push, which goes on, are not read any more. Only where a transfer thread is to say so."""

    transfer_id: TransferId
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PushEnded:
    """No block of this push is read any more. Once for each ``PushWanted``."""

    transfer_id: TransferId
    outcome: PushOutcome


@dataclass(frozen=True, slots=True)
class TransferThreadDied:
    """A bug ended the transfer thread; this engine can transfer nothing any more."""

    message: str


FetchEvent: TypeAlias = (
    PrefillNodeMet
    | FirstTokenArrived
    | LoadHeard
    | BlocksComing
    | BlocksLanded
    | FetchLanded
    | FetchFailed
    | FetchCancelled
    | BlocksReleased
)
PushEvent: TypeAlias = PushWanted | PushCancelled | BlocksSent | PushEnded
TransferEvent: TypeAlias = FetchEvent | PushEvent | TransferThreadDied


class EventQueue:
    """Thread-safe. Makes a cancel final in the engine's eyes at once, whatever is already on its way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[TransferEvent] = deque()
        self._news = False
        self._open: set[TransferId] = set()
        self._cancelled: set[TransferId] = set()

    def opened(self, transfer_id: TransferId) -> None:
        """A fetch was ordered. Raises ValueError if it is alive already."""
        with self._lock:
            if transfer_id in self._open:
                raise ValueError(f"transfer {transfer_id} is being fetched already")
            self._open.add(transfer_id)

    def cancel(self, transfer_id: TransferId) -> bool:
        """From now on its end is ``FetchCancelled``. False if the engine has seen its end already."""
        with self._lock:
            if transfer_id not in self._open:
                return False
            self._cancelled.add(transfer_id)
            return True

    def put(self, event: TransferEvent) -> None:
        with self._lock:
            self._events.append(event)
            self._news = True

    def take_news(self) -> bool:
        """Whether anything was put since the last call."""
        with self._lock:
            news, self._news = self._news, False
            return news

    def drain(self) -> list[TransferEvent]:
        """All events so far, oldest first."""
        with self._lock:
            events = [seen for event in self._events if (seen := self._as_seen(event)) is not None]
            self._events.clear()
            return events

    def _as_seen(self, event: TransferEvent) -> TransferEvent | None:
        if isinstance(event, FirstTokenArrived):
            return None if event.transfer_id in self._cancelled else event
        if not isinstance(event, FetchLanded | FetchFailed | FetchCancelled):
            return event
        transfer_id = event.transfer_id
        self._open.discard(transfer_id)
        if transfer_id not in self._cancelled:
            return event
        self._cancelled.discard(transfer_id)
        return FetchCancelled(transfer_id, () if isinstance(event, FetchLanded) else event.quarantined)
