"""As much of an engine as a transfer needs: a KV cache and the transfer thread beside it. No model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.bench.transfer.messages import TransferSetup
from pdserve.config import Switch
from pdserve.engine.kv_connector.device_memory import transport_for
from pdserve.engine.kv_connector.memory import region_of
from pdserve.wire.discovery import Role
from pdserve.wire.transfer import EngineSpec
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION
from pdserve_kernels.layout import KvLayout
from pdserve_kvtransfer.shared_memory import SharedMemory
from pdserve_kvtransfer.thread import TransferThread

BLOCK_TOKENS = 16
_TILES = 2 * BLOCK_TOKENS * torch.bfloat16.itemsize
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How much KV cache, in blocks of which size. ``block_bytes`` is a multiple of 64."""

    block_bytes: int
    blocks: int

    def allocate(self, device: torch.device, shared: SharedMemory | None) -> torch.Tensor:
        """A cache in the engine's layout, every page of it written once."""
        layout = KvLayout(1, 1, BLOCK_TOKENS, self.block_bytes // _TILES, torch.bfloat16)
        cache = layout.allocate(self.blocks, device) if shared is None else layout.over(shared.bytes)
        return cache.fill_(0.5)

    @property
    def spec(self) -> EngineSpec:
        """What both engines agree on."""
        return EngineSpec(
            protocol=PROTOCOL_VERSION,
            oldest_protocol=OLDEST_PROTOCOL,
            fingerprint="pdserve bench transfer",
            dtype="bf16",
            block_size=BLOCK_TOKENS,
            num_layers=1,
            kv_heads=1,
            head_dim=self.block_bytes // _TILES,
            tp_size=1,
        )


class BenchEngine:
    """``close`` has to be called. Raises TransferError if its sockets or UCX cannot be opened, ConfigError."""

    def __init__(
        self, role: Role, boot_id: bytes, shape: CacheShape, setup: TransferSetup, wake: Callable[[], None]
    ) -> None:
        self.boot_id = boot_id
        device = torch.device(setup.device)
        shares = role is Role.PREFILL and device.type == "cpu" and setup.config.shared_cache is Switch.ON
        shared = SharedMemory(shape.block_bytes * shape.blocks) if shares else None
        self.cache = shape.allocate(device, shared)
        self.thread = TransferThread(
            role=role,
            boot_id=boot_id,
            secret=setup.secret,
            spec=shape.spec,
            region=region_of(self.cache, shared),
            config=setup.config,
            wake=wake,
            transport=transport_for(role, setup.config, Path(setup.cache_dir), device),
        )
        self.control = self.thread.start()

    def cpu_s(self) -> float:
        """CPU time of the transfer thread so far."""
        return thread_cpu_s(os.getpid(), self.thread.native_id)

    def close(self) -> None:
        self.thread.close(CLOSE_S)


def thread_cpu_s(process: int, thread: int) -> float:
    """CPU time of any thread of this machine, in seconds, to the nanosecond where the thread is asleep."""
    return int(Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
