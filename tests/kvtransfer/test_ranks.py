"""Tests nodes of several TP ranks: each head of each block reaches its decode rank, over real UCX and ZMQ."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import SampledToken
from pdserve_kvtransfer.configuration import configured_ucx
from pdserve_kvtransfer.events import (
    BlocksComing,
    BlocksLanded,
    BlocksReleased,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushWanted,
)
from pdserve_kvtransfer.pieces import heads_of
from pdserve_kvtransfer.rank_thread import RankThread
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.transport import Transport
from tests.eventually import eventually
from tests.kvtransfer.inproc import Fabric, InprocTransport
from tests.kvtransfer.rig import CONFIG, PATIENT, SPEC, Engine, Pair

HEAD_BYTES = 4096
NUM_BLOCKS = 16


class Node:
    """One engine of several ranks, all in this process."""

    def __init__(self, name: str, ranks: int, kv_heads: int, folder: Path, transport: Fabric | None) -> None:
        spec = msgspec.structs.replace(SPEC, kv_heads=kv_heads, tp_size=ranks)
        self.kv_heads, self.ranks = kv_heads, ranks
        self.deaths: list[str] = []
        make: Callable[[], Transport] | None = None if transport is None else partial(InprocTransport, transport)
        block_bytes = HEAD_BYTES * len(heads_of(0, ranks, kv_heads))
        addresses = tuple(f"ipc://{folder}/{name}-{rank}" for rank in range(1, ranks))
        self.regions: list[KvRegion] = []
        self.threads: list[RankThread] = []
        for rank, address in enumerate(addresses, 1):
            region = KvRegion(memoryview(bytearray(NUM_BLOCKS * block_bytes)), block_bytes)
            self.regions.append(region)
            thread = RankThread(
                address=address,
                rank=rank,
                ranks=ranks,
                heads=(kv_heads,),
                region=region,
                transport=make or partial(configured_ucx, CONFIG),
                died=self.deaths.append,
            )
            thread.start()
            self.threads.append(thread)
        self.engine = Engine(NUM_BLOCKS, block_bytes, spec=spec, config=PATIENT, transport=make, ranks=addresses)
        self.regions.insert(0, self.engine.region)

    def head(self, head: int, block: int) -> list[memoryview]:
        """Returns the memory of one KV head of a block, on every rank that holds the head."""
        found = []
        for rank, region in enumerate(self.regions):
            heads = heads_of(rank, self.ranks, self.kv_heads)
            if head in heads:
                at = (head - heads.start) * HEAD_BYTES
                found.append(region.block(block)[at : at + HEAD_BYTES])
        return found

    def fill(self, block: int) -> list[bytes]:
        """Fills a block with random bytes, which are the same for a head on every rank that holds it."""
        contents = [os.urandom(HEAD_BYTES) for _ in range(self.kv_heads)]
        for head, content in enumerate(contents):
            for memory in self.head(head, block):
                memory[:] = content
        return contents

    def holds(self, block: int, contents: list[bytes]) -> bool:
        return all(
            bytes(memory) == content for head, content in enumerate(contents) for memory in self.head(head, block)
        )

    def close(self) -> None:
        self.engine.close()
        for thread in self.threads:
            thread.close(5.0)
        assert not self.deaths


@dataclass
class Nodes:
    prefill: Node
    decode: Node

    @property
    def rig(self) -> Pair:
        return Pair(self.prefill.engine, self.decode.engine)


@contextmanager
def nodes(sources: int, targets: int, kv_heads: int, folder: Path, fabric: Fabric | None = None) -> Iterator[Nodes]:
    with ExitStack() as stack:
        made = []
        for name, ranks in (("prefill", sources), ("decode", targets)):
            node = Node(name, ranks, kv_heads, folder, fabric)
            stack.callback(node.close)
            made.append(node)
        yield Nodes(*made)


SHAPES = [(2, 2, 4), (4, 2, 4), (1, 4, 4), (4, 1, 4), (4, 4, 2), (4, 1, 2), (1, 4, 2), (2, 4, 2), (3, 6, 3), (6, 3, 3)]


@pytest.mark.parametrize(("sources", "targets", "kv_heads"), SHAPES)
def test_every_head_arrives_where_it_belongs(sources: int, targets: int, kv_heads: int, tmp_path: Path) -> None:
    with nodes(sources, targets, kv_heads, tmp_path) as both:
        contents = [both.prefill.fill(block) for block in (5, 1, 9)]
        order = both.rig.order((3, 8, 4), first_block=2)
        decode, prefill = both.decode.engine, both.prefill.engine
        decode.thread.fetch(order)
        prefill.next(PushWanted)
        prefill.thread.push(order.transfer_id, 2, (5, 1))
        prefill.thread.first_token(order.transfer_id, (SampledToken(1),), 0)
        decode.next(FirstTokenArrived)
        prefill.thread.push(order.transfer_id, 4, (9,))
        landed = decode.next(FetchLanded)
        assert landed.bytes == 3 * kv_heads * HEAD_BYTES
        for block, content in zip((3, 8, 4), contents, strict=True):
            assert both.decode.holds(block, content)
        prefill.next(PushEnded)


def stopped_in_the_middle(both: Nodes, fabric: Fabric) -> TransferId:
    """Starts a transfer whose pieces both decode ranks accept, and which do not land."""
    order = both.rig.order((3, 8))
    both.decode.engine.thread.fetch(order)
    both.prefill.engine.next(PushWanted)
    fabric.hold()
    both.prefill.engine.thread.push(order.transfer_id, 0, (5, 1))
    eventually(lambda: fabric.stuck() == 4)
    return order.transfer_id


def test_a_cancel_waits_for_what_every_rank_is_still_writing(tmp_path: Path) -> None:
    fabric = Fabric()
    with nodes(2, 2, 2, tmp_path, fabric) as both:
        transfer = stopped_in_the_middle(both, fabric)
        decode = both.decode.engine
        decode.thread.cancel_fetch(transfer)
        assert decode.next(FetchCancelled).quarantined == (3, 8)
        both.prefill.engine.next(PushCancelled)
        fabric.release()
        eventually(lambda: decode.thread.stats().quarantined_blocks == 0)
        both.prefill.engine.next(PushEnded)


def test_a_lost_peer_closes_the_link_of_every_rank_and_so_ends_the_quarantine(tmp_path: Path) -> None:
    fabric = Fabric()
    with nodes(2, 2, 2, tmp_path, fabric) as both:
        stopped_in_the_middle(both, fabric)
        both.prefill.engine.close()
        decode = both.decode.engine
        assert decode.next(FetchFailed).quarantined == (3, 8)
        assert decode.next(BlocksReleased).block_ids
        eventually(lambda: decode.thread.stats().quarantined_blocks == 0)
        assert fabric.stuck() == 0


def test_a_broken_link_of_another_rank_ends_the_transfers_of_all(tmp_path: Path) -> None:
    fabric = Fabric()
    with nodes(2, 2, 2, tmp_path, fabric) as both:
        order = both.rig.order((3, 8))
        both.decode.engine.thread.fetch(order)
        both.prefill.engine.next(PushWanted)
        link = next(iter(both.decode.threads[0]._ports.values()))._link.transport_link  # type: ignore[attr-defined]  # to break it
        link.sever()
        assert both.decode.engine.next(FetchFailed).quarantined == ()
        again = both.rig.order((3, 8))
        both.decode.engine.thread.fetch(again)
        both.prefill.engine.next(PushCancelled)


def test_the_transport_of_a_rank_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    def broken() -> Transport:
        raise RuntimeError("no such device")

    thread = RankThread(
        address=f"ipc://{tmp_path}/rank",
        rank=1,
        ranks=2,
        heads=(2,),
        region=KvRegion(memoryview(bytearray(64)), 8),
        transport=broken,
        died=print,
    )
    with pytest.raises(Exception, match="no such device"):
        thread.start()
    thread.close(5.0)


@pytest.mark.parametrize(("sources", "targets", "kv_heads"), [(2, 2, 4), (1, 4, 2), (4, 1, 4)])
def test_a_paced_transfer_lands_on_every_rank_as_there_is_room(
    sources: int, targets: int, kv_heads: int, tmp_path: Path
) -> None:
    with nodes(sources, targets, kv_heads, tmp_path) as both:
        contents = [both.prefill.fill(block) for block in (5, 1, 9)]
        order = replace(both.rig.order((3, 8, 4), first_block=2), block_ids=(3,), paced_blocks=3)
        transfer, decode, prefill = order.transfer_id, both.decode.engine, both.prefill.engine
        decode.thread.fetch(order)
        prefill.next(PushWanted)
        prefill.thread.push(transfer, 2, (5, 1, 9))
        # Both orders are right, because the first block already has its place.
        assert {decode.take(), decode.take()} == {BlocksComing(transfer, 3), BlocksLanded(transfer, 1)}
        assert both.decode.holds(3, contents[0])
        decode.thread.accept_blocks(transfer, (3,))
        assert decode.next(BlocksLanded) == BlocksLanded(transfer, 2)
        assert both.decode.holds(3, contents[1])
        prefill.thread.first_token(transfer, (SampledToken(1),), 0)
        decode.next(FirstTokenArrived)
        decode.thread.accept_blocks(transfer, (4,))
        decode.next(FetchLanded)
        assert both.decode.holds(4, contents[2])
        prefill.next(PushEnded)
