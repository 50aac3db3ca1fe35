"""The KV connector as the step loop sees it, whatever the node's role, and a mixed node's, which transfers nothing."""

from __future__ import annotations

from typing import Protocol

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.transfer import FailureCause
from pdserve_kvtransfer.stats import TransferStats

CLOSE_TIMEOUT_S = 5.0


class KvConnector(Protocol):
    """One for each role."""

    def poll(self, scheduler: Scheduler, now: float) -> None:
        """Act on everything that transfers have reported."""

    def start(self, plan: BatchPlan, now: float) -> None:
        """Ask prefill nodes for the prompts that this plan does not compute itself."""

    def stepped(self, scheduler: Scheduler, plan: BatchPlan) -> None:
        """A plan was computed: pass on what became final."""

    def give_up(self, request: Request, reason: str, cause: FailureCause) -> None:
        """The request is about to be ended by this node's own decision; ``cause`` is what a decode node is told."""

    def release(self, request: Request) -> None:
        """Take a request's blocks."""

    def stats(self) -> TransferStats: ...

    def close(self) -> None:
        """End every transfer; bounded."""


class NoTransferConnector:
    """A mixed node: every prompt is computed where it is decoded."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def poll(self, scheduler: Scheduler, now: float) -> None:
        pass

    def start(self, plan: BatchPlan, now: float) -> None:
        if plan.fetches:
            raise EngineError("a mixed node was asked to fetch a prompt")

    def stepped(self, scheduler: Scheduler, plan: BatchPlan) -> None:
        pass

    def give_up(self, request: Request, reason: str, cause: FailureCause) -> None:
        pass

    def release(self, request: Request) -> None:
        self._blocks.free(request.block_table)

    def stats(self) -> TransferStats:
        return TransferStats()

    def close(self) -> None:
        pass
