"""The prefill side of one transfer, without I/O. Every input returns the messages to send and the events to queue.

PUSHING ─▶ ENDED                  the outcome is settled, and no send reads the engine's blocks
PUSHING ─▶ DRAINING ─▶ ENDED      the outcome is settled, but sends still read them

Sends that were ordered before a cancel go on; the decode side discards what it no longer wants.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from pdserve.control.frame import MAX_REASON_CHARS
from pdserve.wire.rank import SendBlocks
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve.wire.terms import MAX_DEADLINE_S
from pdserve.wire.transfer import (
    UNKNOWN_LOAD,
    Accept,
    BlocksReady,
    CachedRequest,
    Failed,
    FailureCause,
    FirstToken,
    Held,
    PrefillLoad,
    PrefillRequest,
)
from pdserve_kvtransfer.events import (
    BlocksSent,
    CachedWanted,
    PushCancelled,
    PushEnded,
    PushEvent,
    PushOutcome,
    PushWanted,
)

PushMessage: TypeAlias = SendBlocks | BlocksReady | FirstToken | Held | Failed
"""What goes to ranks or to the other engine."""
PushEffect: TypeAlias = PushMessage | PushEvent


class PushState(enum.Enum):
    PUSHING = "pushing"
    DRAINING = "draining"
    """Its outcome is settled, and is reported when no send in flight reads the engine's blocks any more."""
    ENDED = "ended"


class PushSession:
    """One push, from a decode engine's request until no block of it is read any more."""

    def __init__(
        self,
        request: PrefillRequest | CachedRequest,
        link: int,
        groups: bytes,
        pieces: Sequence[int],
        now: float,
        grace_s: float,
        *,
        reports_sent: bool = False,
    ) -> None:
        """``link`` is the link's number on the ranks. ``groups`` has the group of each wanted block, and a block of a
        group travels as ``pieces[group]`` messages over all ranks.

        This side gives up ``grace_s`` after the deadline, so that the decode engine can say first that it gives up.
        With ``reports_sent`` the engine gets ``BlocksSent`` when all that it has pushed so far is sent.
        """
        self.transfer_id = request.transfer_id
        self.state = PushState.PUSHING
        # A decode engine may name any number, even one that no timer takes.
        self._deadline_s = min(request.deadline_s, MAX_DEADLINE_S)
        self.deadline = now + self._deadline_s + grace_s
        self.outcome: PushOutcome | None = None
        self.cause = FailureCause.NODE
        """The cause of the failure, if the outcome is ``FAILED``."""
        self.tag = request.tag
        self._request = request
        self._link = link
        self._pieces = pieces
        self._groups = groups
        self._first_block = 0 if isinstance(request, CachedRequest) else request.first_block
        self._end_block = self._first_block + len(groups)
        self._pushed = self._first_block
        """The end of the blocks that the engine has given."""
        self._answered = False
        self._in_flight = 0
        self._reports_sent = reports_sent
        self._unaccepted: deque[tuple[int, tuple[int, ...]]] = deque()
        self._accepted = 0 if request.paced else self._end_block
        self._sending: list[int] = []

    def __str__(self) -> str:
        return f"request_id={self._request.request_id or '-'} transfer={self.transfer_id}"

    def open(self) -> list[PushEffect]:
        """Returns the first effects: the event for the engine, or the refusal of a request that makes no sense."""
        request = self._request
        if isinstance(request, CachedRequest):
            return [CachedWanted(self.transfer_id, request.hashes, self._deadline_s, request.request_id)]
        if not self._groups:
            self.state = PushState.ENDED
            reason = f"no block {request.first_block} in a prompt of {len(request.token_ids)} tokens"
            return [Failed(self.transfer_id, reason, FailureCause.PROMPT)]
        wanted = PushWanted(
            self.transfer_id,
            request.token_ids,
            request.first_block,
            request.sampling,
            self._deadline_s,
            request.child_seeds,
            request.terms,
        )
        return [wanted]

    def push(self, first_block: int, block_ids: tuple[int, ...], groups: bytes | None = None) -> list[PushEffect]:
        """The engine has computed these blocks, of these ``groups``: None if the model has no cache groups.

        Each block that is sent counts as in flight until ``sent``.
        """
        if self.state is not PushState.PUSHING or not block_ids:
            return []
        if first_block < self._first_block or first_block + len(block_ids) > self._end_block:
            return self._give_up("the prefill engine has blocks that were not asked for")
        if groups is not None and groups != self._groups_of(first_block, len(block_ids)):
            return self._give_up("the prefill engine has taken blocks of one cache group for those of another")
        self._pushed = max(self._pushed, first_block + len(block_ids))
        if not self._request.paced:
            return [self._send(first_block, block_ids)]
        self._unaccepted.append((first_block, block_ids))
        return [BlocksReady(self.transfer_id, first_block + len(block_ids)), *self._send_accepted()]

    def on_accept(self, message: Accept) -> list[PushEffect]:
        """The decode engine has destinations for more blocks."""
        if self.state is not PushState.PUSHING:
            return []
        self._accepted = max(self._accepted, message.end_block)
        return self._send_accepted()

    def _send_accepted(self) -> list[PushEffect]:
        effects: list[PushEffect] = []
        while self._unaccepted and self._unaccepted[0][0] < self._accepted:
            first, block_ids = self._unaccepted.popleft()
            count = min(len(block_ids), self._accepted - first)
            effects.append(self._send(first, block_ids[:count]))
            if count < len(block_ids):
                self._unaccepted.appendleft((first + count, block_ids[count:]))
        return effects

    def _send(self, first_block: int, block_ids: tuple[int, ...]) -> SendBlocks:
        if len(self._pieces) == 1:
            self._in_flight += len(block_ids) * self._pieces[0]
        else:
            self._in_flight += sum(self._pieces[group] for group in self._groups_of(first_block, len(block_ids)))
        if self._reports_sent:
            self._sending += block_ids
        return SendBlocks(self._link, self.tag, first_block, block_ids, self._request.digests)

    def _groups_of(self, first_block: int, count: int) -> bytes:
        first = first_block - self._first_block
        return self._groups[first : first + count]

    def sent(self, count: int) -> list[PushEffect]:
        """``count`` pieces were sent."""
        self._in_flight -= count
        if self._in_flight or not self._sending or self.state is not PushState.PUSHING:
            return self._end_if_quiet()
        sent, self._sending = tuple(self._sending), []
        return [BlocksSent(self.transfer_id, sent)]

    def first_token(
        self,
        tokens: tuple[SampledToken, ...],
        cached_tokens: int,
        load: PrefillLoad = UNKNOWN_LOAD,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> list[PushEffect]:
        if self.state is not PushState.PUSHING:
            return []
        return [FirstToken(self.transfer_id, tokens, cached_tokens, load, prompt_logprobs)]

    def held(self, count: int, usable: int = 0) -> list[PushEffect]:
        """The engine has said how many of the wanted blocks it has. Blocks on the way from it may still follow."""
        request = self._request
        if self.state is not PushState.PUSHING or self._answered:
            return []
        end = count
        if isinstance(request, CachedRequest) and len(self._pieces) > 1:
            end = {len(request.hashes): len(self._groups), 0: 0}.get(count, -1)
        if not self._pushed <= end <= self._end_block:
            return self._give_up("the prefill engine has miscounted the blocks that it has")
        self._answered = True
        self._end_block = end
        return [Held(self.transfer_id, count, usable)]

    def refuse(
        self, reason: str, cause: FailureCause = FailureCause.NODE, load: PrefillLoad = UNKNOWN_LOAD
    ) -> list[PushEffect]:
        """The engine refuses the push or gives it up. ``load`` is the engine's load, if that is the cause."""
        if self.state is not PushState.PUSHING:
            return []
        self.cause = cause
        return [Failed(self.transfer_id, reason[:MAX_REASON_CHARS], cause, load), *self._settle(PushOutcome.FAILED)]

    def on_done(self) -> list[PushEffect]:
        return self._settle(PushOutcome.DONE)

    def on_cancel(self) -> list[PushEffect]:
        if self.state is not PushState.PUSHING:
            return []
        return [PushCancelled(self.transfer_id), *self._settle(PushOutcome.CANCELLED)]

    def expire(self, now: float) -> list[PushEffect]:
        """The clock has moved."""
        if self.state is not PushState.PUSHING or now < self.deadline:
            return []
        return self._give_up("deadline: the blocks were not sent in time", FailureCause.DEADLINE)

    def _give_up(self, reason: str, cause: FailureCause = FailureCause.NODE) -> list[PushEffect]:
        self.cause = cause
        return [
            Failed(self.transfer_id, reason, cause),
            PushCancelled(self.transfer_id),
            *self._settle(PushOutcome.FAILED),
        ]

    def lost(self, outcome: PushOutcome, reason: str) -> list[PushEffect]:
        """The peer is lost. ``closed`` follows."""
        if self.state is not PushState.PUSHING:
            return []
        return [Failed(self.transfer_id, reason), PushCancelled(self.transfer_id), *self._settle(outcome)]

    def closed(self) -> list[PushEffect]:
        """The link is closed on every rank, so nothing is read any more."""
        self._in_flight = 0
        return self._end_if_quiet()

    def _settle(self, outcome: PushOutcome) -> list[PushEffect]:
        if self.state is not PushState.PUSHING:
            return []
        self.outcome = outcome
        self.state = PushState.DRAINING
        return self._end_if_quiet()

    def _end_if_quiet(self) -> list[PushEffect]:
        if self.state is not PushState.DRAINING or self._in_flight or self.outcome is None:
            return []
        self.state = PushState.ENDED
        return [PushEnded(self.transfer_id, self.outcome)]
