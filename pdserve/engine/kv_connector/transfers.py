"""The contracts between the connectors and the transfers. Block ids are those of the engine's KV cache."""

from __future__ import annotations

from typing import Protocol

from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import FailureCause, PrefillLoad
from pdserve_kvtransfer.events import CachedFetchOrder, FetchOrder, TransferEvent, TransferStats


class Fetches(Protocol):
    """The fetches of an engine: ``TransferThread``, or ``StagedFetches`` before one."""

    def fetch(self, order: FetchOrder | CachedFetchOrder) -> None: ...

    def cancel_fetch(self, transfer_id: TransferId) -> None: ...

    def offer(self, target: PrefillTarget, hashes: tuple[bytes, ...], request_id: str) -> None: ...


class PacedFetches(Fetches, Protocol):
    """Fetches that can move a few blocks at a time: ``TransferThread``."""

    def accept_blocks(self, transfer_id: TransferId, block_ids: tuple[int, ...]) -> None: ...


class Pushes(Protocol):
    """The pushes of an engine: ``TransferThread``, or ``StagedPushes`` before one."""

    def push(self, transfer_id: TransferId, first_block: int, block_ids: tuple[int, ...]) -> None: ...

    def first_token(
        self,
        transfer_id: TransferId,
        tokens: tuple[SampledToken, ...],
        cached_tokens: int,
        load: PrefillLoad,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None: ...

    def held(self, transfer_id: TransferId, count: int, usable: int = 0) -> None: ...

    def tell_load(self, load: PrefillLoad) -> None: ...

    def fail_push(self, transfer_id: TransferId, reason: str, cause: FailureCause) -> None: ...


class Transfers(Protocol):
    """Fetches and pushes together: ``TransferThread``, or ``StagedTransfers`` before one."""

    def events(self) -> list[TransferEvent]: ...

    def stats(self) -> TransferStats: ...

    def close(self, timeout_s: float) -> None: ...


class PacedTransfers(Transfers, PacedFetches, Pushes, Protocol):
    """All that ``StagedTransfers`` needs of a ``TransferThread``."""
