"""Tests that blocks of all cache groups pass through host memory at both nodes, with real threads, copiers and UCX."""

from __future__ import annotations

import os

import msgspec
import pytest
import torch

from pdserve.config import KvStaging, TransferConfig
from pdserve.engine.kv_connector.staging.block_copier import BlockCopier, copy_kernels
from pdserve.engine.kv_connector.staging.staged_transfers import (
    BlocksToSend,
    LandedBlocks,
    StagedTransfers,
    StagingBlocks,
    StagingIds,
)
from pdserve.engine.kv_connector.transfer_memory import open_memory
from pdserve.settings import cache_folder
from pdserve.wire.cache_groups import GroupBlock, GroupSpec, laid_out, moved_blocks
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import UNKNOWN_LOAD
from pdserve_kvtransfer.configuration import side_settings
from pdserve_kvtransfer.events import FetchCancelled, FetchLanded, FetchOrder, PushEnded, PushWanted, TransferEvent
from pdserve_kvtransfer.thread import TransferThread
from tests.eventually import eventually
from tests.kvtransfer.grouped import GROUPS, STATE, WHOLE, WINDOW
from tests.kvtransfer.rig import SAMPLING, SECRET, SPEC

TOKENS = 200
ODD_STATE = msgspec.structs.replace(STATE, heads=0, head_bytes=400_001)
EMPTY = msgspec.structs.replace(WHOLE, layers=0, head_bytes=0)
"""The first group of a model without attention."""
CONFIG = TransferConfig(heartbeat_ms=100, lease_ms=60_000, staging=KvStaging.ON, staging_mib=2)


class StagedNode:
    """A node whose transfers reach staging blocks only."""

    def __init__(self, groups: tuple[GroupSpec, ...]) -> None:
        self.boot_id = new_id()
        sizes = [group.head_bytes * max(1, group.heads) for group in groups]
        self.groups, nbytes = laid_out(groups, (20, 20, 5), sizes)
        self.cache = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        memory = open_memory(CONFIG, cache_folder(os.environ), 1, self.cache, None, loopback=True, groups=self.groups)
        assert memory.staging is not None
        thread = TransferThread(
            boot_id=self.boot_id,
            secret=SECRET,
            spec=msgspec.structs.replace(SPEC, groups=groups),
            region=memory.region,
            settings=side_settings(CONFIG),
            transport=memory.transport,
            wake=lambda: None,
            reports_sent=True,
        )
        self.target = PrefillTarget("other", thread.start(), self.boot_id)
        kernels = copy_kernels(self.cache.device)
        copier: BlockCopier[LandedBlocks | BlocksToSend] = BlockCopier(
            memory.cache, memory.staging, kernels, lambda: None
        )
        half = len(memory.staging) // 2
        self.staging = StagingBlocks(range(half)), StagingBlocks(range(half, 2 * half))
        ids = StagingIds(len(memory.staging), memory.cache.group_of)
        self.transfers = StagedTransfers(thread, copier, *self.staging, ids)
        self.events: list[TransferEvent] = []

    def ids(self, moved: tuple[GroupBlock, ...]) -> tuple[int, ...]:
        return tuple(self.groups[block.group].first + block.number for block in moved)

    def read(self, block_ids: tuple[int, ...]) -> list[bytes]:
        found = []
        for block_id in block_ids:
            group = next(group for group in self.groups if block_id in group.ids)
            at = group.place(block_id)
            found.append(bytes(self.cache[at : at + group.block_bytes].numpy()))
        return found

    def turn(self) -> bool:
        self.events += self.transfers.events()
        return False

    def has(self, kind: type[TransferEvent]) -> bool:
        self.turn()
        return any(isinstance(event, kind) for event in self.events)

    @property
    def all_staging_free(self) -> bool:
        self.turn()
        return all(staging.num_free == staging.total for staging in self.staging)


@pytest.mark.parametrize("groups", [GROUPS, (WHOLE, WINDOW, ODD_STATE), (EMPTY, WINDOW, STATE)])
def test_a_prompt_of_many_blocks_passes_few_staging_blocks(groups: tuple[GroupSpec, ...]) -> None:
    prefill, decode = StagedNode(groups), StagedNode(groups)
    try:
        moved = moved_blocks(groups, SPEC.block_size, 0, TOKENS)
        given = prefill.ids(moved)
        transfer = TransferId(new_id(), 0, decode.boot_id)
        untouched = decode.cache.clone()
        decode.transfers.fetches.fetch(
            FetchOrder(transfer, prefill.target, list(range(TOKENS)), 0, decode.ids(moved), SAMPLING, 30.0)
        )
        eventually(lambda: prefill.has(PushWanted) or decode.turn())
        prefill.transfers.pushes.push(transfer, 0, given[:-1])
        prefill.transfers.pushes.push(transfer, len(given) - 1, given[-1:])
        prefill.transfers.pushes.first_token(transfer, (SampledToken(1),), 0, UNKNOWN_LOAD)
        eventually(lambda: prefill.turn() or decode.has(FetchLanded))
        assert decode.read(decode.ids(moved)) == prefill.read(given)
        eventually(lambda: prefill.has(PushEnded))
        assert prefill.all_staging_free and decode.all_staging_free
        changed = decode.cache != untouched
        mine = torch.zeros_like(changed)
        for block, block_id in zip(moved, decode.ids(moved), strict=True):
            at = decode.groups[block.group].place(block_id)
            mine[at : at + decode.groups[block.group].block_bytes] = True
        assert not bool((changed & ~mine).any()), "no other byte of the cache was written"
    finally:
        prefill.transfers.close(5.0)
        decode.transfers.close(5.0)


def test_a_cancel_leaves_no_staging_block_behind() -> None:
    prefill, decode = StagedNode(GROUPS), StagedNode(GROUPS)
    try:
        moved = moved_blocks(GROUPS, SPEC.block_size, 0, TOKENS)
        transfer = TransferId(new_id(), 0, decode.boot_id)
        decode.transfers.fetches.fetch(
            FetchOrder(transfer, prefill.target, list(range(TOKENS)), 0, decode.ids(moved), SAMPLING, 30.0)
        )
        eventually(lambda: prefill.has(PushWanted) or decode.turn())
        prefill.transfers.pushes.push(transfer, 0, prefill.ids(moved)[:5])
        decode.transfers.fetches.cancel_fetch(transfer)
        eventually(lambda: decode.has(FetchCancelled) and prefill.has(PushEnded))
        eventually(lambda: decode.all_staging_free and prefill.all_staging_free)
    finally:
        prefill.transfers.close(5.0)
        decode.transfers.close(5.0)
