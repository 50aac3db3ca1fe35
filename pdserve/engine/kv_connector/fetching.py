"""A decode node's connector."""

from __future__ import annotations

from pdserve.config import TransferConfig
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.kv_connector.contract import CLOSE_TIMEOUT_S
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Plan, Scheduler
from pdserve.errors import EngineError
from pdserve.wire.engine import PrefillSource
from pdserve.wire.ids import TransferId
from pdserve_kvtransfer.events import (
    BlocksReleased,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
    TransferThreadDied,
)
from pdserve_kvtransfer.stats import TransferStats
from pdserve_kvtransfer.thread import TransferThread


class Fetching:
    """A decode node: prompts come from prefill nodes, or are computed here when those fail."""

    def __init__(self, blocks: BlockManager, thread: TransferThread, config: TransferConfig, boot_id: bytes) -> None:
        self._blocks = blocks
        self._thread = thread
        self._timeout_s = config.prefill_timeout_ms / 1000
        self._boot_id = boot_id
        self._fetching: dict[TransferId, Request] = {}
        self._ending: dict[TransferId, list[int]] = {}

    def start(self, plan: Plan, now: float) -> None:
        for request in plan.fetches:
            target, *others = request.targets
            request.targets = tuple(others)
            transfer = TransferId(request.uuid, request.attempts, self._boot_id)
            request.attempts += 1
            request.transfer = transfer
            request.prefill_node = target.name
            request.first_block = request.num_computed_tokens // self._blocks.block_size
            last_block = self._blocks.blocks_for(request.num_prompt_tokens)
            self._fetching[transfer] = request
            self._thread.fetch(
                FetchOrder(
                    transfer_id=transfer,
                    target=target,
                    token_ids=request.token_ids[: request.num_prompt_tokens],
                    first_block=request.first_block,
                    block_ids=tuple(request.block_table[request.first_block : last_block]),
                    sampling=request.sampling,
                    deadline_s=max(0.001, min(self._timeout_s, request.deadline - now)),
                )
            )

    def poll(self, scheduler: Scheduler, now: float) -> None:
        for event in self._thread.events():
            match event:
                case FirstTokenArrived(transfer, (token, *_), cached_tokens):
                    request = self._fetching.get(transfer)
                    if request is not None:
                        request.cached_tokens = cached_tokens
                        request.prefill_source = PrefillSource.REMOTE
                        scheduler.accept_token(request, token, now)
                case FetchLanded(transfer):
                    landed = self._fetching.pop(transfer, None)
                    if landed is None:
                        self._finish_ending(transfer)
                        continue
                    landed.transfer = None
                    landed.prefill_source = PrefillSource.REMOTE
                    landed.transfer_seconds = now - (landed.first_token or now)
                    scheduler.landed(landed)
                case FetchFailed(transfer, _, landed_blocks, quarantined):
                    self._blocks.quarantine(quarantined)
                    failed = self._fetching.pop(transfer, None)
                    if failed is not None:
                        self._retry(scheduler, failed, landed_blocks, quarantined)
                    else:
                        self._finish_ending(transfer)
                case FetchCancelled(transfer, quarantined):
                    self._blocks.quarantine(quarantined)
                    self._finish_ending(transfer)
                case BlocksReleased(block_ids):
                    self._blocks.release(block_ids)
                case TransferThreadDied(message):
                    raise EngineError(f"the transfer thread died: {message}")
                case _:
                    raise EngineError(f"a decode node cannot act on {event}")

    def _retry(self, scheduler: Scheduler, request: Request, landed_blocks: int, quarantined: tuple[int, ...]) -> None:
        request.transfer = None
        request.prefill_node = ""
        request.prefill_source = PrefillSource.FALLBACK
        landed_blocks += request.first_block
        if not self._blocks.replace(request.block_table, quarantined):
            self._blocks.free(request.block_table)
            landed_blocks = 0
        scheduler.requeue(request, landed_blocks * self._blocks.block_size)

    def stepped(self, scheduler: Scheduler, plan: Plan) -> None:
        pass

    def give_up(self, request: Request, reason: str) -> None:
        pass

    def release(self, request: Request) -> None:
        if request.transfer is None:
            self._blocks.free(request.block_table)
            return
        del self._fetching[request.transfer]
        self._ending[request.transfer] = request.block_table
        request.block_table = []
        self._thread.cancel_fetch(request.transfer)
        request.transfer = None

    def _finish_ending(self, transfer: TransferId) -> None:
        self._blocks.free(self._ending.pop(transfer))

    def stats(self) -> TransferStats:
        return self._thread.stats()

    def close(self) -> None:
        self._thread.close(CLOSE_TIMEOUT_S)
