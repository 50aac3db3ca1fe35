"""The decode side of one transfer, without I/O. Every input returns what to send and what to tell the engine."""

from __future__ import annotations

import enum
from typing import TypeAlias

from pdserve.wire.transfer import Cancel, Digests, Done, Failed, FirstToken, PrefillRequest
from pdserve_kvtransfer.events import (
    BlocksReleased,
    FailureKind,
    FetchCancelled,
    FetchEvent,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
)

FetchEffect: TypeAlias = PrefillRequest | Done | Cancel | FetchEvent


class FetchState(enum.Enum):
    QUEUED = "queued"
    """The handshake is not settled; the prefill engine knows nothing of this transfer."""
    MOVING = "moving"
    DRAINING = "draining"
    """Its end was reported, but accepted receives still write to memory: those blocks are quarantined."""
    ENDED = "ended"


class _Block(enum.IntEnum):
    MISSING = 0
    ACCEPTED = 1
    LANDED = 2
    """All its bytes are there, but what they must be has not been said yet."""
    VERIFIED = 3


class FetchSession:
    """From the order to its one terminal event, and on until nothing writes to its blocks.

    With ``checked``, a block counts only when its digest is the one that the prefill engine announced.
    """

    def __init__(self, order: FetchOrder, tag: int, block_bytes: int, now: float, *, checked: bool) -> None:
        self.order = order
        self.tag = tag
        self.state = FetchState.QUEUED
        self.deadline = now + order.deadline_s
        self._block_bytes = block_bytes
        self._started = now
        self._blocks = bytearray(len(order.block_ids))
        self._checked = checked
        self._announced: dict[int, int] = {}
        self._found: dict[int, int] = {}
        self._verified = 0
        self._accepted = 0
        self._first_token = False
        self.all_sent: float | None = None
        """When the prefill engine had sent its last block; None before."""

    @property
    def over(self) -> bool:
        """Whether the terminal event was given out."""
        return self.state in (FetchState.DRAINING, FetchState.ENDED)

    @property
    def in_flight(self) -> int:
        """Accepted blocks that have not landed."""
        return self._accepted

    def request(self, now: float) -> list[FetchEffect]:
        """The handshake stands."""
        if self.state is not FetchState.QUEUED:
            return []
        self.state = FetchState.MOVING
        order = self.order
        return [
            PrefillRequest(
                transfer_id=order.transfer_id,
                tag=self.tag,
                token_ids=order.token_ids,
                first_block=order.first_block,
                sampling=order.sampling,
                deadline_s=max(self.deadline - now, 0.001),
                sibling_seeds=order.sibling_seeds,
                cache_salt=order.cache_salt,
                digests=self._checked,
            )
        ]

    def accept(self, index: int, length: int) -> int | None:
        """Where an arrived block may land; None if it may not land anywhere."""
        slot = index - self.order.first_block
        if self.state is not FetchState.MOVING or length != self._block_bytes or not 0 <= slot < len(self._blocks):
            return None
        if self._blocks[slot] != _Block.MISSING:
            return None
        self._blocks[slot] = _Block.ACCEPTED
        self._accepted += 1
        return self.order.block_ids[slot]

    @property
    def wants_digest(self) -> bool:
        """Whether ``landed`` needs to be told what has landed."""
        return self._checked and self.state is FetchState.MOVING

    def landed(self, index: int, found: int, now: float) -> list[FetchEffect]:
        """The receive of an accepted block has completed; ``found`` is its digest, if wanted."""
        slot = index - self.order.first_block
        self._blocks[slot] = _Block.LANDED
        self._accepted -= 1
        if self.over:
            if self._accepted == 0:
                self.state = FetchState.ENDED
            return [BlocksReleased((self.order.block_ids[slot],))]
        if self._checked:
            self._found[slot] = found
        return self._verify(slot) or self._finish_if_complete(now)

    def on_digests(self, message: Digests, now: float) -> list[FetchEffect]:
        if self.state is not FetchState.MOVING:
            return []
        for slot, expected in enumerate(message.digests, message.first_index - self.order.first_block):
            if not 0 <= slot < len(self._blocks) or self._announced.setdefault(slot, expected) != expected:
                return self._fail(FailureKind.CORRUPT, f"a digest that makes no sense, of block {slot}", tell=True)
            if self._blocks[slot] == _Block.LANDED and (failed := self._verify(slot)):
                return failed
        return self._finish_if_complete(now)

    def _verify(self, slot: int) -> list[FetchEffect]:
        """Compare, if both sides of the comparison are known. Effects only if they differ."""
        if self._checked:
            if slot not in self._announced or slot not in self._found:
                return []
            if self._announced[slot] != self._found[slot]:
                where = self.order.first_block + slot
                return self._fail(FailureKind.CORRUPT, f"block {where} is not what was sent", tell=True)
        self._blocks[slot] = _Block.VERIFIED
        self._verified += 1
        return []

    def on_first_token(self, message: FirstToken, now: float) -> list[FetchEffect]:
        if self.state is not FetchState.MOVING or self._first_token:
            return []
        self._first_token = True
        self.all_sent = now
        arrived = FirstTokenArrived(self.order.transfer_id, message.tokens, message.cached_tokens)
        return [arrived, *self._finish_if_complete(now)]

    def _finish_if_complete(self, now: float) -> list[FetchEffect]:
        if not self._first_token or self._verified < len(self._blocks):
            return []
        self.state = FetchState.ENDED
        transfer_id = self.order.transfer_id
        size = self._verified * self._block_bytes
        return [Done(transfer_id), FetchLanded(transfer_id, now - self._started, size)]

    def on_failed(self, message: Failed) -> list[FetchEffect]:
        """The prefill engine has ended it."""
        return self._fail(FailureKind.REFUSED, message.reason, tell=False)

    def lost(self, kind: FailureKind, reason: str) -> list[FetchEffect]:
        """The link is closed: nothing is written any more, and nobody can be told."""
        released: list[FetchEffect] = []
        if self.state is FetchState.DRAINING and self._accepted:
            released = [BlocksReleased(self._quarantine())]
        self._accepted = 0
        failed = self._fail(kind, reason, tell=False)
        self.state = FetchState.ENDED
        return failed + released

    def expire(self, now: float) -> list[FetchEffect]:
        """The clock has moved."""
        if self.over or now < self.deadline:
            return []
        return self._fail(FailureKind.DEADLINE, "deadline: the prompt's KV cache did not arrive in time", tell=True)

    def withdraw(self, kind: FailureKind, reason: str) -> list[FetchEffect]:
        """This side gives it up for reasons that the engine did not ask for."""
        return self._fail(kind, reason, tell=True)

    def cancel(self) -> list[FetchEffect]:
        """The engine wants it no more."""
        if self.over:
            return []
        effects = self._tell()
        self._end()
        return [*effects, FetchCancelled(self.order.transfer_id, self._quarantine())]

    def _fail(self, kind: FailureKind, reason: str, *, tell: bool) -> list[FetchEffect]:
        if self.over:
            return []
        effects = self._tell() if tell else []
        self._end()
        transfer_id = self.order.transfer_id
        return [*effects, FetchFailed(transfer_id, reason, self._leading(), self._quarantine(), kind)]

    def _tell(self) -> list[FetchEffect]:
        return [Cancel(self.order.transfer_id)] if self.state is FetchState.MOVING else []

    def _end(self) -> None:
        self.state = FetchState.DRAINING if self._accepted else FetchState.ENDED

    def _leading(self) -> int:
        for slot, block in enumerate(self._blocks):
            if block != _Block.VERIFIED:
                return slot
        return len(self._blocks)

    def _quarantine(self) -> tuple[int, ...]:
        if not self._accepted:
            return ()
        pairs = zip(self.order.block_ids, self._blocks, strict=True)
        return tuple(block_id for block_id, block in pairs if block == _Block.ACCEPTED)
