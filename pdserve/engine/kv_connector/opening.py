"""Which connector a node has."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdserve.config import EngineConfig
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.kv_connector.contract import KvConnector
from pdserve.engine.kv_connector.fetching import Fetching
from pdserve.engine.kv_connector.no_transfer import NoTransfer
from pdserve.engine.kv_connector.pushing import Pushing
from pdserve.errors import ConfigError
from pdserve.wire.discovery import Role
from pdserve.wire.transfer import EngineSpec
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.thread import TransferThread


def open_connector(
    config: EngineConfig,
    spec: EngineSpec,
    kv_cache: torch.Tensor,
    blocks: BlockManager,
    wake: Callable[[], None],
    misfit: Callable[[list[int]], str | None],
) -> tuple[KvConnector, str]:
    """The connector of this node's role, running, and the address of its control channel (empty if it has none).

    Raises TransferError if its sockets or UCX cannot be opened, ConfigError if it cannot move what the ranks hold.
    """
    if config.role is Role.MIXED:
        return NoTransfer(blocks), ""
    if spec.tp_size > 1:
        raise ConfigError(
            f"--tp {spec.tp_size} on a {config.role.value} node: KV blocks move only between nodes with one rank yet; "
            "tensor parallelism is for mixed nodes"
        )
    memory = memoryview(kv_cache.view(torch.uint8).flatten().numpy())  # type: ignore[arg-type]  # ndarray is a buffer, unannotated
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
        return Pushing(blocks, thread, misfit, config.scheduler.max_waiting), control
    return Fetching(blocks, thread, config.transfer, config.boot_id), control
