"""Hands out memory for packed weights.

Weights are read from end to end in every step, and large pages save most of the address translation. Many weights are
smaller than such a page, so they share pieces of memory that are made of large pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pdserve_kernels.cpu.library import Library

LINE = 64
"""Each weight begins at a multiple of so many bytes, so that no vector lies across two lines of the cache."""
PIECE = 32 * 2**20
"""A piece has so many bytes. What is left of it takes no memory, because it is never written."""


class FilledMemory(Protocol):
    """Memory that holds packed weights, or takes them."""

    def filled(self, key: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Returns ``nbytes`` bytes, which nobody may write to, with what ``fill`` writes or has once written there.

        They begin at a multiple of ``LINE``. The same ``key`` means the same bytes; an empty one means no others.
        """


class WeightMemory:
    """Satisfies ``FilledMemory`` with memory of this process.

    A piece is freed when none of the weights in it is left.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._left = torch.empty(0, dtype=torch.uint8)

    def filled(self, key: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """See ``FilledMemory``. Nothing is found again."""
        taken = self.take(nbytes)
        fill(taken)
        return taken

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns ``nbytes`` bytes, which are not written yet and begin at a multiple of ``LINE``."""
        rounded = -(-nbytes // LINE) * LINE
        if rounded > PIECE // 4:
            return self._piece(rounded)[:nbytes]
        if rounded > self._left.numel():
            self._left = self._piece(PIECE)
        taken, self._left = self._left[:nbytes], self._left[rounded:]
        return taken

    def _piece(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes + LINE, dtype=torch.uint8)
        self._library.ask_for_large_pages(memory.data_ptr(), memory.nbytes)
        return memory[-memory.data_ptr() % LINE :]
