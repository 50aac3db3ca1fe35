"""Which connector a node has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdserve.config import EngineConfig
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.kv_connector.contract import KvConnector
from pdserve.engine.kv_connector.fetching import Fetching
from pdserve.engine.kv_connector.memory import region_of
from pdserve.engine.kv_connector.no_transfer import NoTransfer
from pdserve.engine.kv_connector.pushing import Pushing
from pdserve.wire.discovery import Role
from pdserve.wire.transfer import EngineSpec
from pdserve_kvtransfer.thread import TransferThread


def open_connector(
    config: EngineConfig,
    spec: EngineSpec,
    kv_cache: torch.Tensor,
    blocks: BlockManager,
    wake: Callable[[], None],
    misfit: Callable[[list[int]], str | None],
    ranks: tuple[str, ...],
) -> tuple[KvConnector, str]:
    """The connector of this node's role, running, and the address of its control channel (empty if it has none).

    ``ranks`` are the addresses of the other ranks' ``rank_transfer``, in rank order.

    Raises TransferError if its sockets or UCX cannot be opened.
    """
    if config.role is Role.MIXED:
        return NoTransfer(blocks), ""
    thread = TransferThread(
        role=config.role,
        boot_id=config.boot_id,
        secret=config.secret,
        spec=spec,
        region=region_of(kv_cache),
        config=config.transfer,
        ranks=ranks,
        wake=wake,
    )
    control = thread.start()
    if config.role is Role.PREFILL:
        return Pushing(blocks, thread, misfit, config.scheduler.max_waiting), control
    return Fetching(blocks, thread, config.transfer, config.boot_id), control
