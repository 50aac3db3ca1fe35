"""Opens the connector of a node's role.

This module is the last one that sees the engine's settings: the parts that it puts together get single values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pdserve.config import EngineConfig
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.connector import KvConnector, NoTransferConnector
from pdserve.engine.kv_connector.fetching_connector import FetchingConnector
from pdserve.engine.kv_connector.pushing_connector import PushingConnector, PushSchedule
from pdserve.engine.kv_connector.staging.block_copier import BlockCopier, Copier, Key, RanksCopier, copy_kernels
from pdserve.engine.kv_connector.staging.staged_fetches import StagedFetches
from pdserve.engine.kv_connector.staging.staged_pushes import StagedPushes
from pdserve.engine.kv_connector.staging.staging_blocks import StagingBlocks
from pdserve.engine.kv_connector.transfer_memory import open_memory
from pdserve.engine.kv_connector.transfers import Fetches, Pushes
from pdserve.engine.placement.placement import Placement
from pdserve.engine.scheduling.request_limits import PromptRule
from pdserve.engine.tp.tp_ranks import Ranks
from pdserve.wire.discovery import Role
from pdserve.wire.frame import Secrets
from pdserve.wire.transfer import EngineSpec
from pdserve_kvtransfer.configuration import side_settings
from pdserve_kvtransfer.shared_memory import SharedMemory
from pdserve_kvtransfer.thread import TransferThread


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
) -> tuple[KvConnector, str]:
    """Returns the running connector of this node's role, and the address of its control channel (empty if it has none).

    ``shared`` is the memory that holds ``kv_cache``, if decode engines may map it. ``ranks`` are this node's other
    ranks, each of which opens its own ``rank_transfer``. ``wake`` is called from other threads when ``poll`` has news.

    Raises TransferError if its sockets or UCX cannot be opened, ConfigError if its host memory cannot be had.
    """
    if config.role is Role.MIXED:
        return NoTransferConnector(blocks), ""
    memory = open_memory(config.role, config.transfer, Path(config.cache_dir), spec.tp_size, kv_cache, shared)
    staging = memory.staging
    thread = TransferThread(
        role=config.role,
        boot_id=config.boot_id,
        secret=secrets,
        spec=spec,
        region=memory.region,
        settings=side_settings(config.transfer),
        transport=memory.transport,
        wake=wake,
        ranks=() if ranks is None else ranks.transfer_addresses,
        max_prompt_tokens=prompts.max_prompt_tokens,
        reports_sent=staging is not None,
    )
    control = thread.start()
    if config.role is Role.PREFILL:
        pushes: Pushes = thread
        if staging is not None:
            pushes = StagedPushes(thread, _copier(kv_cache, staging, wake, ranks), StagingBlocks(len(staging)))
        pushing = PushingConnector(
            blocks,
            pushes,
            prompts.misfit,
            config.scheduler.max_waiting,
            PushSchedule(config.transfer.overlap),
            placement.rate,
            memory.finish_writes,
        )
        return pushing, control
    fetches: Fetches = thread
    if staging is not None:
        fetches = StagedFetches(thread, _copier(kv_cache, staging, wake, ranks), StagingBlocks(len(staging)))
    timeout_s = config.transfer.prefill_timeout_ms / 1000
    fetching = FetchingConnector(
        blocks, fetches, timeout_s, config.boot_id, placement, prompts.vocab_size, memory.finish_writes
    )
    return fetching, control


def _copier(
    kv_cache: torch.Tensor, staging: torch.Tensor, wake: Callable[[], None], ranks: Ranks | None
) -> Copier[Key]:
    own: BlockCopier[Key] = BlockCopier(kv_cache, staging, copy_kernels(kv_cache.device), wake)
    return own if ranks is None else RanksCopier(own, ranks)
