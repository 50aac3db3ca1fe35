"""KV return: the blocks of an answer come back to the node that computed its prompt.

A decode node offers the blocks of running answers (``ReturnOffers``). The prefill node fetches what is offered into its
prefix cache (``ReturnFetcher``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.engine.kv_cache.prefix_cache import Match
from pdserve.engine.kv_connector.transfers import BlockOrder, Fetches
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.wire.engine_counts import ReturnCounts
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import MAX_HASHES
from pdserve_kvtransfer.events import BlocksOffered, CachedFetchOrder, FetchEnd, FetchFailed, FetchLanded

log = logging.getLogger(__name__)

OFFER_S = 0.25
"""Offers are made so often, and at the end of each request."""
RETURNS_PER_S = 6
"""Where there are many streams, each is offered less often: a transfer costs each node some 3 ms of CPU time, and all
of them together are to take less than 2 % of a core. Requests that end come first, because nothing is offered of them
later."""
ALONE = 4
"""So many texts may come in transfers of their own, when they are offered together (``kv_return``)."""
TEXT_SHARE = 0.1
"""What each text costs at most that is offered with others, its offer included, as a part of what a transfer costs."""
MAX_AHEAD_S = 2.0
"""Where more requests end than offers may be made, those beyond this are not offered."""
BLOCKS_FOR_ONE = 256
"""An offer names all blocks of a text. So that long texts cost no more by the token than short ones, a text of so many
blocks is offered again when two of them are new, one of twice as many when three are, and so on."""


class ReturnOffers:
    """Names a text's blocks to the prefill node as soon as more of them are full than it was told.

    It looks at running requests four times a second at most, so a decode step costs nothing for it.
    """

    def __init__(self, transfers: Fetches, block_size: int) -> None:
        self._transfers = transfers
        self._block_size = block_size
        self._now = 0.0
        self._next_at = 0.0
        self._ends_at = 0.0
        """When so many ends could have been offered as were, if they had come evenly."""

    def stepped(self, plan: BatchPlan, now: float) -> None:
        """Offers what has become full, if it is time."""
        self._now = now
        if now < self._next_at:
            return
        made = sum(self._offer(work.request, BLOCKS_FOR_ONE) for work in plan.work)
        self._next_at = now + max(OFFER_S, together(made) / RETURNS_PER_S)

    def ended(self, request: Request) -> None:
        """Offers what has become full since the last time. The request still has its blocks."""
        if self._ends_at - self._now < MAX_AHEAD_S and self._offer(request, 0):
            self._ends_at = max(self._ends_at, self._now) + 1 / RETURNS_PER_S
            self._next_at = max(self._next_at, self._now) + 1 / RETURNS_PER_S

    def _offer(self, request: Request, blocks_for_one: int) -> bool:
        """Returns whether the request had something to offer."""
        target = (request.parent or request).return_to
        if target is None or request.terms.fetch_only or not request.num_generated_tokens:
            return False
        full = min(request.num_computed_tokens // self._block_size, len(request.block_hashes), MAX_HASHES)
        if (table := request.block_table).has_states:
            # Behind other blocks no state can be found. While the answer goes on, only few are worth a transfer.
            full = min(full, table.checkpoint if blocks_for_one else table.last_state)
        rest = full // blocks_for_one if blocks_for_one else 0
        if full - request.offered_blocks <= rest:
            return False
        request.offered_blocks = full
        self._transfers.offer(target, tuple(request.block_hashes[:full]), request.terms.prompt.request_id)
        return True


def together(texts: int) -> float:
    """Returns how many transfers of one text cost as much as those of so many texts that are offered together."""
    return min(texts, ALONE + TEXT_SHARE * texts)


MAX_FETCHES = 4
MAX_TEXTS = 16
"""The texts of one fetch. Each fetch costs both nodes the time of a transfer, however little it brings."""
MAX_WAITING = 256
"""The offers that wait for a fetch."""
POOL_SHARE = 8
"""All fetches together take this part of the blocks at most: one of so many."""
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Text:
    """One text of a fetch. The first blocks of ``table`` were here; those of ``hashes`` are to come behind them."""

    offer: BlocksOffered
    table: BlockTable
    hashes: tuple[bytes, ...]
    complete: bool
    """Whether these are all that was missing of the offer."""
    begun: int
    """What ``_Waiting.begun`` was."""

    @property
    def new_blocks(self) -> list[int]:
        """The blocks for ``hashes``."""
        return self.table[len(self.table) - len(self.hashes) :]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An offer that waits for its fetch."""

    offer: BlocksOffered
    missing: bytes
    """The hash of the first block that was not here when that was last looked up."""
    begun: int = 0
    """The blocks of the offer that former fetches have brought. If they are not all here any more, others need the
    memory, and the rest is not fetched: the same blocks would come and go for ever."""


class ReturnFetcher:
    """Takes free blocks and idle ones of the prefix cache, and never one that the scheduler needs.

    A block that has landed rests in the prefix cache like one that was computed here. A fetch that fails is not
    repeated: the next offer of the same text names its blocks too. Of offers that continue each other, only the
    latest waits. One fetch brings several texts of one engine, one behind the other.
    """

    def __init__(
        self,
        blocks: BlockManager,
        transfers: Fetches,
        boot_id: bytes,
        finish_writes: Callable[[], None] = lambda: None,
        order: BlockOrder | None = None,
    ) -> None:
        """``finish_writes`` and ``order`` are those of a ``PromptFetcher``."""
        self._order = order or BlockOrder(blocks.block_size)
        # What other cache groups keep comes behind the blocks of one text.
        self._max_texts = 1 if self._order.has_groups else MAX_TEXTS
        self._blocks = blocks
        self._transfers = transfers
        self._boot_id = boot_id
        self._finish_writes = finish_writes
        self._waiting: list[_Waiting] = []
        """The offers in the order of their texts' first ones."""
        self._fetches: dict[TransferId, list[_Text]] = {}
        self._cancelled: set[TransferId] = set()
        self.counts = ReturnCounts()

    def owns(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._fetches

    def offered(self, offer: BlocksOffered) -> None:
        """Notes an offer, whose blocks ``poll`` fetches."""
        self._wait(offer, begun=0)

    def _wait(self, offer: BlocksOffered, begun: int) -> None:
        found = len(self._match(offer))
        if found == len(offer.hashes):
            return
        text, new = set(offer.hashes), _Waiting(offer, offer.hashes[found], begun)
        continued = [i for i, other in enumerate(self._waiting) if other.offer.hashes[-1] in text]
        if found < begun or (not continued and len(self._waiting) >= MAX_WAITING):
            self.counts.offers_dropped += 1
        elif continued:
            self._waiting[continued[0]] = new
            for i in reversed(continued[1:]):
                del self._waiting[i]
        else:
            self._waiting.append(new)

    def poll(self, scheduler: Scheduler) -> None:
        """Begins fetches for offers that wait, or cancels those under way if live requests need their blocks."""
        if self._fetches and not self._has_spare(scheduler.blocks_wanted):
            for transfer in self._fetches.keys() - self._cancelled:
                self._cancelled.add(transfer)
                self._transfers.cancel_fetch(transfer)
            return
        if not self._waiting or not self._blocks_left:
            return
        wanted = scheduler.blocks_wanted
        coming = {text.hashes[0] for texts in self._fetches.values() for text in texts}
        blocks_left, fetches_left = self._blocks_left, MAX_FETCHES - len(self._fetches)
        batches: dict[PrefillTarget, list[_Text]] = {}
        for waiting in list(self._waiting):
            holder = waiting.offer.holder
            batch = batches.get(holder, [])
            if blocks_left <= 0:
                break
            if (
                waiting.missing in coming
                or len(batch) >= self._max_texts
                or (not batch and len(batches) == fetches_left)
            ):
                continue
            # One message names all blocks of a fetch.
            most = min(blocks_left, MAX_HASHES - sum(len(text.hashes) for text in batch))
            text = self._reserve(waiting, most, wanted, coming) if most > 0 else None
            if text is not None:
                batches[holder] = [*batch, text]
                blocks_left -= len(text.hashes)
        for holder, texts in batches.items():
            self._fetch(holder, texts)

    def _has_spare(self, wanted: Sequence[int]) -> bool:
        """Returns whether so many blocks of each cache group can be taken, which live requests may need next."""
        return all(pool.num_free >= blocks for pool, blocks in zip(self._blocks.pools, wanted, strict=True))

    @property
    def _blocks_left(self) -> int:
        """The number of blocks that may be fetched beside those under way."""
        if len(self._fetches) >= MAX_FETCHES:
            return 0
        taken = sum(len(text.hashes) for texts in self._fetches.values() for text in texts)
        return max(1, self._blocks.num_blocks // POOL_SHARE) - taken

    def _reserve(
        self, waiting: _Waiting, blocks_left: int, reserved: Sequence[int], coming: set[bytes]
    ) -> _Text | None:
        """Returns what can be fetched now of an offer that waits, with blocks for it; None if that is nothing.

        ``reserved`` blocks of each cache group are left to live requests.
        """
        offer = waiting.offer
        found = self._match(offer)
        lacked = offer.hashes[len(found) :]
        if lacked and lacked[0] in coming:
            # What was missing first is here by now, and another offer's fetch brings what comes next.
            self._waiting[self._waiting.index(waiting)] = replace(waiting, missing=lacked[0])
            return None
        self._waiting.remove(waiting)
        if not lacked:
            return None
        free = min(self._blocks.free_beside(found) - reserved[0], blocks_left)
        hashes = lacked[: max(0, free)]
        if self._order.has_groups and len(hashes) < len(lacked):
            # A part of them is of no use.
            hashes = ()
        if not hashes or len(found) < waiting.begun:
            self.counts.offers_dropped += 1
            return None
        table = BlockTable()
        self._blocks.share_prefix(table, offer.hashes, found)
        tokens = (len(found) + len(hashes)) * self._blocks.block_size
        self._blocks.grow(table, tokens)
        if self._order.has_groups and not self._take_bounded(table, tokens, reserved):
            self._blocks.free(table)
            self.counts.offers_dropped += 1
            return None
        coming.add(hashes[0])
        return _Text(offer, table, hashes, len(hashes) == len(lacked), waiting.begun)

    def _take_bounded(self, table: BlockTable, tokens: int, reserved: Sequence[int]) -> bool:
        """Takes what other cache groups keep behind so many tokens, if enough of them is left to live requests."""
        plenty = all(pool.num_free * POOL_SHARE >= len(pool.ids) for pool in self._blocks.pools[1:])
        if not plenty or not self._blocks.grow_bounded(table, tokens, tokens):
            return False
        return self._has_spare([0, *reserved[1:]])

    def _fetch(self, holder: PrefillTarget, texts: list[_Text]) -> None:
        transfer = TransferId(new_id(), 0, self._boot_id)
        self._fetches[transfer] = texts
        for text in texts:
            log.debug(
                "request_id=%s transfer=%s holder=%s blocks=%d returned after %d",
                text.offer.request_id or "-",
                transfer,
                holder.name,
                len(text.hashes),
                len(text.table) - len(text.hashes),
            )
        self._finish_writes()
        self._transfers.fetch(
            CachedFetchOrder(
                transfer_id=transfer,
                target=holder,
                hashes=tuple(block_hash for text in texts for block_hash in text.hashes),
                block_ids=tuple(block for text in texts for block in self._places(text)),
                deadline_s=TIMEOUT_S,
                request_id=texts[0].offer.request_id,
            )
        )

    def _places(self, text: _Text) -> tuple[int, ...]:
        """Returns where the blocks of a text land."""
        tokens = len(text.table) * self._blocks.block_size
        return self._order.ids(text.table, len(text.table) - len(text.hashes), tokens)

    def on_event(self, event: FetchEnd) -> None:
        """Lets the blocks of a fetch rest in the prefix cache that ended with this event, as many as have landed."""
        texts = self._fetches.pop(event.transfer_id)
        self._cancelled.discard(event.transfer_id)
        self._blocks.quarantine(event.quarantined)
        if isinstance(event, FetchFailed):
            log.debug("transfer=%s failed (%s): %s", event.transfer_id, event.kind.value, event.reason)
        if self._order.has_groups:
            self._end_with_all(texts[0], event)
            return
        landed = self._rest(texts, event.landed)
        again = [(text.offer, len(text.table)) for text in landed if not text.complete]
        if isinstance(event, FetchLanded):
            # The engine has no more of the text behind these. What it has of the others, it was not asked yet.
            again += [(text.offer, text.begun) for text in texts[len(landed) + 1 :]]
        for text in texts:
            self._blocks.free(text.table)
        self.counts.blocks_returned += event.landed
        for offer, begun in again:
            self._wait(offer, begun)

    def _end_with_all(self, text: _Text, event: FetchEnd) -> None:
        """Acts on the end of a fetch of a model with cache groups, of which all has landed or nothing."""
        count, offer = len(text.table), text.offer
        if event.landed and event.landed == len(self._places(text)):
            self._rest([text], len(text.hashes))
            self._blocks.remember_bounded(text.table, offer.hashes, 0, count)
            self._blocks.next_states(text.table)
            self._blocks.remember_states(text.table, offer.hashes[count - 1], count)
            self.counts.blocks_returned += len(text.hashes)
        self._blocks.free(text.table)
        usable = event.usable if isinstance(event, FetchLanded) and not event.landed else 0
        if 0 < usable < len(text.hashes):
            # The holder has what is needed behind fewer blocks.
            first = count - len(text.hashes)
            self._wait(replace(offer, hashes=offer.hashes[: first + usable]), text.begun)

    def _rest(self, texts: list[_Text], landed: int) -> list[_Text]:
        """Lets the first ``landed`` blocks of all texts be found. Returns the texts that have landed completely."""
        for number, text in enumerate(texts):
            for block, block_hash in zip(text.new_blocks[:landed], text.hashes, strict=False):
                self._blocks.remember(block, block_hash)
            landed -= len(text.hashes)
            if landed < 0:
                return texts[:number]
        return texts

    def _match(self, offer: BlocksOffered) -> list[int]:
        found = self._blocks.match(offer.hashes, len(offer.hashes), Match())
        return list(found[: self._blocks.usable_prefix(offer.hashes, len(found))])
