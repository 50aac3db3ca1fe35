"""What the step loop needs of whoever computes its steps: one process or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pdserve.models.step_batch import StepRow


class StepRunner(Protocol):
    """``ModelRunner`` alone, or ``TpRunner`` with the other ranks behind it."""

    def run(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Compute every row's tokens into the KV cache; single-token rows come first.

        Returns fp32 logits ``[number of rows with wants_logits, vocab_size]``, in the order of the rows.
        """

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks."""

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks. All sources are read before any destination is written."""


class AheadRunner(Protocol):
    """``ModelRunner``: it can be told a step whose tokens are on its device only."""

    def run(self, rows: Sequence[StepRow], tokens: torch.Tensor | None = None) -> torch.Tensor:
        """The same, where ``tokens`` take the place of the rows' single ones. Does not wait for a GPU."""
