"""What the connectors and the transfers agree on: which blocks move, in which order, and their calls.

Block ids are those of the engine's KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.wire.cache_groups import GroupBlock, GroupSpec, Keep, moved_blocks
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import FailureCause, PrefillLoad
from pdserve_kvtransfer.events import CachedFetchOrder, FetchOrder, TransferEvent, TransferStats


class BlockOrder:
    """The blocks that move to a node which has the first blocks of a context, in the order of a transfer.

    Both nodes have the same one.
    """

    def __init__(self, block_size: int, groups: Sequence[GroupSpec] = ()) -> None:
        """``groups`` are the model's cache groups; none if it has one, whose blocks all move."""
        self._block_size = block_size
        self._groups = tuple(groups)

    @property
    def has_groups(self) -> bool:
        """Whether the model has cache groups. Then a part of the blocks is of no use to go on from."""
        return bool(self._groups)

    @property
    def has_states(self) -> bool:
        """Whether a group keeps states."""
        return any(group.keep is Keep.LATEST for group in self._groups)

    def count(self, first_block: int, tokens: int) -> int:
        """Returns how many blocks of a context of ``tokens`` tokens move to a node that has the first ones."""
        if not self._groups:
            return max(0, -(-tokens // self._block_size) - first_block)
        return len(self._moved(first_block, tokens))

    def final(self, first_block: int, tokens: int, whole_blocks: int) -> int:
        """Returns how many of these blocks are final once the context's first ``whole_blocks`` blocks are full.

        States are not among them: they are of all tokens.
        """
        if not self._groups:
            return max(0, whole_blocks - first_block)
        moved = self._moved(first_block, tokens)
        return sum(block.number < whole_blocks and not self._is_state(block) for block in moved)

    def ids(
        self, table: BlockTable, first_block: int, tokens: int, begin: int = 0, end: int | None = None
    ) -> tuple[int, ...]:
        """Returns the ids in ``table`` of the blocks from place ``begin`` to ``end`` of the transfer."""
        if not self._groups:
            last = -(-tokens // self._block_size) if end is None else first_block + end
            return tuple(table[first_block + begin : last])
        return table.blocks_of(self._moved(first_block, tokens)[begin:end])

    def _moved(self, first_block: int, tokens: int) -> tuple[GroupBlock, ...]:
        return moved_blocks(self._groups, self._block_size, first_block, tokens)

    def _is_state(self, block: GroupBlock) -> bool:
        return self._groups[block.group].keep is Keep.LATEST


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

    def meet(self, number: int, targets: tuple[PrefillTarget, ...]) -> None: ...

    def stats(self) -> TransferStats: ...

    def close(self, timeout_s: float) -> None: ...


class PacedTransfers(Transfers, PacedFetches, Pushes, Protocol):
    """All that ``StagedTransfers`` needs of a ``TransferThread``."""
