"""The contract between the step loop and the KV connector, and the connector of a node without peers."""

from __future__ import annotations

from typing import Protocol

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.errors import EngineError
from pdserve.wire.engine_counts import ReturnCounts
from pdserve.wire.transfer import FailureCause
from pdserve_kvtransfer.stats import TransferStats

CLOSE_TIMEOUT_S = 5.0


class KvConnector(Protocol):
    """Moves KV blocks to and from other nodes."""

    def poll(self, scheduler: Scheduler, now: float) -> None:
        """Acts on everything that transfers have reported."""

    def start(self, plan: BatchPlan, now: float) -> None:
        """Asks prefill nodes for the prompts that this plan does not compute itself, and sends final blocks."""

    def stepped(self, scheduler: Scheduler, plan: BatchPlan, now: float) -> None:
        """Passes on the blocks that became final when ``plan`` was computed."""

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
