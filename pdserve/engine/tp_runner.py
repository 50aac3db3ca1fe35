"""Steps of a tensor-parallel engine: rank 0 tells the others what it does, and does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pdserve.config import EngineConfig
from pdserve.engine.followers import Followers
from pdserve.errors import RankLost
from pdserve.models.decode_graphs import Graph
from pdserve.models.runner import ModelRunner
from pdserve.models.step_batch import StepRow
from pdserve.models.tensor_parallel import ALONE, TpGroup
from pdserve.models.tp_opening import open_group
from pdserve.wire.rank import Arrived, Capture, Captured, Clear, CopyBlocks, Row, Step
from pdserve_kernels.contract import GraphKernels


class TpRunner:
    """Satisfies ``StepRunner``. Owns neither its own rank's runner nor the other ranks, nor the group of them all."""

    def __init__(self, own: ModelRunner, followers: Followers, group: TpGroup) -> None:
        self._own = own
        self._followers = followers
        self._group = group
        self._warming_up = True

    def run(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Returns when the logits are computed, on a GPU too.

        Raises RankLost, which says which rank and why, if one did not do its part.
        """
        self._followers.tell(
            Step([Row(list(row.token_ids), row.start, list(row.block_table), row.wants_logits) for row in rows])
        )
        try:
            logits = self._own.run(rows)
            self._group.finish_step(self._warming_up)
            return logits
        except RankLost as exc:
            raise self._followers.explain(exc) from exc

    def clear(self, blocks: Sequence[int]) -> None:
        """Returns when it is done on every other rank: a late one would destroy what a transfer puts there next.

        Raises RankLost.
        """
        self._followers.tell(Clear(list(blocks)))
        self._own.clear(blocks)
        self._followers.wait_for_blocks()

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """As ``clear``."""
        self._followers.tell(CopyBlocks(list(sources), list(destinations)))
        self._own.copy_blocks(sources, destinations)
        self._followers.wait_for_blocks()

    def capture_decode(self, kernels: GraphKernels, max_rows: int, make_graph: Callable[[], Graph]) -> None:
        """Record decode steps on every rank: see ``ModelRunner.capture_decode``. Returns once all have."""
        self._followers.tell(Capture())
        self._own.capture_decode(kernels, max_rows, make_graph)
        self._followers.wait_for(Captured)

    def warmed_up(self) -> None:
        """From now on a rank that is late hangs: what steps need is compiled."""
        self._warming_up = False


@contextmanager
def joined(config: EngineConfig, followers: Followers | None, device: torch.device) -> Iterator[TpGroup]:
    """The group of rank 0, which computes on ``device``, and its followers, or of rank 0 alone.

    Raises RankLost if they do not come, ConfigError if such ranks cannot meet.
    """
    group: TpGroup = ALONE
    if followers is not None:
        followers.wait_for(Arrived)
        group = open_group(config.parallel, 0, followers.board, followers.rendezvous, device)
    try:
        yield group
    finally:
        group.close()
