"""Tests cached blocks that pass through host memory at both nodes, with real transfer threads, copiers and UCX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from pdserve.config import TransferConfig
from pdserve.engine.kv_connector.staging.block_copier import BlockCopier, copy_kernels
from pdserve.engine.kv_connector.staging.staged_transfers import (
    BlocksToSend,
    LandedBlocks,
    StagedTransfers,
    StagingBlocks,
)
from pdserve.engine.kv_connector.transfer_memory import region_of
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.terms import PrefillTarget
from pdserve_kvtransfer.configuration import side_settings
from pdserve_kvtransfer.events import (
    BlocksSent,
    CachedFetchOrder,
    CachedWanted,
    FetchCancelled,
    FetchLanded,
    PushCancelled,
    PushEnded,
    TransferEvent,
)
from pdserve_kvtransfer.thread import TransferThread
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from tests.eventually import eventually
from tests.kvtransfer.rig import SECRET, SPEC

NUM_BLOCKS, STAGING = 64, 8
CONFIG = TransferConfig(heartbeat_ms=100, lease_ms=60_000)
PATIENCE_S = 30.0


def _nobody_waits() -> None:
    pass


class Node:
    """A node whose cache transfers do not reach. It holds the blocks of its first hashes, in that order."""

    def __init__(self, held: int) -> None:
        self.boot_id = new_id()
        self.held = held
        self.cache = torch.randn(NUM_BLOCKS, SPEC.kv_heads, 40)
        self.landed: dict[TransferId, int] = {}
        self.cancelled: list[TransferId] = []
        self.ended = 0
        self.wanted: list[TransferId] = []
        self.answers = True
        staging = torch.zeros(STAGING, SPEC.kv_heads, 40)
        thread = TransferThread(
            boot_id=self.boot_id,
            secret=SECRET,
            spec=SPEC,
            region=region_of(staging),
            settings=side_settings(CONFIG),
            transport=lambda: UcxTransport(""),
            wake=_nobody_waits,
            reports_sent=True,
        )
        self.target = PrefillTarget("other", thread.start(), self.boot_id)
        kernels = copy_kernels(self.cache.device)
        copier: BlockCopier[LandedBlocks | BlocksToSend] = BlockCopier(self.cache, staging, kernels, _nobody_waits)
        half = STAGING // 2
        self.staging = StagingBlocks(range(half)), StagingBlocks(range(half, STAGING))
        self.transfers = StagedTransfers(thread, copier, *self.staging)

    def fetch(self, other: Node, hashes: tuple[bytes, ...], blocks: tuple[int, ...]) -> TransferId:
        transfer = TransferId(new_id(), 0, self.boot_id)
        self.transfers.fetches.fetch(CachedFetchOrder(transfer, other.target, hashes, blocks, PATIENCE_S))
        return transfer

    def turn(self) -> None:
        for event in self.transfers.events():
            self._on_event(event)

    def _on_event(self, event: TransferEvent) -> None:
        match event:
            case CachedWanted(transfer, hashes):
                self.wanted.append(transfer)
                if self.answers:
                    self.answer(transfer, min(self.held, len(hashes)))
            case FetchLanded(transfer, landed=count):
                self.landed[transfer] = count
            case FetchCancelled(transfer, quarantined):
                assert not quarantined, "no block of the cache is written by others"
                self.cancelled.append(transfer)
            case PushEnded():
                self.ended += 1
            case PushCancelled() | BlocksSent():
                pass
            case _:
                raise AssertionError(f"unexpected: {event}")

    def answer(self, transfer: TransferId, count: int) -> None:
        self.transfers.pushes.push(transfer, 0, tuple(range(count)))
        self.transfers.pushes.held(transfer, count)

    @property
    def all_staging_free(self) -> bool:
        return [staging.num_free for staging in self.staging] == [STAGING // 2] * 2


@contextmanager
def two_nodes(held: tuple[int, int]) -> Iterator[tuple[Node, Node]]:
    nodes = Node(held[0]), Node(held[1])
    try:
        yield nodes
    finally:
        for node in nodes:
            node.transfers.close(PATIENCE_S)


def until(nodes: tuple[Node, Node], done: Callable[[], bool]) -> None:
    def turn() -> bool:
        for node in nodes:
            node.turn()
        return done()

    eventually(turn)


HASHES = tuple(new_id() * 2 for _ in range(20))
"""More blocks than there are staging blocks."""


@pytest.mark.parametrize("held", [(20, 20), (20, 13), (3, 0)])
def test_cached_blocks_pass_few_staging_blocks_in_both_directions(held: tuple[int, int]) -> None:
    with two_nodes(held) as nodes:
        before = [node.cache.clone() for node in nodes]
        places = tuple(range(20, 40)), tuple(range(40, 60))
        asked = [[node.fetch(other, HASHES, at) for at in places] for node, other in (nodes, nodes[::-1])]
        until(nodes, lambda: all(len(node.landed) == node.ended == 2 for node in nodes))
        for i, node in enumerate(nodes):
            count = held[1 - i]
            assert node.landed == dict.fromkeys(asked[i], count)
            wanted = before[i].clone()
            for at in places:
                wanted[list(at[:count])] = before[1 - i][:count]
            assert torch.equal(node.cache, wanted), "blocks that the other node lacks, and all others, are untouched"
            assert node.all_staging_free


def test_a_cancelled_fetch_of_cached_blocks_leaves_no_staging_block_behind() -> None:
    with two_nodes((20, 20)) as nodes:
        asker, holder = nodes
        holder.answers = False
        transfer = asker.fetch(holder, HASHES, tuple(range(20, 40)))
        until(nodes, lambda: holder.wanted == [transfer])
        # The holder has all blocks, and has said nothing of it yet when the asker gives up.
        holder.transfers.pushes.push(transfer, 0, tuple(range(20)))
        asker.transfers.fetches.cancel_fetch(transfer)
        until(nodes, lambda: asker.cancelled == [transfer] and holder.ended == 1)
        holder.transfers.pushes.held(transfer, 20)
        until(nodes, lambda: asker.all_staging_free and holder.all_staging_free)
