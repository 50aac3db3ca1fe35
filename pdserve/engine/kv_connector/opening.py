"""Which connector a node has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pdserve.config import EngineConfig
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.connector import KvConnector, NoTransferConnector
from pdserve.engine.kv_connector.fetching_connector import FetchingConnector
from pdserve.engine.kv_connector.pushing_connector import PushingConnector, PushSchedule
from pdserve.engine.kv_connector.staging.block_copier import BlockCopier, RanksCopier, copy_kernels
from pdserve.engine.kv_connector.staging.staged_fetches import LandedBlocks, StagedFetches
from pdserve.engine.kv_connector.staging.staged_pushes import BlocksToSend, StagedPushes
from pdserve.engine.kv_connector.staging.staging_blocks import StagingBlocks
from pdserve.engine.kv_connector.transfer_memory import (
    DeviceFetches,
    DevicePushes,
    region_of,
    staging_memory,
    transport_for,
)
from pdserve.engine.kv_connector.transfers import Fetches, Pushes
from pdserve.engine.placement.placement import Placement
from pdserve.engine.scheduling.request_limits import PromptRule
from pdserve.engine.tp.tp_ranks import Ranks
from pdserve.wire.discovery import Role
from pdserve.wire.frame import Secrets
from pdserve.wire.transfer import EngineSpec
from pdserve_kvtransfer.shared_memory import SharedMemory
from pdserve_kvtransfer.thread import TransferThread


def open_connector(
    config: EngineConfig,
    spec: EngineSpec,
    kv_cache: torch.Tensor,
    blocks: BlockManager,
    wake: Callable[[], None],
    prompts: PromptRule,
    ranks: Ranks | None,
    placement: Placement,
    shared: SharedMemory | None = None,
    secrets: Secrets | None = None,
) -> tuple[KvConnector, str]:
    """The connector of this node's role, running, and the address of its control channel (empty if it has none).

    ``ranks`` are this node's other ranks, each with its ``rank_transfer``. ``placement`` is told what prefill nodes do,
    and its ``rate`` is told to decode nodes. ``shared`` is the memory that holds ``kv_cache``, if it is shared.
    ``secrets`` may change while the connector runs; without them, ``config.secret`` holds for good.

    Raises TransferError if its sockets or UCX cannot be opened, ConfigError if its host memory cannot be had.
    """
    if config.role is Role.MIXED:
        return NoTransferConnector(blocks), ""
    memory = staging_memory(config, kv_cache)
    moved = kv_cache if memory is None else memory
    thread = TransferThread(
        role=config.role,
        boot_id=config.boot_id,
        secret=config.secret if secrets is None else secrets,
        spec=spec,
        region=region_of(moved, shared),
        config=config.transfer,
        ranks=() if ranks is None else ranks.transfer_addresses,
        wake=wake,
        transport=transport_for(config.role, config.transfer, Path(config.cache_dir), moved.device),
        max_prompt_tokens=prompts.max_prompt_tokens,
        reports_sent=memory is not None,
    )
    control = thread.start()
    copying = None if memory is None else _Copying(kv_cache, memory, wake, ranks)
    if config.role is Role.PREFILL:
        pushes: Pushes = thread if copying is None else copying.pushes(thread)
        if moved.device.type == "cuda":
            pushes = DevicePushes(pushes, partial(torch.cuda.synchronize, moved.device))
        schedule = PushSchedule(config.transfer.overlap)
        max_waiting = config.scheduler.max_waiting
        return PushingConnector(blocks, pushes, prompts.misfit, max_waiting, schedule, placement.rate), control
    fetches: Fetches = thread if copying is None else copying.fetches(thread)
    if moved.device.type == "cuda":
        fetches = DeviceFetches(fetches, partial(torch.cuda.synchronize, moved.device))
    return FetchingConnector(blocks, fetches, config.transfer, config.boot_id, placement, prompts.vocab_size), control


@dataclass(frozen=True, slots=True)
class _Copying:
    """What stands before the transfer thread where blocks pass through host memory."""

    cache: torch.Tensor
    memory: torch.Tensor
    wake: Callable[[], None]
    ranks: Ranks | None

    def fetches(self, thread: TransferThread) -> StagedFetches:
        own: BlockCopier[LandedBlocks] = BlockCopier(
            self.cache, self.memory, copy_kernels(self.cache.device), self.wake
        )
        copier = own if self.ranks is None else RanksCopier(own, self.ranks)
        return StagedFetches(thread, copier, StagingBlocks(len(self.memory)))

    def pushes(self, thread: TransferThread) -> StagedPushes:
        own: BlockCopier[BlocksToSend] = BlockCopier(
            self.cache, self.memory, copy_kernels(self.cache.device), self.wake
        )
        copier = own if self.ranks is None else RanksCopier(own, self.ranks)
        return StagedPushes(thread, copier, StagingBlocks(len(self.memory)))
