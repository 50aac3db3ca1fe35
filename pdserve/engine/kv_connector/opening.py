"""Opens the connector of a node, and the KV transfer of its other tensor-parallel ranks.

This module is the last one that sees the engine's settings: the parts that it puts together get single values. A rank
other than 0 has no connector. It moves its part of every block as rank 0 says (``rank_transfer``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from pdserve.config import EngineConfig, KvReturn, RankLaunch, Switch
from pdserve.control.frame import Secrets
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.cached_blocks import CachedFetcher, CachedPusher
from pdserve.engine.kv_connector.connector import CLOSE_TIMEOUT_S, KvConnector, NoTransferConnector, TransferConnector
from pdserve.engine.kv_connector.kv_return import ReturnFetcher, ReturnOffers
from pdserve.engine.kv_connector.prompt_fetcher import PromptFetcher
from pdserve.engine.kv_connector.prompt_pusher import PromptPusher, PushSchedule
from pdserve.engine.kv_connector.staging.block_copier import BlockCopier, RanksCopier, copy_kernels
from pdserve.engine.kv_connector.staging.staged_transfers import (
    BlocksToSend,
    LandedBlocks,
    StagedTransfers,
    StagingBlocks,
    StagingIds,
)
from pdserve.engine.kv_connector.transfer_memory import CacheParts, open_memory
from pdserve.engine.kv_connector.transfers import BlockOrder, Fetches, Pushes, Transfers
from pdserve.engine.placement.placement import Placement
from pdserve.engine.scheduling.request_limits import PromptRule
from pdserve.engine.tp.tp_ranks import Ranks
from pdserve.errors import ConfigError, EngineError
from pdserve.liveness import LifeBoard, LifeSign, copy_loop, transfer_loop
from pdserve.models.tp.rank_board import RankBoard
from pdserve.wire.cache_groups import GroupBlocks, split_heads
from pdserve.wire.discovery import Role
from pdserve.wire.rank import DownloadBlocks, UploadBlocks
from pdserve.wire.transfer import EngineSpec
from pdserve_kvtransfer.configuration import bound_to_loopback, side_settings
from pdserve_kvtransfer.rank_thread import RankThread
from pdserve_kvtransfer.region import SharedMemory
from pdserve_kvtransfer.thread import TransferThread
from pdserve_kvtransfer.transport import StepUnderWay
from pdserve_kvtransfer.ucx.ucx_library import loaded_ucx

log = logging.getLogger(__name__)


def ucx_label(config: EngineConfig) -> str:
    """Returns a short name of the UCX that moves KV blocks; empty if this node has no peers."""
    return loaded_ucx().label if config.has_peers else ""


def open_connector(
    config: EngineConfig,
    *,
    spec: EngineSpec,
    kv_cache: torch.Tensor,
    shared: SharedMemory | None,
    blocks: BlockManager,
    prompts: PromptRule,
    placement: Placement,
    ranks: Ranks | None,
    secrets: Secrets,
    wake: Callable[[], None],
    life: LifeBoard,
    groups: Sequence[GroupBlocks] = (),
    met: Callable[[int], None] = lambda _: None,
) -> tuple[KvConnector, str]:
    """Returns the node's running connector, and the address of its control channel, which is empty without peers.

    ``kv_cache`` has the blocks ``[num_blocks, ...]``. If ``spec`` has cache groups, it is the memory of them all, as
    bytes, in which ``groups`` says where their blocks are.
    ``shared`` is the memory that holds ``kv_cache``, if other engines may map it. ``ranks`` are this node's other
    ranks, each of which opens its own ``rank_transfer``. ``wake`` is called from other threads when ``poll`` has news.
    Its threads show ``life``. ``met`` is called in ``poll`` with the number of a ``meet`` that is over.

    Raises TransferError if its sockets or UCX cannot be opened, ConfigError if its host memory cannot be had or
    settings contradict each other.
    """
    if not config.has_peers:
        return NoTransferConnector(blocks), ""
    transfer, returns = config.transfer, returns_blocks(config)
    memory = open_memory(
        transfer, Path(config.cache_dir), spec.tp_size, kv_cache, shared, loopback=on_loopback(config), groups=groups
    )
    order = BlockOrder(blocks.block_size, spec.groups)
    step = _step_on_its_cores(kv_cache)
    thread = TransferThread(
        boot_id=config.boot_id,
        secret=secrets,
        spec=spec,
        region=memory.region,
        settings=side_settings(transfer),
        transport=memory.transport,
        wake=wake,
        ranks=() if ranks is None else ranks.transfer_addresses,
        max_prompt_tokens=prompts.max_prompt_tokens,
        reports_sent=memory.staging is not None,
        life=life.sign(transfer_loop(0)),
        step=step,
    )
    control = thread.start()
    transfers: Transfers = thread
    fetches: Fetches = thread
    pushes: Pushes = thread
    if memory.staging is not None:
        staged = _staged(thread, memory.cache, memory.staging, wake, ranks, life.sign(copy_loop(0)))
        transfers, fetches, pushes = staged, staged.fetches, staged.pushes
    fetching = PromptFetcher(
        blocks,
        fetches,
        transfer.prefill_timeout_ms / 1000,
        config.boot_id,
        placement,
        prompts.vocab_size,
        memory.finish_writes,
        order,
    )
    pushing = PromptPusher(
        blocks,
        pushes,
        prompts.misfit,
        config.scheduler.max_waiting,
        PushSchedule(transfer.overlap),
        placement,
        memory.finish_writes,
        order,
    )
    reusing = CachedFetcher(
        blocks,
        fetches,
        transfer.lease_ms / 1000,
        config.boot_id,
        placement.bytes_per_token * blocks.block_size,
        memory.finish_writes,
        order,
    )
    holding = CachedPusher(blocks, pushes, memory.finish_writes, order)
    offers = returning = None
    if returns:
        offers = ReturnOffers(fetches, blocks.block_size)
        returning = ReturnFetcher(blocks, fetches, config.boot_id, memory.finish_writes, order)
    return TransferConnector(transfers, fetching, pushing, reusing, holding, offers, returning, step, met), control


def _step_on_its_cores(kv_cache: torch.Tensor) -> StepUnderWay | None:
    """Returns where steps are announced that the transfer thread leaves the core to; None if a GPU computes them."""
    return StepUnderWay() if kv_cache.device.type == "cpu" else None


def returns_blocks(config: EngineConfig) -> bool:
    """Returns whether the engine offers and fetches the blocks of answers. Raises ConfigError if it cannot."""
    caching = config.cache.prefix_cache is Switch.ON
    if config.transfer.kv_return is KvReturn.ON and not caching:
        raise ConfigError("--kv-return on needs --prefix-cache on, because returned blocks go to the prefix cache")
    return config.transfer.kv_return is not KvReturn.OFF and caching


def on_loopback(config: EngineConfig) -> bool:
    """Returns whether a node's UCX uses the loopback device alone.

    It does if the control channel is bound there and the node needs no other machine: a node that starts as a prefill
    node, which fetches only what engines of this machine offer, and any node without a secret, which no other machine
    must reach.
    """
    return bound_to_loopback(config.transfer) and (config.role is Role.PREFILL or not config.secret)


def _staged(
    thread: TransferThread,
    cache: CacheParts,
    staging: torch.Tensor,
    wake: Callable[[], None],
    ranks: Ranks | None,
    life: LifeSign,
) -> StagedTransfers:
    half = len(staging) // 2
    own: BlockCopier[LandedBlocks | BlocksToSend] = BlockCopier(
        cache, staging, copy_kernels(cache.parts[0].device), wake, life
    )
    copier = own if ranks is None else RanksCopier(own, ranks)
    ids = StagingIds(len(staging), cache.group_of if len(cache.parts) > 1 else None)
    return StagedTransfers(thread, copier, StagingBlocks(range(half)), StagingBlocks(range(half, len(staging))), ids)


@contextmanager
def rank_transfer(
    launch: RankLaunch,
    kv_heads: int,
    kv_cache: torch.Tensor,
    board: RankBoard,
    shared: SharedMemory | None,
    life: LifeBoard,
    groups: Sequence[GroupBlocks] = (),
) -> Iterator[OrderedCopies | NoCopies]:
    """Runs this rank's transfer thread inside the block; on a node without peers there is none.

    ``shared`` is the memory that holds ``kv_cache``, if other engines may map it. Its threads show ``life``.
    ``kv_heads`` are those of a model without cache groups, and ``groups`` is as in ``open_connector``.

    Raises TransferError if the thread cannot start, ConfigError if its memory or compiled code cannot be had.
    """
    config = launch.config
    if not config.has_peers:
        yield NoCopies(None)
        return
    memory = open_memory(
        config.transfer,
        Path(config.cache_dir),
        config.parallel.tensor_parallel_size,
        kv_cache,
        shared,
        loopback=on_loopback(config),
        rank=launch.rank,
        groups=groups,
    )
    step = _step_on_its_cores(kv_cache)
    thread = RankThread(
        address=launch.transfer_address,
        rank=launch.rank,
        ranks=config.parallel.tensor_parallel_size,
        heads=split_heads([group.spec for group in groups]) or (kv_heads,),
        region=memory.region,
        transport=memory.transport,
        died=_end_process,
        life=life.sign(transfer_loop(launch.rank)),
        step=step,
    )
    thread.start()
    try:
        if memory.staging is None:
            yield NoCopies(step)
            return
        copies = OrderedCopies(
            memory.cache, memory.staging, board, launch.rank, launch.wake_fd, life.sign(copy_loop(launch.rank))
        )
        try:
            yield copies
        finally:
            copies.close(CLOSE_TIMEOUT_S)
    finally:
        thread.close(CLOSE_TIMEOUT_S)


class OrderedCopies:
    """The copies between this rank's cache and its staging memory that rank 0 orders; the board counts those done."""

    def __init__(
        self, cache: CacheParts, staging: torch.Tensor, board: RankBoard, rank: int, wake_fd: int, life: LifeSign
    ) -> None:
        """``wake_fd`` is the eventfd that wakes rank 0's step loop."""
        self._board, self._rank, self._wake_fd = board, rank, wake_fd
        kernels = copy_kernels(cache.parts[0].device)
        self._copier: BlockCopier[int] = BlockCopier(cache, staging, kernels, self._report, life)

    def order(self, order: DownloadBlocks | UploadBlocks) -> None:
        match order:
            case DownloadBlocks(blocks, staged):
                self._copier.download(0, blocks, staged)
            case UploadBlocks(staged, blocks):
                self._copier.upload(0, staged, blocks)

    def decodes(self, decodes: bool) -> None:
        """Does nothing: the step's work is the GPU's."""

    def _report(self) -> None:
        if self._copier.failure is not None:
            _end_process(self._copier.failure)
        for _ in self._copier.done():
            self._board.add_copied(self._rank)
        os.eventfd_write(self._wake_fd, 1)

    def close(self, timeout_s: float) -> None:
        self._copier.close(timeout_s)


class NoCopies:
    """Takes the place of ``OrderedCopies`` if transfers reach the cache itself, or there are no transfers."""

    def __init__(self, step: StepUnderWay | None) -> None:
        """``step`` is what the rank's transfer thread looks at."""
        self._step = step

    def decodes(self, decodes: bool) -> None:
        """Tells the rank's transfer thread whether requests decode in the step that begins, or that none goes on."""
        if self._step is not None:
            self._step.decodes = decodes

    def order(self, order: DownloadBlocks | UploadBlocks) -> None:
        raise EngineError(f"rank 0 sent {type(order).__name__} to a rank whose KV blocks are not copied")


def _end_process(reason: str) -> None:
    """Ends the rank's process at once, so that rank 0 notices. Its main thread waits for rank 0's next order."""
    log.critical("the KV transfer of this rank died: %s", reason)
    os._exit(1)
