"""Transfers straight out of and into a GPU's KV cache (``--kv-staging off``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pdserve.config import Switch, TransferConfig, UcxCalls
from pdserve.engine.kv_connector.transfers import Fetches, Pushes
from pdserve.wire.discovery import Role
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling import SampledToken
from pdserve.wire.transfer import FailureCause, PrefillLoad
from pdserve_kvtransfer.events import FetchOrder, TransferEvent
from pdserve_kvtransfer.mover_choice import chosen_mover
from pdserve_kvtransfer.stats import TransferStats
from pdserve_kvtransfer.transport import Transport
from pdserve_kvtransfer.ucx import configured_ucx, prefill_ucx


def transport_for(role: Role, config: TransferConfig, cache_dir: Path, device: torch.device) -> Callable[[], Transport]:
    """What a transfer thread that moves memory of ``device`` makes its transport with, in that thread.

    Raises ConfigError if compiled calls are asked for, or needed because the memory is a GPU's, and cannot be had.
    """
    on_gpu = device.type == "cuda"
    calls = UcxCalls.COMPILED if on_gpu else config.ucx_calls
    mover = chosen_mover(calls, cache_dir, digests=config.checksums is Switch.ON and not on_gpu)
    make = partial(prefill_ucx if role is Role.PREFILL else configured_ucx, config, mover)
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
