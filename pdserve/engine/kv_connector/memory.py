"""A KV cache as the transfer sees it: bytes, not tensors."""

from __future__ import annotations

import torch

from pdserve_kvtransfer.memory import DeviceMemory
from pdserve_kvtransfer.region import KvRegion


def region_of(kv_cache: torch.Tensor) -> KvRegion:
    """The blocks of a cache, not a copy."""
    if kv_cache.device.type == "cuda":
        return KvRegion(DeviceMemory(kv_cache.data_ptr(), kv_cache.nbytes), kv_cache[0].nbytes)
    memory = memoryview(kv_cache.view(torch.uint8).flatten().numpy())  # type: ignore[arg-type]  # ndarray is a buffer, unannotated
    return KvRegion(memory, memory.nbytes // len(kv_cache))
