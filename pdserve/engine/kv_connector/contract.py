"""What the step loop needs of transfers, whatever the node's role."""

from __future__ import annotations

from typing import Protocol

from pdserve.engine.plan import Plan
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Scheduler
from pdserve.wire.transfer import FailureCause
from pdserve_kvtransfer.stats import TransferStats

CLOSE_TIMEOUT_S = 5.0


class KvConnector(Protocol):
    """One for each role."""

    def poll(self, scheduler: Scheduler, now: float) -> None:
        """Act on everything that transfers have reported."""

    def start(self, plan: Plan, now: float) -> None:
        """Ask prefill nodes for the prompts that this plan does not compute itself."""

    def stepped(self, scheduler: Scheduler, plan: Plan) -> None:
        """A plan was computed: pass on what became final."""

    def give_up(self, request: Request, reason: str, cause: FailureCause) -> None:
        """The request is about to be ended by this node's own decision; ``cause`` is what a decode node is told."""

    def release(self, request: Request) -> None:
        """Take a request's blocks."""

    def stats(self) -> TransferStats: ...

    def close(self) -> None:
        """End every transfer; bounded."""
