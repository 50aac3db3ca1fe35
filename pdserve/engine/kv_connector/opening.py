"""Opens the connector of a node.

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
from pdserve.engine.kv_connector.staging.block_copier import BlockCopier, RanksCopier, copy_kernels
from pdserve.engine.kv_connector.staging.staged_fetches import LandedBlocks
from pdserve.engine.kv_connector.staging.staged_pushes import BlocksToSend
from pdserve.engine.kv_connector.staging.staged_transfers import StagedTransfers
from pdserve.engine.kv_connector.staging.staging_blocks import StagingBlocks
from pdserve.engine.kv_connector.transfer_connector import TransferConnector
from pdserve.engine.kv_connector.transfer_memory import open_memory
from pdserve.engine.kv_connector.transfers import Fetches, Pushes, Transfers
from pdserve.engine.placement.placement import Placement
from pdserve.engine.scheduling.request_limits import PromptRule
from pdserve.engine.tp.tp_ranks import Ranks
from pdserve.wire.discovery import Role
from pdserve.wire.frame import Secrets
from pdserve.wire.transfer import EngineSpec
from pdserve_kvtransfer.configuration import bound_to_loopback, side_settings
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
    """Returns the node's running connector, and the address of its control channel, which is empty without peers.

    ``shared`` is the memory that holds ``kv_cache``, if other engines may map it. ``ranks`` are this node's other
    ranks, each of which opens its own ``rank_transfer``. ``wake`` is called from other threads when ``poll`` has news.

    Raises TransferError if its sockets or UCX cannot be opened, ConfigError if its host memory cannot be had.
    """
    if not config.has_peers:
        return NoTransferConnector(blocks), ""
    transfer = config.transfer
    memory = open_memory(transfer, Path(config.cache_dir), spec.tp_size, kv_cache, shared, loopback=on_loopback(config))
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
    )
    control = thread.start()
    transfers: Transfers = thread
    fetches: Fetches = thread
    pushes: Pushes = thread
    if memory.staging is not None:
        staged = _staged(thread, kv_cache, memory.staging, wake, ranks)
        transfers, fetches, pushes = staged, staged.fetches, staged.pushes
    fetching = FetchingConnector(
        blocks,
        fetches,
        transfer.prefill_timeout_ms / 1000,
        config.boot_id,
        placement,
        prompts.vocab_size,
        memory.finish_writes,
    )
    pushing = PushingConnector(
        blocks,
        pushes,
        prompts.misfit,
        config.scheduler.max_waiting,
        PushSchedule(transfer.overlap),
        placement.rate,
        memory.finish_writes,
    )
    return TransferConnector(transfers, fetching, pushing), control


def on_loopback(config: EngineConfig) -> bool:
    """Returns whether a node's UCX uses the loopback device alone.

    It does if the control channel is bound there and the node needs no other machine: a prefill node, which fetches
    nothing, and any node without a secret, which no other machine must reach.
    """
    return bound_to_loopback(config.transfer) and (config.role is Role.PREFILL or not config.secret)


def _staged(
    thread: TransferThread,
    kv_cache: torch.Tensor,
    staging: torch.Tensor,
    wake: Callable[[], None],
    ranks: Ranks | None,
) -> StagedTransfers:
    half = len(staging) // 2
    own: BlockCopier[LandedBlocks | BlocksToSend] = BlockCopier(kv_cache, staging, copy_kernels(kv_cache.device), wake)
    copier = own if ranks is None else RanksCopier(own, ranks)
    return StagedTransfers(thread, copier, StagingBlocks(range(half)), StagingBlocks(range(half, len(staging))))
