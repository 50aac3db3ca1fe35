"""The memory that KV transfers reach: the cache itself, in shared memory or on a GPU, or host memory before it.

``DevicePushes`` and ``DeviceFetches`` serve transfers straight out of and into a GPU's KV cache (``--kv-staging off``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pdserve.config import EngineConfig, KvStaging, Switch, TransferConfig, UcxCalls
from pdserve.engine.kv_connector.transfers import Fetches, Pushes
from pdserve.errors import ConfigError
from pdserve.wire.discovery import Role
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.transfer import FailureCause, PrefillLoad
from pdserve_kvtransfer.events import FetchOrder, TransferEvent
from pdserve_kvtransfer.region import DeviceMemory, KvRegion
from pdserve_kvtransfer.shared_memory import SharedMemory
from pdserve_kvtransfer.stats import TransferStats
from pdserve_kvtransfer.transport import Transport
from pdserve_kvtransfer.ucx.poster import chosen_poster
from pdserve_kvtransfer.ucx.ucx_transport import configured_ucx


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


MIB = 2**20


def staging_memory(config: EngineConfig, cache: torch.Tensor) -> torch.Tensor | None:
    """``[slots, ...]`` of the cache's blocks, as many on every rank; None where transfers reach the cache itself.

    Raises ConfigError if it would not hold a block, or if blocks cannot be checked without it.
    """
    on_gpu, staging = cache.device.type == "cuda", config.transfer.staging
    if on_gpu and staging is KvStaging.OFF and config.transfer.checksums is Switch.ON:
        raise ConfigError("--kv-staging off on a GPU needs --kv-checksums off: checksums are of host memory")
    if staging is KvStaging.OFF or (not on_gpu and staging is KvStaging.AUTO):
        return None
    slots = config.transfer.staging_mib * MIB // (cache[0].nbytes * config.parallel.tp)
    if not slots:
        raise ConfigError(f"--kv-staging-mib {config.transfer.staging_mib} does not hold one KV block")
    return torch.empty(slots, *cache.shape[1:], dtype=cache.dtype, pin_memory=on_gpu)


def transport_for(role: Role, config: TransferConfig, cache_dir: Path, device: torch.device) -> Callable[[], Transport]:
    """What a transfer thread that moves memory of ``device`` makes its transport with, in that thread.

    Raises ConfigError if compiled calls are asked for, or needed because the memory is a GPU's, and cannot be had.
    """
    on_gpu = device.type == "cuda"
    calls = UcxCalls.COMPILED if on_gpu else config.ucx_calls
    poster = chosen_poster(calls, cache_dir, digests=config.checksums is Switch.ON and not on_gpu)
    make = partial(configured_ucx, config, poster, role=role)
    return partial(_with_device, device, make) if on_gpu else make


def _with_device(device: torch.device, make: Callable[[], Transport]) -> Transport:
    # UCX copies with the CUDA context of the thread that calls it, and a new thread has none.
    torch.cuda.set_device(device)
    return make()


class DevicePushes:
    """Satisfies ``Pushes``: before blocks leave, the kernels that write them are over.

    Also on other ranks: theirs come before the sums that this one has waited for.
    """

    def __init__(self, pushes: Pushes, wait: Callable[[], None]) -> None:
        """``wait`` returns when everything launched so far is done."""
        self._pushes = pushes
        self._wait = wait

    def push(self, transfer_id: TransferId, first_index: int, block_ids: tuple[int, ...]) -> None:
        self._wait()
        self._pushes.push(transfer_id, first_index, block_ids)

    def first_token(
        self, transfer_id: TransferId, tokens: tuple[SampledToken, ...], cached_tokens: int, load: PrefillLoad
    ) -> None:
        self._pushes.first_token(transfer_id, tokens, cached_tokens, load)

    def tell_load(self, load: PrefillLoad) -> None:
        self._pushes.tell_load(load)

    def fail_push(self, transfer_id: TransferId, reason: str, cause: FailureCause) -> None:
        self._pushes.fail_push(transfer_id, reason, cause)

    def events(self) -> list[TransferEvent]:
        return self._pushes.events()

    def stats(self) -> TransferStats:
        return self._pushes.stats()

    def close(self, timeout_s: float) -> None:
        self._pushes.close(timeout_s)


class DeviceFetches:
    """Satisfies ``Fetches``: before blocks may land, the kernels that were to write them before are over.

    A chunk may have been launched for a request that is gone by now, and its blocks given to the next one. UCX knows
    nothing of the device's stream. On other ranks, those kernels come before the sums that this one has waited for.
    """

    def __init__(self, fetches: Fetches, wait: Callable[[], None]) -> None:
        """``wait`` returns when everything launched so far is done."""
        self._fetches = fetches
        self._wait = wait

    def fetch(self, order: FetchOrder) -> None:
        self._wait()
        self._fetches.fetch(order)

    def cancel_fetch(self, transfer_id: TransferId) -> None:
        self._fetches.cancel_fetch(transfer_id)

    def events(self) -> list[TransferEvent]:
        return self._fetches.events()

    def stats(self) -> TransferStats:
        return self._fetches.stats()

    def close(self, timeout_s: float) -> None:
        self._fetches.close(timeout_s)
