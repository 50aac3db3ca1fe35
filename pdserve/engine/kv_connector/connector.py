"""What the step loop sees of KV transfer: the contract, and the connectors of nodes without and with peers.

``TransferConnector`` gives the events of its ``transfers`` to its parts. A part fetches or pushes prompts
(``PromptFetcher``, ``PromptPusher``) or blocks that are cached already (``CachedFetcher``, ``CachedPusher``), and two
of them bring an answer's blocks back (``ReturnOffers``, ``ReturnFetcher``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.cached_blocks import CachedFetcher, CachedPusher
from pdserve.engine.kv_connector.kv_return import ReturnFetcher, ReturnOffers
from pdserve.engine.kv_connector.prompt_fetcher import PromptFetcher
from pdserve.engine.kv_connector.prompt_pusher import PromptPusher
from pdserve.engine.kv_connector.transfers import Transfers
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.engine_counts import ReturnCounts
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import FailureCause
from pdserve_kvtransfer.events import (
    BlocksOffered,
    BlocksSent,
    CachedWanted,
    FetchCancelled,
    FetchEnd,
    FetchFailed,
    FetchLanded,
    PeersMet,
    PushCancelled,
    PushEnded,
    PushWanted,
    TransferEvent,
    TransferStats,
    TransferThreadDied,
)
from pdserve_kvtransfer.transport import StepUnderWay

CLOSE_TIMEOUT_S = 5.0


class KvConnector(Protocol):
    """Moves KV blocks to and from other nodes."""

    def poll(self, scheduler: Scheduler, now: float) -> None:
        """Acts on everything that transfers have reported."""

    def start(self, plan: BatchPlan, now: float) -> None:
        """Asks prefill nodes for the prompts that this plan does not compute itself, and sends final blocks."""

    def stepped(self, scheduler: Scheduler, plan: BatchPlan, now: float) -> None:
        """Passes on the blocks that became final when ``plan`` was computed."""

    def meet(self, number: int, nodes: tuple[PrefillTarget, ...]) -> None:
        """Connects to these nodes before any prompt goes to them."""

    def give_up(self, request: Request, reason: str, cause: FailureCause) -> None:
        """Tells a decode node, with ``cause``, that this node is about to end the request by its own decision."""

    def release(self, request: Request) -> None:
        """Takes over a request's blocks, and frees them when no transfer uses them."""

    def stats(self) -> TransferStats: ...

    def returns(self) -> ReturnCounts: ...

    def close(self) -> None:
        """Ends every transfer, within ``CLOSE_TIMEOUT_S``."""


class NoTransferConnector:
    """The connector of a node that belongs to no proxy, which computes every prompt where it is decoded.

    No ticket names peers to such a node, and none of them knows its address. So it spares the memory of UCX, a port
    that somebody could attack, and the thread.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def poll(self, scheduler: Scheduler, now: float) -> None:
        pass

    def start(self, plan: BatchPlan, now: float) -> None:
        if plan.fetches or plan.reuses:
            raise EngineError("a node without peers was asked to fetch from others")

    def stepped(self, scheduler: Scheduler, plan: BatchPlan, now: float) -> None:
        pass

    def meet(self, number: int, nodes: tuple[PrefillTarget, ...]) -> None:
        pass

    def give_up(self, request: Request, reason: str, cause: FailureCause) -> None:
        pass

    def release(self, request: Request) -> None:
        self._blocks.free(request.block_table)

    def stats(self) -> TransferStats:
        return TransferStats()

    def returns(self) -> ReturnCounts:
        return ReturnCounts()

    def close(self) -> None:
        pass


LOAD_S = 0.25
"""A node without pushes says so often at most that it has more or fewer streams."""


class TransferConnector:
    """A ``KvConnector``. A request of this node's clients may have a fetch, and any other request has a push."""

    def __init__(
        self,
        transfers: Transfers,
        fetching: PromptFetcher,
        pushing: PromptPusher,
        reusing: CachedFetcher,
        holding: CachedPusher,
        offers: ReturnOffers | None = None,
        returning: ReturnFetcher | None = None,
        step: StepUnderWay | None = None,
        met: Callable[[int], None] = lambda _: None,
    ) -> None:
        """This object closes ``transfers``, whose events it gives to the parts.

        Without ``offers`` and ``returning``, no generated blocks are returned from here, and to here.
        ``step`` is told when requests decode, if steps are computed on the cores of the transfer thread.
        ``met`` is called with the number of a ``meet`` that is over.
        """
        self._transfers = transfers
        self._fetching = fetching
        self._pushing = pushing
        self._reusing = reusing
        self._holding = holding
        self._offers = offers
        self._returning = returning
        self._step = step
        self._met = met
        self._reported_running = 0
        """The number of running requests when this node last reported its load, and when that was."""
        self._reported_at = -math.inf

    def poll(self, scheduler: Scheduler, now: float) -> None:
        was_busy = self._pushing.busy
        for event in self._transfers.events():
            self._on_event(scheduler, event, now)
        if self._returning is not None:
            self._returning.poll(scheduler)
        if was_busy or self._pushing.busy or self._streams_changed(scheduler.num_running, now):
            self._reported_running, self._reported_at = scheduler.num_running, now
            self._pushing.tell_load(scheduler)

    def _streams_changed(self, running: int, now: float) -> bool:
        """Returns whether other nodes have to hear of this one's load though it has no pushes.

        Adding up its queue in each step would cost time. The last stream's end is told at once: no step may follow.
        """
        return running != self._reported_running and (not running or now >= self._reported_at + LOAD_S)

    def _on_event(self, scheduler: Scheduler, event: TransferEvent, now: float) -> None:
        match event:
            case CachedWanted():
                self._holding.wanted(event, scheduler)
            case PushCancelled(transfer) if self._holding.owns(transfer):
                self._holding.cancelled(transfer)
            case PushEnded(transfer) if self._holding.owns(transfer):
                self._holding.ended(event, scheduler)
            case BlocksOffered():
                if self._returning is not None:
                    self._returning.offered(event)
            case PushWanted() | PushCancelled() | BlocksSent() | PushEnded():
                self._pushing.on_event(scheduler, event, now)
            case FetchLanded() | FetchFailed() | FetchCancelled():
                self._on_fetch_end(scheduler, event, now)
            case PeersMet(number):
                self._met(number)
            case TransferThreadDied(message):
                raise EngineError(f"the transfer thread died: {message}")
            case _:
                self._fetching.on_event(scheduler, event, now)

    def _on_fetch_end(self, scheduler: Scheduler, event: FetchEnd, now: float) -> None:
        if self._reusing.owns(event.transfer_id):
            self._reusing.on_event(scheduler, event, now)
        elif self._returning is not None and self._returning.owns(event.transfer_id):
            self._returning.on_event(event)
        else:
            self._fetching.on_event(scheduler, event, now)

    def start(self, plan: BatchPlan, now: float) -> None:
        self._fetching.start(plan, now)
        self._reusing.start(plan, now)
        self._pushing.start(plan)
        if self._step is not None:
            self._step.decodes = 1 in (work.num_tokens for work in plan.work)

    def stepped(self, scheduler: Scheduler, plan: BatchPlan, now: float) -> None:
        if self._step is not None:
            self._step.decodes = False
        self._pushing.stepped(scheduler, plan)
        if self._offers is not None:
            self._offers.stepped(plan, now)

    def meet(self, number: int, nodes: tuple[PrefillTarget, ...]) -> None:
        self._transfers.meet(number, nodes)

    def give_up(self, request: Request, reason: str, cause: FailureCause) -> None:
        if request.serves_push:
            self._pushing.give_up(request, reason, cause)

    def release(self, request: Request) -> None:
        if request.serves_push:
            self._pushing.release(request)
            return
        if self._offers is not None and request.status is Status.FINISHED:
            self._offers.ended(request)
        if self._reusing.owns(request.transfer):
            self._reusing.release(request)
        else:
            self._fetching.release(request)

    def returns(self) -> ReturnCounts:
        return ReturnCounts() if self._returning is None else self._returning.counts

    def stats(self) -> TransferStats:
        return self._transfers.stats()

    def close(self) -> None:
        self._transfers.close(CLOSE_TIMEOUT_S)
