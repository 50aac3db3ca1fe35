"""The engine's side of KV transfer: the only module of the engine that knows ``pdserve_kvtransfer``.

A connector owns the question of who may still touch a request's blocks. ``release`` is called once for a request's
blocks, whatever ended it; they return to the pool only when no transfer can write to them or read from them any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from pdserve_kvtransfer.events import (
    BlocksReleased,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushWanted,
    TransferThreadDied,
)
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.stats import TransferStats
from pdserve_kvtransfer.thread import TransferThread

from pdserve.config import EngineConfig, TransferConfig
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.request import Request, Status
from pdserve.engine.scheduler import Plan, Scheduler
from pdserve.errors import EngineError
from pdserve.wire.discovery import Role
from pdserve.wire.engine import PrefillSource
from pdserve.wire.ids import TransferId
from pdserve.wire.transfer import EngineSpec

CLOSE_TIMEOUT_S = 5.0


class KvConnector(Protocol):
    """What the step loop needs of a role's transfers."""

    def poll(self, scheduler: Scheduler, now: float) -> None:
        """Act on everything that transfers have reported."""

    def start(self, plan: Plan, now: float) -> None:
        """Ask prefill nodes for the prompts that this plan does not compute itself."""

    def stepped(self, scheduler: Scheduler, plan: Plan) -> None:
        """A plan was computed: pass on what became final."""

    def give_up(self, request: Request, reason: str) -> None:
        """The request is about to be ended by this node's own decision."""

    def release(self, request: Request) -> None:
        """Take a request's blocks."""

    def stats(self) -> TransferStats: ...

    def close(self) -> None:
        """End every transfer; bounded."""


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

    def give_up(self, request: Request, reason: str) -> None:
        pass

    def release(self, request: Request) -> None:
        self._blocks.free(request.block_table)

    def stats(self) -> TransferStats:
        return TransferStats()

    def close(self) -> None:
        pass


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
                case FirstTokenArrived(transfer, token_id, cached_tokens):
                    request = self._fetching.get(transfer)
                    # A second prefill node after a failed first one repeats the token that the client already has.
                    if request is not None and request.num_generated_tokens == 0:
                        request.cached_tokens = cached_tokens
                        request.prefill_source = PrefillSource.REMOTE
                        scheduler.accept_token(request, token_id, now)
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


class Pushing:
    """A prefill node: every request comes from a decode node, and its blocks go there."""

    def __init__(self, blocks: BlockManager, thread: TransferThread, misfit: Callable[[list[int]], str | None]) -> None:
        """``misfit`` says why a prompt cannot be computed here, if so."""
        self._blocks = blocks
        self._thread = thread
        self._misfit = misfit
        self._pushing: dict[TransferId, Request] = {}
        self._ending: dict[TransferId, list[int]] = {}

    def poll(self, scheduler: Scheduler, now: float) -> None:
        for event in self._thread.events():
            match event:
                case PushWanted():
                    self._accept(event, scheduler, now)
                case PushCancelled(transfer):
                    cancelled = self._pushing.get(transfer)
                    if cancelled is not None:
                        scheduler.abort(cancelled)
                case PushEnded(transfer):
                    self._ended(scheduler, transfer)
                case TransferThreadDied(message):
                    raise EngineError(f"the transfer thread died: {message}")
                case _:
                    raise EngineError(f"a prefill node cannot act on {event}")

    def _accept(self, order: PushWanted, scheduler: Scheduler, now: float) -> None:
        misfit = self._misfit(order.token_ids)
        if misfit is not None:
            self._ending[order.transfer_id] = []
            self._thread.fail_push(order.transfer_id, misfit)
            return
        request = Request(
            uuid=order.transfer_id.request,
            token_ids=list(order.token_ids),
            num_prompt_tokens=len(order.token_ids),
            sampling=order.sampling,
            arrived=now,
            deadline=now + order.deadline_s,
            transfer=order.transfer_id,
            first_block=order.first_block,
        )
        self._pushing[order.transfer_id] = request
        scheduler.add(request)

    def _ended(self, scheduler: Scheduler, transfer: TransferId) -> None:
        request = self._pushing.pop(transfer, None)
        if request is None:
            self._blocks.free(self._ending.pop(transfer))
            return
        request.transfer = None
        scheduler.abort(request)

    def start(self, plan: Plan, now: float) -> None:
        if plan.fetches:
            raise EngineError("a prefill node was asked to fetch a prompt")

    def stepped(self, scheduler: Scheduler, plan: Plan) -> None:
        for work in plan.work:
            request = work.request
            if request.transfer is None or request.status is not Status.RUNNING:
                continue
            complete = request.num_generated_tokens > 0
            if complete:
                final = self._blocks.blocks_for(request.num_prompt_tokens)
            else:
                final = request.num_computed_tokens // self._blocks.block_size
            first = max(request.pushed_blocks, request.first_block)
            if final > first:
                self._thread.push(request.transfer, first, tuple(request.block_table[first:final]))
                request.pushed_blocks = final
            if complete:
                self._thread.first_token(request.transfer, request.token_ids[-1], request.cached_tokens)
                scheduler.pushed_all(request)

    def give_up(self, request: Request, reason: str) -> None:
        if request.transfer is not None:
            self._thread.fail_push(request.transfer, reason)

    def release(self, request: Request) -> None:
        if request.transfer is None:
            self._blocks.free(request.block_table)
        elif request.status is Status.FINISHED:
            del self._pushing[request.transfer]
            self._ending[request.transfer] = request.block_table
            request.block_table = []
        else:
            raise EngineError("a prefill node cannot preempt: the request's blocks may be in flight")

    def stats(self) -> TransferStats:
        return self._thread.stats()

    def close(self) -> None:
        self._thread.close(CLOSE_TIMEOUT_S)


def open_connector(
    config: EngineConfig,
    spec: EngineSpec,
    kv_cache: torch.Tensor,
    blocks: BlockManager,
    wake: Callable[[], None],
    misfit: Callable[[list[int]], str | None],
) -> tuple[KvConnector, str]:
    """The connector of this node's role, running, and the address of its control channel (empty if it has none).

    Raises TransferError if its sockets or UCX cannot be opened.
    """
    if config.role is Role.MIXED:
        return NoTransfer(blocks), ""
    memory = memoryview(kv_cache.view(torch.uint8).flatten().numpy())  # type: ignore[arg-type]
    thread = TransferThread(
        role=config.role,
        boot_id=config.boot_id,
        secret=config.secret,
        spec=spec,
        region=KvRegion(memory, memory.nbytes // blocks.num_blocks),
        config=config.transfer,
        wake=wake,
    )
    control = thread.start()
    if config.role is Role.PREFILL:
        return Pushing(blocks, thread, misfit), control
    return Fetching(blocks, thread, config.transfer, config.boot_id), control
