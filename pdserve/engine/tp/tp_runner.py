"""Runs the steps of a tensor-parallel engine: rank 0 orders the others to do what it does itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pdserve.config import EngineConfig
from pdserve.engine.tp.rank_rows import SentRows
from pdserve.engine.tp.tp_ranks import Ranks
from pdserve.errors import RankLost
from pdserve.models.drafting import Choose, likeliest
from pdserve.models.runner import DraftRow, Graph, ModelRunner, Score, StepRow
from pdserve.models.tp.shares import ALONE, TpGroup
from pdserve.models.tp.tp_groups import open_group
from pdserve.wire.rank import Arrived, Capture, Captured, Clear, CopyBlocks
from pdserve_kernels.contract import GraphKernels


class TpRunner:
    """Satisfies ``StepRunner``. It closes neither rank 0's runner, nor the other ranks, nor the group of them all."""

    def __init__(self, own: ModelRunner, ranks: Ranks, group: TpGroup) -> None:
        self._own = own
        self._ranks = ranks
        self._sent = SentRows()
        self._group = group

    def run(self, rows: Sequence[StepRow], *, score: Score | None = None) -> torch.Tensor:
        """Computes a step on all ranks, and returns when the logits are computed, on a GPU, too.

        Raises RankLost, which names the rank and says why, if a rank did not do its part.
        """
        self._ranks.tell(self._sent.step(rows))
        try:
            logits = self._own.run(rows, score=score)
            self._group.finish_step()
            return logits
        except RankLost as exc:
            raise self._ranks.explain(exc) from exc

    def draft(self, rows: Sequence[DraftRow], count: int, choose: Choose = likeliest) -> list[list[int]]:
        """Drafts tokens on all ranks (``ModelRunner.draft``). Raises RankLost if a rank did not do its part."""
        self._ranks.tell(self._sent.draft(rows, count))
        try:
            drafts = self._own.draft(rows, count, choose)
            self._group.finish_step()
            return drafts
        except RankLost as exc:
            raise self._ranks.explain(exc) from exc

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes these blocks on all ranks.

        Returns when every other rank has done so: a late one would overwrite what a transfer puts there next. Raises
        RankLost.
        """
        self._ranks.tell(Clear(list(blocks)))
        self._own.clear(blocks)
        self._ranks.wait_for_blocks()

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole blocks on all ranks. Returns when every other rank has done so. Raises RankLost."""
        self._ranks.tell(CopyBlocks(list(sources), list(destinations)))
        self._own.copy_blocks(sources, destinations)
        self._ranks.wait_for_blocks()

    def capture_decode(
        self, kernels: GraphKernels, max_rows: int, make_graph: Callable[[], Graph], *, linked: bool = False
    ) -> None:
        """Records decode steps on every rank (``ModelRunner.capture_decode``). Returns when all ranks have."""
        self._ranks.tell(Capture(max_rows, linked))
        self._own.capture_decode(kernels, max_rows, make_graph, linked=linked)
        self._ranks.wait_for(Captured)

    def warmed_up(self) -> None:
        """Notes that all that steps need is compiled. From now on, a rank that is late counts as hanging."""
        self._group.warmed_up()


@contextmanager
def joined_group(config: EngineConfig, ranks: Ranks | None, device: torch.device) -> Iterator[TpGroup]:
    """Opens the group of rank 0, which computes on ``device``, and its ranks, or of rank 0 alone, for the block.

    Raises RankLost if a rank does not come, ConfigError if such ranks cannot meet.
    """
    group: TpGroup = ALONE
    if ranks is not None:
        ranks.wait_for(Arrived)
        group = open_group(config.parallel, 0, ranks.board, ranks.rendezvous, device)
    try:
        yield group
    finally:
        group.close()
