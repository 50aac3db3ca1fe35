"""Which connector a node has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pdserve.config import EngineConfig
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.disaggregation.prefill_choice import PrefillChoice
from pdserve.engine.disaggregation.prefill_rate import PrefillRate
from pdserve.engine.followers import Followers
from pdserve.engine.kv_connector.block_mover import BlockMover, block_copies
from pdserve.engine.kv_connector.contract import KvConnector
from pdserve.engine.kv_connector.device_memory import DeviceFetches, DevicePushes, transport_for
from pdserve.engine.kv_connector.fetching import Fetching
from pdserve.engine.kv_connector.memory import region_of
from pdserve.engine.kv_connector.no_transfer import NoTransfer
from pdserve.engine.kv_connector.push_schedule import PushSchedule
from pdserve.engine.kv_connector.pushing import Pushing
from pdserve.engine.kv_connector.ranks_mover import RanksMover
from pdserve.engine.kv_connector.staged_fetches import StagedFetches, Upload
from pdserve.engine.kv_connector.staged_pushes import Sending, StagedPushes
from pdserve.engine.kv_connector.staging_memory import staging_memory
from pdserve.engine.kv_connector.staging_slots import StagingSlots
from pdserve.engine.kv_connector.transfers import Fetches, Pushes
from pdserve.engine.prompt_rule import PromptRule
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
    followers: Followers | None,
    rate: PrefillRate,
    choice: PrefillChoice,
    shared: SharedMemory | None = None,
    secrets: Secrets | None = None,
) -> tuple[KvConnector, str]:
    """The connector of this node's role, running, and the address of its control channel (empty if it has none).

    ``followers`` are this node's other ranks, each with its ``rank_transfer``. ``rate`` is told to decode nodes, and
    ``choice`` is told what prefill nodes do. ``shared`` is what ``kv_cache`` is kept in, if anything. ``secrets``
    may change while it runs; without them it is ``config.secret`` for good.

    Raises TransferError if its sockets or UCX cannot be opened, ConfigError if its host memory cannot be had.
    """
    if config.role is Role.MIXED:
        return NoTransfer(blocks), ""
    memory = staging_memory(config, kv_cache)
    moved = kv_cache if memory is None else memory
    thread = TransferThread(
        role=config.role,
        boot_id=config.boot_id,
        secret=config.secret if secrets is None else secrets,
        spec=spec,
        region=region_of(moved, shared),
        config=config.transfer,
        ranks=() if followers is None else followers.transfer_addresses,
        wake=wake,
        transport=transport_for(config.role, config.transfer, Path(config.cache_dir), moved.device),
        max_prompt_tokens=prompts.max_prompt_tokens,
        reports_sent=memory is not None,
    )
    control = thread.start()
    copying = None if memory is None else _Copying(kv_cache, memory, wake, followers)
    if config.role is Role.PREFILL:
        pushes: Pushes = thread if copying is None else copying.pushes(thread)
        if moved.device.type == "cuda":
            pushes = DevicePushes(pushes, partial(torch.cuda.synchronize, moved.device))
        schedule = PushSchedule(config.transfer.overlap)
        return Pushing(blocks, pushes, prompts.misfit, config.scheduler.max_waiting, schedule, rate), control
    fetches: Fetches = thread if copying is None else copying.fetches(thread)
    if moved.device.type == "cuda":
        fetches = DeviceFetches(fetches, partial(torch.cuda.synchronize, moved.device))
    return Fetching(blocks, fetches, config.transfer, config.boot_id, choice, prompts.vocab_size), control


@dataclass(frozen=True, slots=True)
class _Copying:
    """What stands before the transfer thread where blocks pass through host memory."""

    cache: torch.Tensor
    memory: torch.Tensor
    wake: Callable[[], None]
    followers: Followers | None

    def fetches(self, thread: TransferThread) -> StagedFetches:
        own: BlockMover[Upload] = BlockMover(self.cache, self.memory, block_copies(self.cache.device), self.wake)
        mover = own if self.followers is None else RanksMover(own, self.followers)
        return StagedFetches(thread, mover, StagingSlots(len(self.memory)))

    def pushes(self, thread: TransferThread) -> StagedPushes:
        own: BlockMover[Sending] = BlockMover(self.cache, self.memory, block_copies(self.cache.device), self.wake)
        mover = own if self.followers is None else RanksMover(own, self.followers)
        return StagedPushes(thread, mover, StagingSlots(len(self.memory)))
