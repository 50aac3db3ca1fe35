"""Which group a rank is in."""

from __future__ import annotations

from pathlib import Path

from pdserve.config import ParallelConfig, TpBackend
from pdserve.errors import ConfigError
from pdserve.models.rank_board import RankBoard
from pdserve.models.shared_memory_group import SharedMemoryGroup, ordered_stores
from pdserve.models.tensor_parallel import TpGroup
from pdserve.models.torch_group import GlooGroup


def open_group(config: ParallelConfig, rank: int, board: RankBoard, rendezvous: Path) -> TpGroup:
    """Meets the other ranks. All of them give the same ``config``, ``board`` and ``rendezvous``.

    Raises RankLost if they do not come, ConfigError if this machine cannot do what the config asks.
    """
    timeout_s = config.timeout_ms / 1000
    if config.backend is TpBackend.SHM and not ordered_stores():
        raise ConfigError("--tp-backend shm needs an x86 CPU; take gloo")
    if config.backend is TpBackend.GLOO or not ordered_stores():
        return GlooGroup(rendezvous, board, rank, config.tp, timeout_s)
    return SharedMemoryGroup(board, rank, config.tp, timeout_s)
