"""Has the memory that KV transfers reach: the cache itself, or host memory through which its blocks pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from pdserve.config import KvStaging, Switch, TransferConfig, UcxCalls
from pdserve.errors import ConfigError
from pdserve.machine.memory import MIB
from pdserve.wire.cache_groups import GroupBlocks
from pdserve_kvtransfer.configuration import check_rank_devices, chosen_poster, configured_ucx
from pdserve_kvtransfer.region import DeviceMemory, KvRegion, Memory, SharedMemory
from pdserve_kvtransfer.transport import Transport


@dataclass(frozen=True, slots=True)
class CacheParts:
    """The blocks of one rank's cache, by group."""

    parts: tuple[torch.Tensor, ...]
    """The blocks of each group, ``[blocks, ...]``. Those of a model with cache groups are flat; some have no bytes."""
    firsts: tuple[int, ...] = (0,)
    """The id of each group's first block."""

    @classmethod
    def of(cls, kv_cache: torch.Tensor, groups: Sequence[GroupBlocks] = ()) -> CacheParts:
        """Returns the blocks of a cache. ``groups`` are as in ``open_memory``."""
        if not groups:
            return cls((kv_cache,))
        # Copies move wide numbers faster than bytes.
        width = 8 if all(group.block_bytes % 8 == 0 for group in groups) else 1
        parts = []
        for group in groups:
            flat = kv_cache[group.start : group.start + group.count * group.block_bytes]
            numbers = flat if width == 1 else flat.view(torch.int64)
            parts.append(numbers.view(group.count, group.block_bytes // width))
        return cls(tuple(parts), tuple(group.first for group in groups))

    def group_of(self, block_id: int) -> int:
        """Returns the number of a block's group."""
        return bisect_right(self.firsts, block_id) - 1


@dataclass(frozen=True, slots=True)
class TransferMemory:
    """One rank's memory as its KV transfers use it."""

    cache: CacheParts
    staging: torch.Tensor | None
    """The host memory ``[staging blocks, ...]`` that blocks pass through; None if transfers reach the cache itself.

    For a model with cache groups it is bytes: each staging block is as large as the largest block of any group.
    """
    region: KvRegion
    """The memory that the transfer thread reads and writes: ``staging``, or else the cache."""
    transport: Callable[[], Transport]
    """The function that makes the transport, in the transfer thread."""
    finish_writes: Callable[[], None]
    """The function that waits until all kernels launched so far have ended, if transfers reach a GPU's cache."""


def open_memory(
    settings: TransferConfig,
    cache_dir: Path,
    tp_size: int,
    kv_cache: torch.Tensor,
    shared: SharedMemory | None,
    *,
    loopback: bool,
    rank: int = 0,
    groups: Sequence[GroupBlocks] = (),
) -> TransferMemory:
    """Returns what ``rank`` of ``tp_size`` ranks transfers from and to.

    ``shared`` is the memory of ``kv_cache``, if any. ``groups`` are the model's cache groups, whose memory ``kv_cache``
    then is; if there are none, it is ``[num_blocks, ...]``.

    ``loopback`` is for ``configured_ucx``.

    Raises ConfigError if the staging memory or compiled code cannot be had, or if the settings name the network devices
    of another number of ranks.
    """
    check_rank_devices(settings, tp_size)
    cache = CacheParts.of(kv_cache, groups)
    staging = staging_memory(settings, tp_size, kv_cache, groups)
    reached = kv_cache if staging is None else staging
    if not groups or staging is None:
        region = region_of(reached, shared, groups)
    else:
        sizes = [group.block_bytes for group in groups]
        region = KvRegion.of_staging(_memory_of(staging), len(staging), sizes)
    return TransferMemory(
        cache=cache,
        staging=staging,
        region=region,
        transport=transport_for(settings, cache_dir, reached.device, loopback=loopback, rank=rank),
        finish_writes=partial(torch.cuda.synchronize, reached.device) if reached.device.type == "cuda" else _nothing,
    )


def _nothing() -> None:
    pass


def shared_memory(
    settings: TransferConfig, kv_cache_mib: int, device: torch.device, nbytes: int
) -> SharedMemory | None:
    """Returns ``nbytes`` of memory for one rank's cache that other engines may map; None if they are not to map it.

    Raises ConfigError if there is not so much; ``kv_cache_mib`` is the setting that the error names.
    """
    reads_cache = device.type == "cpu" and settings.staging is not KvStaging.ON
    shares = settings.shared_cache is Switch.ON and settings.ucx_calls is not UcxCalls.PYTHON
    if not reads_cache or not shares:
        return None
    try:
        return SharedMemory(nbytes)
    except OSError as exc:
        raise ConfigError(f"--kv-cache-mib {kv_cache_mib} cannot be had as shared memory: {exc}") from exc


def staging_memory(
    settings: TransferConfig, tp_size: int, cache: torch.Tensor, groups: Sequence[GroupBlocks] = ()
) -> torch.Tensor | None:
    """Returns ``[staging blocks, ...]``, as many on each of ``tp_size`` ranks; None where transfers reach the cache.

    ``groups`` are as in ``open_memory``.

    Raises ConfigError if it would not hold a block for fetches and one for pushes, or if blocks cannot be checked
    without it.
    """
    on_gpu, staging = cache.device.type == "cuda", settings.staging
    if on_gpu and staging is KvStaging.OFF and settings.checksums is Switch.ON:
        raise ConfigError("--kv-staging off on a GPU needs --kv-checksums off: checksums are of host memory")
    if staging is KvStaging.OFF or (not on_gpu and staging is KvStaging.AUTO):
        return None
    block_bytes = max(group.block_bytes for group in groups) if groups else cache[0].nbytes
    count = settings.staging_mib * MIB // (block_bytes * tp_size)
    if count < 2:
        raise ConfigError(f"--kv-staging-mib {settings.staging_mib} does not hold two KV blocks")
    if groups:
        return torch.empty(count, block_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    return torch.empty(count, *cache.shape[1:], dtype=cache.dtype, pin_memory=on_gpu)


def region_of(
    kv_cache: torch.Tensor, shared: SharedMemory | None = None, groups: Sequence[GroupBlocks] = ()
) -> KvRegion:
    """Returns the blocks of a cache as transfers see them, uncopied. ``shared`` is the memory that holds it, if any.

    ``groups`` are as in ``open_memory``.
    """
    return KvRegion(_memory_of(kv_cache) if shared is None else shared, groups or kv_cache[0].nbytes)


def _memory_of(tensor: torch.Tensor) -> Memory:
    if tensor.device.type == "cuda":
        return DeviceMemory(tensor.data_ptr(), tensor.nbytes)
    return memoryview(tensor.view(torch.uint8).flatten().numpy())  # type: ignore[arg-type]  # ndarray is a buffer, unannotated


def transport_for(
    settings: TransferConfig, cache_dir: Path, device: torch.device, *, loopback: bool, rank: int = 0
) -> Callable[[], Transport]:
    """Returns what makes the transport of a transfer thread that moves memory of ``device``; it is called there.

    Raises ConfigError if compiled calls are asked for, or needed because the memory is a GPU's, and cannot be had.
    """
    on_gpu = device.type == "cuda"
    calls = UcxCalls.COMPILED if on_gpu else settings.ucx_calls
    poster = chosen_poster(
        calls,
        cache_dir,
        digests=settings.checksums is Switch.ON and not on_gpu,
        registers=settings.ucx_register is Switch.ON,
    )
    make = partial(configured_ucx, settings, poster, loopback=loopback, rank=rank)
    return partial(_with_device, device, make) if on_gpu else make


def _with_device(device: torch.device, make: Callable[[], Transport]) -> Transport:
    # UCX copies with the CUDA context of the thread that calls it, and a new thread has none.
    torch.cuda.set_device(device)
    return make()
