"""Steps of a tensor-parallel engine: rank 0 tells the others what it does, and does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pdserve.config import EngineConfig
from pdserve.engine.followers import Followers
from pdserve.errors import RankLost
from pdserve.models.runner import ModelRunner
from pdserve.models.step_batch import StepRow
from pdserve.models.tensor_parallel import ALONE, TpGroup
from pdserve.models.tp_opening import open_group
from pdserve.wire.rank import Arrived, Clear, CopyBlocks, Row, Step


class TpRunner:
    """Satisfies ``StepRunner``. Owns neither its own rank's runner nor the other ranks."""

    def __init__(self, own: ModelRunner, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def run(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Raises RankLost, which says which rank and why, if one did not do its part."""
        self._followers.tell(
            Step([Row(list(row.token_ids), row.start, list(row.block_table), row.wants_logits) for row in rows])
        )
        try:
            return self._own.run(rows)
        except RankLost as exc:
            raise self._followers.explain(exc) from exc

    def clear(self, blocks: Sequence[int]) -> None:
        self._followers.tell(Clear(list(blocks)))
        self._own.clear(blocks)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._followers.tell(CopyBlocks(list(sources), list(destinations)))
        self._own.copy_blocks(sources, destinations)


@contextmanager
def joined(config: EngineConfig, followers: Followers | None) -> Iterator[TpGroup]:
    """The group of rank 0 and its followers, or of rank 0 alone. Raises RankLost if they do not come."""
    group: TpGroup = ALONE
    if followers is not None:
        followers.wait_for(Arrived)
        group = open_group(config.parallel, 0, followers.board, followers.rendezvous)
    try:
        yield group
    finally:
        group.close()
