"""Which connector a node has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.config import EngineConfig, KvStaging
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.kv_connector.block_mover import BlockMover, block_copies
from pdserve.engine.kv_connector.contract import KvConnector
from pdserve.engine.kv_connector.fetching import Fetching
from pdserve.engine.kv_connector.memory import region_of
from pdserve.engine.kv_connector.no_transfer import NoTransfer
from pdserve.engine.kv_connector.pushing import Pushing
from pdserve.engine.kv_connector.staged_fetches import StagedFetches
from pdserve.engine.kv_connector.staged_pushes import Download, StagedPushes
from pdserve.engine.kv_connector.staging_slots import StagingSlots
from pdserve.errors import ConfigError
from pdserve.wire.discovery import Role
from pdserve.wire.ids import TransferId
from pdserve.wire.transfer import EngineSpec
from pdserve_kvtransfer.thread import TransferThread

MIB = 2**20


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

    Raises TransferError if its sockets or UCX cannot be opened, ConfigError if its host memory cannot be had.
    """
    if config.role is Role.MIXED:
        return NoTransfer(blocks), ""
    staging = _Staging.of(config, kv_cache, wake)
    thread = TransferThread(
        role=config.role,
        boot_id=config.boot_id,
        secret=config.secret,
        spec=spec,
        region=region_of(kv_cache if staging is None else staging.memory),
        config=config.transfer,
        ranks=ranks,
        wake=wake,
    )
    control = thread.start()
    if config.role is Role.PREFILL:
        pushes = thread if staging is None else staging.pushes(thread, spec.block_size)
        return Pushing(blocks, pushes, misfit, config.scheduler.max_waiting), control
    fetches = thread if staging is None else staging.fetches(thread)
    return Fetching(blocks, fetches, config.transfer, config.boot_id), control


@dataclass(frozen=True, slots=True)
class _Staging:
    """Host memory that stands before the cache."""

    cache: torch.Tensor
    memory: torch.Tensor
    wake: Callable[[], None]

    @classmethod
    def of(cls, config: EngineConfig, cache: torch.Tensor, wake: Callable[[], None]) -> _Staging | None:
        """None where transfers reach the cache itself. Raises ConfigError if there cannot be enough of it."""
        on_gpu = cache.device.type == "cuda"
        if not on_gpu and config.transfer.staging is KvStaging.AUTO:
            return None
        if config.parallel.tp > 1:
            raise ConfigError("--kv-staging: blocks of several ranks cannot be transferred through host memory")
        slots = config.transfer.staging_mib * MIB // cache[0].nbytes
        if not slots:
            raise ConfigError(f"--kv-staging-mib {config.transfer.staging_mib} does not hold one KV block")
        return cls(cache, torch.empty(slots, *cache.shape[1:], dtype=cache.dtype, pin_memory=on_gpu), wake)

    def fetches(self, thread: TransferThread) -> StagedFetches:
        mover: BlockMover[TransferId] = BlockMover(self.cache, self.memory, block_copies(self.cache.device), self.wake)
        return StagedFetches(thread, mover, StagingSlots(len(self.memory)), self.wake)

    def pushes(self, thread: TransferThread, block_size: int) -> StagedPushes:
        mover: BlockMover[Download] = BlockMover(self.cache, self.memory, block_copies(self.cache.device), self.wake)
        return StagedPushes(thread, mover, StagingSlots(len(self.memory)), block_size)
