"""The connector of a node with peers, which fetches prompts from other nodes and pushes those that they order here."""

from __future__ import annotations

import math

from pdserve.engine.kv_connector.cached_blocks import ReusingConnector
from pdserve.engine.kv_connector.connector import CLOSE_TIMEOUT_S
from pdserve.engine.kv_connector.holding_connector import HoldingConnector
from pdserve.engine.kv_connector.kv_return import ReturningConnector
from pdserve.engine.kv_connector.prompt_fetcher import FetchingConnector
from pdserve.engine.kv_connector.prompt_pusher import PushingConnector
from pdserve.engine.kv_connector.return_offers import ReturnOffers
from pdserve.engine.kv_connector.transfers import Transfers
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.engine_counts import ReturnCounts
from pdserve.wire.transfer import FailureCause
from pdserve_kvtransfer.events import (
    BlocksOffered,
    BlocksSent,
    CachedWanted,
    FetchCancelled,
    FetchEnd,
    FetchFailed,
    FetchLanded,
    PushCancelled,
    PushEnded,
    PushWanted,
    TransferEvent,
    TransferThreadDied,
)
from pdserve_kvtransfer.stats import TransferStats

LOAD_S = 0.25
"""A node without pushes says so often at most that it has more or fewer streams."""


class TransferConnector:
    """A ``KvConnector``. A request of this node's clients may have a fetch, and any other request has a push."""

    def __init__(
        self,
        transfers: Transfers,
        fetching: FetchingConnector,
        pushing: PushingConnector,
        reusing: ReusingConnector,
        holding: HoldingConnector,
        offers: ReturnOffers | None = None,
        returning: ReturningConnector | None = None,
    ) -> None:
        """This object closes ``transfers``, whose events it gives to the parts.

        Without ``offers`` and ``returning``, no generated blocks are returned from here, and to here.
        """
        self._transfers = transfers
        self._fetching = fetching
        self._pushing = pushing
        self._reusing = reusing
        self._holding = holding
        self._offers = offers
        self._returning = returning
        self._told_running = 0
        """The number of running requests when this node last told its load, and when that was."""
        self._told_at = -math.inf

    def poll(self, scheduler: Scheduler, now: float) -> None:
        was_busy = self._pushing.busy
        for event in self._transfers.events():
            self._on_event(scheduler, event, now)
        if self._returning is not None:
            self._returning.poll(scheduler)
        if was_busy or self._pushing.busy or self._streams_changed(scheduler.num_running, now):
            self._told_running, self._told_at = scheduler.num_running, now
            self._pushing.tell_load(scheduler)

    def _streams_changed(self, running: int, now: float) -> bool:
        """Returns whether other nodes have to hear of this one's load though it has no pushes.

        Adding up its queue in each step would cost time. The last stream's end is told at once: no step may follow.
        """
        return running != self._told_running and (not running or now >= self._told_at + LOAD_S)

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

    def stepped(self, scheduler: Scheduler, plan: BatchPlan, now: float) -> None:
        self._pushing.stepped(scheduler, plan)
        if self._offers is not None:
            self._offers.stepped(plan, now)

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
