"""Two transfer threads and the wire between them: moves blocks between fake engines' memories, late and lossy."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import FailureCause, PrefillLoad
from pdserve_kvtransfer.events import (
    KIND_OF_CAUSE,
    BlocksOffered,
    BlocksReleased,
    CachedFetchOrder,
    CachedWanted,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushOutcome,
    PushWanted,
    TransferEvent,
    TransferStats,
)
from tests.engine.fake_model import FakeModel

HOLDER = PrefillTarget("d0", "tcp://127.0.0.1:2", new_id())


@dataclass
class Transfer:
    """A transfer that is under way."""

    order: FetchOrder | CachedFetchOrder
    sending: list[tuple[int, int]] = field(default_factory=list)
    """Each block's number in the prompt and the prefill engine's block, which is read only when it is delivered."""
    landed: set[int] = field(default_factory=set)
    all_sent: int | None = None
    """The number of blocks that are to land, once everything has been given to the transfer."""
    usable: int = 0
    """How many of the wanted hashes may be asked for with more success, if none is to land."""


class DecodeThread:
    """The transfers that a ``PromptFetcher`` talks to."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.pending: list[TransferEvent] = []

    def fetch(self, order: FetchOrder | CachedFetchOrder) -> None:
        self._wire.open(order)

    def cancel_fetch(self, transfer_id: TransferId) -> None:
        self._wire.cancel(transfer_id)

    def offer(self, target: PrefillTarget, hashes: tuple[bytes, ...], request_id: str) -> None:
        self._wire.offer(hashes, request_id)

    def tell_load(self, load: PrefillLoad) -> None:
        """No node asks this one for prompts."""

    def events(self) -> list[TransferEvent]:
        pending, self.pending = self.pending, []
        return pending

    def stats(self) -> TransferStats:
        return TransferStats()


class PrefillThread:
    """The transfers that a ``PromptPusher`` talks to."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.pending: list[TransferEvent] = []
        self.hears_offers = False
        """Whether the engine can fetch what is offered to it, over another wire."""

    def push(self, transfer_id: TransferId, first_block: int, block_ids: tuple[int, ...]) -> None:
        self._wire.send(transfer_id, first_block, block_ids)

    def held(self, transfer_id: TransferId, count: int, usable: int = 0) -> None:
        self._wire.held(transfer_id, count, usable)

    def tell_load(self, load: PrefillLoad) -> None:
        pass

    def first_token(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        cached_tokens: int,
        load: PrefillLoad,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self._wire.first_token(transfer_id, tokens, cached_tokens, load, prompt_logprobs)

    def fail_push(self, transfer_id: TransferId, reason: str, cause: FailureCause) -> None:
        self._wire.refuse(transfer_id, reason, KIND_OF_CAUSE[cause])

    def events(self) -> list[TransferEvent]:
        pending, self.pending = self.pending, []
        return pending

    def stats(self) -> TransferStats:
        return TransferStats()


class NodeThread:
    """The transfers of an engine that fetches over one wire and pushes over another one."""

    def __init__(self, fetches: DecodeThread, pushes: PrefillThread) -> None:
        self._fetches, self._pushes = fetches, pushes
        pushes.hears_offers = True
        self.fetch, self.cancel_fetch, self.offer = fetches.fetch, fetches.cancel_fetch, fetches.offer
        self.push, self.first_token, self.held = pushes.push, pushes.first_token, pushes.held
        self.fail_push, self.tell_load = pushes.fail_push, pushes.tell_load

    def events(self) -> list[TransferEvent]:
        return self._fetches.events() + self._pushes.events()

    def stats(self) -> TransferStats:
        return TransferStats()


class Wire:
    """Delivers what was sent when a test says so; loses transfers when a test says so."""

    def __init__(self, random: Random) -> None:
        self.decode = DecodeThread(self)
        self.prefill = PrefillThread(self)
        self.moved = 0
        self._random = random
        self._transfers: dict[TransferId, Transfer] = {}

    def open(self, order: FetchOrder | CachedFetchOrder) -> None:
        assert order.transfer_id not in self._transfers
        self._transfers[order.transfer_id] = Transfer(order)
        if isinstance(order, CachedFetchOrder):
            assert order.hashes
            assert order.block_ids
            self.prefill.pending.append(CachedWanted(order.transfer_id, order.hashes, order.deadline_s))
            return
        self.prefill.pending.append(
            PushWanted(
                order.transfer_id,
                order.token_ids,
                order.first_block,
                order.sampling,
                order.deadline_s,
                order.child_seeds,
                order.terms,
            )
        )

    def send(self, transfer_id: TransferId, first_block: int, block_ids: tuple[int, ...]) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            assert first_block >= transfer.order.first_block
            transfer.sending += enumerate(block_ids, first_block)

    def first_token(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        cached_tokens: int,
        load: PrefillLoad,
        prompt_logprobs: PromptLogprobs | None,
    ) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            assert isinstance(transfer.order, FetchOrder)
            assert len(tokens) == 1 + len(transfer.order.child_seeds)
            transfer.all_sent = transfer.order.num_blocks
            self.decode.pending.append(FirstTokenArrived(transfer_id, tokens, cached_tokens, load, prompt_logprobs))

    def held(self, transfer_id: TransferId, count: int, usable: int) -> None:
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            assert isinstance(transfer.order, CachedFetchOrder)
            assert count <= len(transfer.order.hashes)
            transfer.all_sent = len(transfer.sending) + len(transfer.landed)
            # Of a model with cache groups, all wanted blocks come or none.
            assert transfer.all_sent == count or (count and transfer.all_sent == len(transfer.order.block_ids))
            transfer.usable = usable

    def offer(self, hashes: tuple[bytes, ...], request_id: str) -> None:
        """Loses the offer if nothing can be fetched in its direction."""
        if self.prefill.hears_offers:
            self.prefill.pending.append(BlocksOffered(HOLDER, hashes, request_id))

    def cancel(self, transfer_id: TransferId) -> None:
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return
        late = self._still_written(transfer)
        self.decode.pending.append(FetchCancelled(transfer_id, late))
        self._end(transfer_id, late, PushOutcome.CANCELLED)

    def refuse(self, transfer_id: TransferId, reason: str, kind: FailureKind) -> None:
        """Ends a transfer by the prefill engine's decision: it refuses it, or the time is over."""
        transfer = self._transfers.pop(transfer_id, None)
        if transfer is not None:
            late = self._fail(transfer_id, transfer, reason, kind)
            self.decode.pending += [BlocksReleased(late)] if late else []
            self.prefill.pending.append(PushEnded(transfer_id, PushOutcome.FAILED))

    def lose(self) -> None:
        """Lets one transfer fail, if there is one."""
        if self._transfers:
            transfer_id = self._random.choice(list(self._transfers))
            transfer = self._transfers.pop(transfer_id)
            late = self._fail(transfer_id, transfer, "lost", FailureKind.PEER_LOST)
            self._end(transfer_id, late, PushOutcome.PEER_LOST)

    def _fail(self, transfer_id: TransferId, transfer: Transfer, reason: str, kind: FailureKind) -> tuple[int, ...]:
        """Tells the decode node what has landed. Returns the blocks that are still written to."""
        leading = 0
        while transfer.order.first_block + leading in transfer.landed:
            leading += 1
        late = self._still_written(transfer)
        self.decode.pending.append(FetchFailed(transfer_id, reason, leading, late, kind))
        return late

    def deliver(self, source: FakeModel, destination: FakeModel, share: float) -> None:
        """Delivers each block that was sent with probability ``share``."""
        for transfer_id, transfer in list(self._transfers.items()):
            order = transfer.order
            for number, block in list(transfer.sending):
                if self._random.random() < share:
                    transfer.sending.remove((number, block))
                    place = order.block_ids[number - order.first_block]
                    destination.memory[place] = list(source.memory[block])
                    transfer.landed.add(number)
                    self.moved += 1
            if len(transfer.landed) == transfer.all_sent:
                del self._transfers[transfer_id]
                self.decode.pending.append(
                    FetchLanded(transfer_id, 0.1, 1, landed=transfer.all_sent, usable=transfer.usable)
                )
                self.prefill.pending.append(PushEnded(transfer_id, PushOutcome.DONE))

    def _still_written(self, transfer: Transfer) -> tuple[int, ...]:
        order = transfer.order
        blocks = [order.block_ids[number - order.first_block] for number, _ in transfer.sending]
        return tuple(block for block in blocks if self._random.random() < 0.5)

    def _end(self, transfer_id: TransferId, late: tuple[int, ...], outcome: PushOutcome) -> None:
        if late:
            self.decode.pending.append(BlocksReleased(late))
        self.prefill.pending += [PushCancelled(transfer_id), PushEnded(transfer_id, outcome)]
