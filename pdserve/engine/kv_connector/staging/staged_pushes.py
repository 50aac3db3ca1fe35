"""Pushes out of a KV cache that lies outside of host memory: each block is copied to a staging block, then sent.

The transfer thread sees the staging blocks as the engine's cache. The blocks of a chunk are copied while the next chunk
computes. A push takes staging blocks for final KV blocks only, by turns with the others, and gives them back when they
have left: its blocks in the cache stay its own until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.kv_connector.staging.block_copier import Copier
from pdserve.engine.kv_connector.staging.staging_blocks import StagingBlocks
from pdserve.engine.kv_connector.transfers import Pushes
from pdserve.wire.ids import TransferId
from pdserve.wire.prompt_logprobs import PromptLogprobs
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.transfer import FailureCause, PrefillLoad
from pdserve_kvtransfer.events import BlocksSent, CachedWanted, PushEnded, PushEvent, PushWanted, TransferEvent


@dataclass(slots=True)
class _StagedPush:
    """One push under way."""

    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    """The number in the prompt and the id of each final block without a staging block, in order."""
    downloads: int = 0
    """The number of copies from the cache to staging blocks that are under way."""
    sending: set[int] = field(default_factory=set)
    """The staging blocks that the transfer thread reads."""
    end: PushEnded | None = None
    """The event that the connector gets after the copies."""


@dataclass(frozen=True, slots=True)
class BlocksToSend:
    """Blocks of one push that are sent once they are in their staging blocks."""

    transfer: TransferId
    first_block: int
    staged: tuple[int, ...]


class StagedPushes:
    """Satisfies ``Pushes``. ``StagedTransfers`` tells it what transfers and copies report."""

    def __init__(
        self, transfers: Pushes, copier: Copier[Any], staging: StagingBlocks, report: Callable[[TransferEvent], None]
    ) -> None:
        """``report`` is called with each event for the connector."""
        self._transfers, self._copier, self._staging, self._report = transfers, copier, staging, report
        self._pushes: dict[TransferId, _StagedPush] = {}

    def push(self, transfer_id: TransferId, first_block: int, block_ids: tuple[int, ...]) -> None:
        push = self._pushes.get(transfer_id)
        if push is None or push.end is not None:
            return
        push.waiting += enumerate(block_ids, first_block)
        self._staging.want(transfer_id, transfer_id.decode_boot, len(block_ids))
        self.grant()

    def first_token(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        cached_tokens: int,
        load: PrefillLoad,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self._transfers.first_token(transfer_id, tokens, cached_tokens, load, prompt_logprobs)

    def held(self, transfer_id: TransferId, count: int) -> None:
        self._transfers.held(transfer_id, count)

    def tell_load(self, load: PrefillLoad) -> None:
        self._transfers.tell_load(load)

    def fail_push(self, transfer_id: TransferId, reason: str, cause: FailureCause) -> None:
        self._transfers.fail_push(transfer_id, reason, cause)

    def on_event(self, event: PushEvent) -> None:
        match event:
            case PushWanted(transfer) | CachedWanted(transfer):
                self._pushes[transfer] = _StagedPush()
                self._report(event)
            case BlocksSent(transfer, staged):
                push = self._pushes.get(transfer)
                if push is not None:
                    push.sending.difference_update(staged)
                    self._staging.give_back(transfer, staged)
            case PushEnded(transfer):
                self._end(self._pushes[transfer], event)
            case _:
                self._report(event)

    def grant(self) -> None:
        """Gives staging blocks to the pushes whose turn it is."""
        for transfer, staged in self._staging.granted():
            waiting = self._pushes[transfer].waiting
            numbers, blocks = zip(*(waiting.popleft() for _ in staged), strict=True)
            # Blocks are pushed in order, from the first wanted one on, so their numbers are consecutive.
            self._pushes[transfer].downloads += 1
            self._copier.download(BlocksToSend(transfer, numbers[0], staged), blocks, staged)

    def downloaded(self, sending: BlocksToSend) -> None:
        """A copy to staging blocks is over."""
        push = self._pushes[sending.transfer]
        push.downloads -= 1
        if push.end is None:
            push.sending.update(sending.staged)
            self._transfers.push(sending.transfer, sending.first_block, sending.staged)
        else:
            self._staging.give_back(sending.transfer, sending.staged)
            self._end(push, push.end)

    def _end(self, push: _StagedPush, end: PushEnded) -> None:
        transfer = end.transfer_id
        if push.end is None:
            push.end = end
            push.waiting.clear()
            self._staging.withdraw(transfer)
            if push.sending:
                self._staging.give_back(transfer, push.sending)
                push.sending = set()
        if not push.downloads:
            del self._pushes[transfer]
            self._report(end)
