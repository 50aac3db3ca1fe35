"""The KV transfer of a tensor-parallel rank other than 0, which moves its part of every block as rank 0 says."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pdserve.config import RankLaunch
from pdserve.engine.kv_connector.connector import CLOSE_TIMEOUT_S
from pdserve.engine.kv_connector.staging.block_copier import BlockCopier, copy_kernels
from pdserve.engine.kv_connector.transfer_memory import region_of, staging_memory, transport_for
from pdserve.errors import EngineError
from pdserve.models.tp.rank_board import RankBoard
from pdserve.wire.discovery import Role
from pdserve.wire.rank import DownloadBlocks, UploadBlocks
from pdserve_kvtransfer.rank_thread import RankThread
from pdserve_kvtransfer.shared_memory import SharedMemory

log = logging.getLogger(__name__)


class RankCopies:
    """This rank's part of the copies between its cache and its host memory; the board counts what is done."""

    def __init__(self, cache: torch.Tensor, memory: torch.Tensor, board: RankBoard, rank: int, bell: int) -> None:
        self._board, self._rank, self._bell = board, rank, bell
        self._copier: BlockCopier[int] = BlockCopier(cache, memory, copy_kernels(cache.device), self._report)

    def order(self, order: DownloadBlocks | UploadBlocks) -> None:
        match order:
            case DownloadBlocks(blocks, slots):
                self._copier.download(0, blocks, slots)
            case UploadBlocks(slots, blocks):
                self._copier.upload(0, slots, blocks)

    def _report(self) -> None:
        if self._copier.failure is not None:
            _end_process(self._copier.failure)
        for _ in self._copier.done():
            self._board.add_copied(self._rank)
        os.eventfd_write(self._bell, 1)

    def close(self, timeout_s: float) -> None:
        self._copier.close(timeout_s)


class NoCopies:
    """Transfers reach the cache itself, or there are none."""

    def order(self, order: DownloadBlocks | UploadBlocks) -> None:
        raise EngineError(f"rank 0 sent {type(order).__name__} to a rank whose KV blocks are not copied")


@contextmanager
def rank_transfer(
    launch: RankLaunch, kv_heads: int, kv_cache: torch.Tensor, board: RankBoard, shared: SharedMemory | None
) -> Iterator[RankCopies | NoCopies]:
    """Running inside the block; nothing on a mixed node. ``shared`` is what ``kv_cache`` is kept in, if anything.

    Raises TransferError if it cannot start, ConfigError.
    """
    config = launch.config
    if config.role is Role.MIXED:
        yield NoCopies()
        return
    memory = staging_memory(config, kv_cache)
    moved = kv_cache if memory is None else memory
    thread = RankThread(
        role=config.role,
        address=launch.transfer_address,
        rank=launch.rank,
        ranks=config.parallel.tp,
        kv_heads=kv_heads,
        region=region_of(moved, shared),
        config=config.transfer,
        died=_end_process,
        transport=transport_for(config.role, config.transfer, Path(config.cache_dir), moved.device),
    )
    thread.start()
    try:
        if memory is None:
            yield NoCopies()
            return
        copies = RankCopies(kv_cache, memory, board, launch.rank, launch.bell)
        try:
            yield copies
        finally:
            copies.close(CLOSE_TIMEOUT_S)
    finally:
        thread.close(CLOSE_TIMEOUT_S)


def _end_process(reason: str) -> None:
    """The rank waits for rank 0's next order; rank 0 is told by the end of this process."""
    log.critical("the KV transfer of this rank died: %s", reason)
    os._exit(1)
