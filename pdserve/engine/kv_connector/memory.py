"""A KV cache as the transfer sees it: bytes, not tensors."""

from __future__ import annotations

import torch

from pdserve.config import EngineConfig, KvStaging, Switch, UcxCalls
from pdserve.errors import ConfigError
from pdserve.wire.discovery import Role
from pdserve_kvtransfer.memory import DeviceMemory
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.shared_memory import SharedMemory


def shared_memory(config: EngineConfig, device: torch.device, nbytes: int) -> SharedMemory | None:
    """What one rank's cache of ``nbytes`` is to be kept in, for decode engines to map. None where they do not.

    Raises ConfigError if there is not so much.
    """
    reads_cache = device.type == "cpu" and config.transfer.staging is not KvStaging.ON
    shares = config.transfer.shared_cache is Switch.ON and config.transfer.ucx_calls is not UcxCalls.PYTHON
    if config.role is not Role.PREFILL or not reads_cache or not shares:
        return None
    try:
        return SharedMemory(nbytes)
    except OSError as exc:
        raise ConfigError(f"--kv-cache-mib {config.cache.kv_cache_mib} cannot be had as shared memory: {exc}") from exc


def region_of(kv_cache: torch.Tensor, shared: SharedMemory | None = None) -> KvRegion:
    """The blocks of a cache, not a copy; ``shared`` is what it is kept in."""
    if shared is not None:
        return KvRegion(shared, kv_cache[0].nbytes)
    if kv_cache.device.type == "cuda":
        return KvRegion(DeviceMemory(kv_cache.data_ptr(), kv_cache.nbytes), kv_cache[0].nbytes)
    memory = memoryview(kv_cache.view(torch.uint8).flatten().numpy())  # type: ignore[arg-type]  # ndarray is a buffer, unannotated
    return KvRegion(memory, memory.nbytes // len(kv_cache))
