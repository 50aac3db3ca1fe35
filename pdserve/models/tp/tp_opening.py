"""Opens the group that a rank is in."""

from __future__ import annotations

from pathlib import Path

import torch

from pdserve.config import ParallelConfig, TpBackend
from pdserve.errors import ConfigError
from pdserve.models.backend import CPU
from pdserve.models.tp.rank_board import RankBoard
from pdserve.models.tp.shared_memory_group import SharedMemoryGroup, ordered_stores
from pdserve.models.tp.shares import TpGroup
from pdserve.models.tp.torch_group import GlooGroup, NcclGroup


def open_group(
    config: ParallelConfig, rank: int, board: RankBoard, rendezvous: Path, device: torch.device = CPU
) -> TpGroup:
    """Opens the group, once the other ranks have come.

    All ranks give the same ``config``, ``board`` and ``rendezvous``, and the same kind of device.


    Raises RankLost if the others do not come, ConfigError if this machine cannot do what the config asks.
    """
    timeout_s = config.timeout_ms / 1000
    match tp_backend(config.backend, device):
        case TpBackend.NCCL:
            torch.cuda.set_device(device)
            return NcclGroup(rendezvous, board, rank, config.tensor_parallel_size, timeout_s, device)
        case TpBackend.GLOO:
            return GlooGroup(rendezvous, board, rank, config.tensor_parallel_size, timeout_s)
        case _:
            return SharedMemoryGroup(board, rank, config.tensor_parallel_size, timeout_s)


def tp_backend(asked: TpBackend, device: torch.device) -> TpBackend:
    """Returns the backend to use on this kind of device, never AUTO. Raises ConfigError if ``asked`` cannot be used."""
    fastest = TpBackend.NCCL if device.type == "cuda" else TpBackend.SHM if ordered_stores() else TpBackend.GLOO
    if asked is TpBackend.AUTO:
        return fastest
    if (asked is TpBackend.NCCL) != (device.type == "cuda"):
        raise ConfigError(
            f"--tp-backend {asked.value} is for {'GPUs' if asked is TpBackend.NCCL else 'CPUs'}, and the ranks compute"
            f" on {'GPUs' if device.type == 'cuda' else 'CPUs'}; take {fastest.value}"
        )
    if asked is TpBackend.SHM and not ordered_stores():
        raise ConfigError("--tp-backend shm needs an x86 CPU; take gloo")
    return asked
