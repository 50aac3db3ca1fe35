"""Nodes whose model has cache groups: whole contexts, a window, and a state. All ranks are in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from pdserve.wire.cache_groups import GroupBlock, GroupSpec, Keep, laid_out, moved_blocks
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.terms import PrefillTarget
from pdserve_kvtransfer.configuration import configured_ucx
from pdserve_kvtransfer.events import CachedFetchOrder, FetchOrder
from pdserve_kvtransfer.pieces import heads_of
from pdserve_kvtransfer.rank_thread import RankThread
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.transport import Transport
from tests.kvtransfer.inproc import Fabric, InprocTransport
from tests.kvtransfer.rig import CONFIG, PATIENT, SAMPLING, SPEC, Engine

WHOLE = GroupSpec("all", Keep.ALL, 2, 4, 1024, "bf16")
WINDOW = GroupSpec("window 32", Keep.WINDOW, 2, 2, 512, "bf16", 32)
STATE = GroupSpec("state", Keep.LATEST, 3, 4, 96 * 1024, "fp32")
REPLICATED = msgspec.structs.replace(STATE, heads=0)
GROUPS = (WHOLE, WINDOW, STATE)
COUNTS = (24, 16, 8)


class GroupedNode:
    """One engine of several ranks. ``counts`` are the blocks of each group."""

    def __init__(
        self,
        name: str,
        ranks: int,
        groups: Sequence[GroupSpec],
        folder: Path,
        fabric: Fabric | None = None,
        counts: Sequence[int] = COUNTS,
    ) -> None:
        self.specs, self.ranks = groups, ranks
        self.deaths: list[str] = []
        make: Callable[[], Transport] | None = None if fabric is None else partial(InprocTransport, fabric)
        sizes = [group.head_bytes * len(heads_of(0, ranks, group.heads)) for group in groups]
        self.groups, nbytes = laid_out(groups, counts[: len(groups)], sizes)
        addresses = tuple(f"ipc://{folder}/{name}-{rank}" for rank in range(1, ranks))
        self.regions: list[KvRegion] = []
        self.threads: list[RankThread] = []
        for rank, address in enumerate(addresses, 1):
            region = KvRegion(memoryview(bytearray(nbytes)), self.groups)
            thread = RankThread(
                address=address,
                rank=rank,
                ranks=ranks,
                heads=[group.heads for group in groups],
                region=region,
                transport=make or partial(configured_ucx, CONFIG),
                died=self.deaths.append,
            )
            thread.start()
            self.regions.append(region)
            self.threads.append(thread)
        spec = msgspec.structs.replace(SPEC, groups=tuple(groups), tp_size=ranks)
        self.engine = Engine(spec=spec, config=PATIENT, transport=make, ranks=addresses, groups=self.groups)
        self.regions.insert(0, self.engine.region)

    def ids(self, moved: Sequence[GroupBlock], first: int = 0) -> tuple[int, ...]:
        """Returns blocks of this node for these ones: of each group the ``first`` ones and those that follow."""
        return tuple(self.groups[block.group].first + first + block.number for block in moved)

    def heads(self, block_id: int) -> list[list[memoryview]]:
        """Returns the memory of each head of a block, on every rank that holds it."""
        spec = self.specs[self.regions[0].group_of(block_id)]
        found: list[list[memoryview]] = [[] for _ in range(max(1, spec.heads))]
        for rank, region in enumerate(self.regions):
            for place, head in enumerate(heads_of(rank, self.ranks, spec.heads)):
                found[head].append(region.block(block_id)[place * spec.head_bytes : (place + 1) * spec.head_bytes])
        return found

    def fill(self, block_id: int) -> list[bytes]:
        """Fills a block with random bytes, which are the same on every rank that holds a head."""
        contents = []
        for copies in self.heads(block_id):
            contents.append(os.urandom(len(copies[0])))
            for memory in copies:
                memory[:] = contents[-1]
        return contents

    def read(self, block_id: int) -> list[bytes]:
        """Returns the heads of a block, which must be the same on every rank that holds them."""
        heads = self.heads(block_id)
        assert all(copy == copies[0] for copies in heads for copy in copies)
        return [bytes(copies[0]) for copies in heads]

    def close(self) -> None:
        self.engine.close()
        for thread in self.threads:
            thread.close(5.0)
        assert not self.deaths


@dataclass
class GroupedNodes:
    prefill: GroupedNode
    decode: GroupedNode

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget("p0", self.prefill.engine.address, self.prefill.engine.boot_id)

    def moved(self, tokens: int, first_block: int = 0) -> tuple[GroupBlock, ...]:
        return moved_blocks(self.decode.specs, SPEC.block_size, first_block, tokens)

    def order(self, tokens: int, first_block: int = 0) -> FetchOrder:
        return FetchOrder(
            transfer_id=TransferId(new_id(), 0, self.decode.engine.boot_id),
            target=self.target,
            token_ids=list(range(tokens)),
            first_block=first_block,
            block_ids=self.decode.ids(self.moved(tokens, first_block)),
            sampling=SAMPLING,
            deadline_s=30.0,
        )

    def cached(self, blocks: int) -> CachedFetchOrder:
        return CachedFetchOrder(
            transfer_id=TransferId(new_id(), 0, self.decode.engine.boot_id),
            target=self.target,
            hashes=tuple(bytes([number]) * 32 for number in range(blocks)),
            block_ids=self.decode.ids(self.moved(blocks * SPEC.block_size)),
            deadline_s=30.0,
        )


@contextmanager
def grouped_nodes(
    folder: Path,
    sources: int = 1,
    targets: int = 1,
    groups: Sequence[GroupSpec] = GROUPS,
    fabric: Fabric | None = None,
    counts: Sequence[int] = COUNTS,
) -> Iterator[GroupedNodes]:
    """``counts`` are the blocks of the decode node."""
    with ExitStack() as stack:
        prefill = GroupedNode("prefill", sources, groups, folder, fabric)
        stack.callback(prefill.close)
        decode = GroupedNode("decode", targets, groups, folder, fabric, counts)
        stack.callback(decode.close)
        yield GroupedNodes(prefill, decode)
