"""The connector of a node with peers, which fetches prompts from other nodes and pushes those that they order here."""

from __future__ import annotations

from pdserve.engine.kv_connector.connector import CLOSE_TIMEOUT_S
from pdserve.engine.kv_connector.fetching_connector import FetchingConnector
from pdserve.engine.kv_connector.pushing_connector import PushingConnector
from pdserve.engine.kv_connector.transfers import Transfers
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.transfer import FailureCause
from pdserve_kvtransfer.events import BlocksSent, PushCancelled, PushEnded, PushWanted, TransferThreadDied
from pdserve_kvtransfer.stats import TransferStats


class TransferConnector:
    """A ``KvConnector``. A request of this node's clients may have a fetch, and any other request has a push."""

    def __init__(self, transfers: Transfers, fetching: FetchingConnector, pushing: PushingConnector) -> None:
        """This object closes ``transfers``, whose events it gives to the two parts."""
        self._transfers = transfers
        self._fetching = fetching
        self._pushing = pushing

    def poll(self, scheduler: Scheduler, now: float) -> None:
        was_busy = self._pushing.busy
        for event in self._transfers.events():
            match event:
                case PushWanted() | PushCancelled() | BlocksSent() | PushEnded():
                    self._pushing.on_event(scheduler, event, now)
                case TransferThreadDied(message):
                    raise EngineError(f"the transfer thread died: {message}")
                case _:
                    self._fetching.on_event(scheduler, event, now)
        # Nobody asks a node without pushes for its load, and adding up its queue in each step would cost time.
        if was_busy or self._pushing.busy:
            self._pushing.tell_load(scheduler)

    def start(self, plan: BatchPlan, now: float) -> None:
        self._fetching.start(plan, now)
        self._pushing.start(plan)

    def stepped(self, scheduler: Scheduler, plan: BatchPlan) -> None:
        self._pushing.stepped(scheduler, plan)

    def give_up(self, request: Request, reason: str, cause: FailureCause) -> None:
        if request.serves_push:
            self._pushing.give_up(request, reason, cause)

    def release(self, request: Request) -> None:
        if request.serves_push:
            self._pushing.release(request)
        else:
            self._fetching.release(request)

    def stats(self) -> TransferStats:
        return self._transfers.stats()

    def close(self) -> None:
        self._transfers.close(CLOSE_TIMEOUT_S)
