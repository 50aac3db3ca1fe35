"""The KV transfer of a tensor-parallel rank other than 0, which moves its part of every block as rank 0 says."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdserve.config import RankLaunch
from pdserve.engine.kv_connector.contract import CLOSE_TIMEOUT_S
from pdserve.engine.kv_connector.memory import region_of
from pdserve.wire.discovery import Role
from pdserve_kvtransfer.rank_thread import RankThread

log = logging.getLogger(__name__)


@contextmanager
def rank_transfer(launch: RankLaunch, kv_heads: int, kv_cache: torch.Tensor) -> Iterator[None]:
    """Running inside the block; nothing on a mixed node. Raises TransferError if it cannot start."""
    config = launch.config
    if config.role is Role.MIXED:
        yield
        return
    thread = RankThread(
        role=config.role,
        address=launch.transfer_address,
        rank=launch.rank,
        ranks=config.parallel.tp,
        kv_heads=kv_heads,
        region=region_of(kv_cache),
        config=config.transfer,
        died=_end,
    )
    thread.start()
    try:
        yield
    finally:
        thread.close(CLOSE_TIMEOUT_S)


def _end(reason: str) -> None:
    """The rank waits for rank 0's next order; rank 0 is told by the end of this process."""
    log.critical("the KV transfer of this rank died: %s", reason)
    os._exit(1)
