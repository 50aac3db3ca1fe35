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
from pdserve.engine.kv_connector.opening import on_loopback
from pdserve.engine.kv_connector.staging.block_copier import BlockCopier, copy_kernels
from pdserve.engine.kv_connector.transfer_memory import open_memory
from pdserve.errors import EngineError
from pdserve.liveness import LifeBoard, LifeSign, copy_loop, transfer_loop
from pdserve.models.tp.rank_board import RankBoard
from pdserve.wire.rank import DownloadBlocks, UploadBlocks
from pdserve_kvtransfer.rank_thread import RankThread
from pdserve_kvtransfer.shared_memory import SharedMemory

log = logging.getLogger(__name__)


@contextmanager
def rank_transfer(
    launch: RankLaunch,
    kv_heads: int,
    kv_cache: torch.Tensor,
    board: RankBoard,
    shared: SharedMemory | None,
    life: LifeBoard,
) -> Iterator[OrderedCopies | NoCopies]:
    """Runs this rank's transfer thread inside the block; on a node without peers there is none.

    ``shared`` is the memory that holds ``kv_cache``, if other engines may map it. Its threads show ``life``.

    Raises TransferError if the thread cannot start, ConfigError if its memory or compiled code cannot be had.
    """
    config = launch.config
    if not config.has_peers:
        yield NoCopies()
        return
    memory = open_memory(
        config.transfer,
        Path(config.cache_dir),
        config.parallel.tensor_parallel_size,
        kv_cache,
        shared,
        loopback=on_loopback(config),
        rank=launch.rank,
    )
    thread = RankThread(
        address=launch.transfer_address,
        rank=launch.rank,
        ranks=config.parallel.tensor_parallel_size,
        kv_heads=kv_heads,
        region=memory.region,
        transport=memory.transport,
        died=_end_process,
        life=life.sign(transfer_loop(launch.rank)),
    )
    thread.start()
    try:
        if memory.staging is None:
            yield NoCopies()
            return
        copies = OrderedCopies(
            kv_cache, memory.staging, board, launch.rank, launch.wake_fd, life.sign(copy_loop(launch.rank))
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
        self, cache: torch.Tensor, staging: torch.Tensor, board: RankBoard, rank: int, wake_fd: int, life: LifeSign
    ) -> None:
        """``wake_fd`` is the eventfd that wakes rank 0's step loop."""
        self._board, self._rank, self._wake_fd = board, rank, wake_fd
        self._copier: BlockCopier[int] = BlockCopier(cache, staging, copy_kernels(cache.device), self._report, life)

    def order(self, order: DownloadBlocks | UploadBlocks) -> None:
        match order:
            case DownloadBlocks(blocks, staged):
                self._copier.download(0, blocks, staged)
            case UploadBlocks(staged, blocks):
                self._copier.upload(0, staged, blocks)

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

    def order(self, order: DownloadBlocks | UploadBlocks) -> None:
        raise EngineError(f"rank 0 sent {type(order).__name__} to a rank whose KV blocks are not copied")


def _end_process(reason: str) -> None:
    """Ends the rank's process at once, so that rank 0 notices. Its main thread waits for rank 0's next order."""
    log.critical("the KV transfer of this rank died: %s", reason)
    os._exit(1)
