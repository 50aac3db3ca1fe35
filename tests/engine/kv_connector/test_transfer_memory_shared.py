"""Tests which KV caches other engines may map."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve.config import KvStaging, Switch, TransferConfig, UcxCalls
from pdserve.engine.kv_connector.transfer_memory import region_of, shared_memory
from pdserve.errors import ConfigError
from pdserve.models.backend import CPU
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kvtransfer.region import SharedMemory


def shared(nbytes: int = 4096, device: torch.device = CPU, **transfer: Any) -> bool:
    """Returns whether a rank's cache of ``nbytes`` is in shared memory under these settings."""
    return shared_memory(TransferConfig(**transfer), 1024, device, nbytes) is not None


def test_a_cache_in_host_memory_is_shared() -> None:
    assert shared()
    assert shared(staging=KvStaging.OFF, ucx_calls=UcxCalls.COMPILED)


@pytest.mark.parametrize(
    "otherwise",
    [
        {"device": torch.device("cuda", 0)},
        {"staging": KvStaging.ON},
        {"shared_cache": Switch.OFF},
        {"ucx_calls": UcxCalls.PYTHON},
    ],
    ids=["GPU", "staging", "off", "calls from Python"],
)
def test_no_other_is(otherwise: dict[str, Any]) -> None:
    assert not shared(**otherwise)


def test_more_memory_than_there_can_be_is_an_error_of_the_settings() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-mib 1024 cannot be had as shared memory"):
        shared(2**62)


def test_the_cache_is_the_shared_memory_itself() -> None:
    layout = KvLayout(2, 3, 4, 8, torch.float32)
    memory = SharedMemory(5 * layout.block_bytes)
    cache = layout.over(memory.bytes)
    assert cache.shape == layout.allocate(5, CPU).shape
    assert not cache.any()
    cache[3] = 1.0
    region = region_of(cache, memory)
    assert (region.memory, region.num_blocks) == (memory, 5)
    assert bytes(region.block(3)) == bytes(memory.bytes[3 * layout.block_bytes :][: layout.block_bytes])
    assert bytes(region.block(3)) == torch.ones(layout.block_bytes // 4).numpy().tobytes()
