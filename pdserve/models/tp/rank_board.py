"""Keeps, in memory that the ranks of one host share, how far each rank has come and whether to give up."""

from __future__ import annotations

import contextlib
import mmap
import os

_LINE_BYTES = 64
"""Each rank has a cache line of its own for its counters, so that ranks do not take each other's."""
_HEADER_BYTES = 16_384
_ABANDONED = _HEADER_BYTES // 8 - 1
AREA_BYTES = 8 * 2**20
"""The size of one exchange area, in which one rank shows the others a tensor."""


class RankBoard:
    """Two counters for each rank, then two sets of exchange areas.

    The memory has no name, so the kernel frees it after the last process that has mapped it.
    """

    def __init__(self, descriptor: int) -> None:
        """Maps the memory that ``create`` has made, in this process or in the one that passed ``descriptor`` on."""
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._words = memoryview(self._map)[:_HEADER_BYTES].cast("q")

    @classmethod
    def create(cls, size: int) -> RankBoard:
        """Makes a board for ``size`` ranks. Pages that no rank writes to cost no memory."""
        descriptor = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _HEADER_BYTES + 2 * size * AREA_BYTES)
        return cls(descriptor)

    @property
    def areas(self) -> memoryview:
        """Returns all exchange areas, as bytes: ``2 * size`` of ``AREA_BYTES``."""
        return memoryview(self._map)[_HEADER_BYTES:]

    def advance(self, rank: int) -> int:
        """Counts that ``rank`` begins its next collective, and returns the number of it."""
        word = rank * _LINE_BYTES // 8
        self._words[word] += 1
        return self._words[word]

    def progress(self, rank: int) -> int:
        """Returns how many collectives ``rank`` has begun."""
        return self._words[rank * _LINE_BYTES // 8]

    def add_copied(self, rank: int) -> None:
        """Counts that ``rank`` has carried out its next order to copy KV blocks."""
        self._words[rank * _LINE_BYTES // 8 + 1] += 1

    def copied(self, rank: int) -> int:
        """Returns how many orders to copy KV blocks ``rank`` has carried out."""
        return self._words[rank * _LINE_BYTES // 8 + 1]

    def behind(self, rank: int, size: int) -> tuple[int, ...]:
        """Returns the ranks that ``rank`` waits for: those that have begun fewer collectives, else all others."""
        mine, others = self.progress(rank), [other for other in range(size) if other != rank]
        return tuple(other for other in others if self.progress(other) < mine) or tuple(others)

    def abandon(self) -> None:
        """Tells every rank that waits, or will wait, that a rank is gone."""
        self._words[_ABANDONED] = 1

    @property
    def abandoned(self) -> bool:
        return bool(self._words[_ABANDONED])

    def close(self) -> None:
        """Closes the board. Tensors over its memory keep it mapped until they are gone."""
        os.close(self.descriptor)
        self._words.release()
        with contextlib.suppress(BufferError):
            self._map.close()
