"""A mixed node's connector."""

from __future__ import annotations

from pdserve.engine.block_manager import BlockManager
from pdserve.engine.plan import Plan
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.transfer import FailureCause
from pdserve_kvtransfer.stats import TransferStats


class NoTransfer:
    """A mixed node: every prompt is computed where it is decoded."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def poll(self, scheduler: Scheduler, now: float) -> None:
        pass

    def start(self, plan: Plan, now: float) -> None:
        if plan.fetches:
            raise EngineError("a mixed node was asked to fetch a prompt")

    def stepped(self, scheduler: Scheduler, plan: Plan) -> None:
        pass

    def give_up(self, request: Request, reason: str, cause: FailureCause) -> None:
        pass

    def release(self, request: Request) -> None:
        self._blocks.free(request.block_table)

    def stats(self) -> TransferStats:
        return TransferStats()

    def close(self) -> None:
        pass
