"""Memory that the ranks of one host share: how far each has come, and whether to give up."""

from __future__ import annotations

import contextlib
import mmap
import os

_LINE_BYTES = 64
"""Of each rank, so that ranks do not take each other's cache lines."""
_HEADER_BYTES = 16_384
_ABANDONED = _HEADER_BYTES // 8 - 1
SLOT_BYTES = 8 * 2**20
"""Of one rank's tensor in one set of them."""


class RankBoard:
    """Two counters a rank, then two sets of slots for tensors. It has no name: it is gone with its last process."""

    def __init__(self, descriptor: int) -> None:
        """Maps what ``create`` has made, here or in the process that handed ``descriptor`` down."""
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._words = memoryview(self._map)[:_HEADER_BYTES].cast("q")

    @classmethod
    def create(cls, size: int) -> RankBoard:
        """For ``size`` ranks. Pages that nobody writes to cost no memory."""
        descriptor = os.memfd_create("pdserve-ranks", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _HEADER_BYTES + 2 * size * SLOT_BYTES)
        return cls(descriptor)

    @property
    def slots(self) -> memoryview:
        """All of them, as bytes: ``2 * size`` of ``SLOT_BYTES``."""
        return memoryview(self._map)[_HEADER_BYTES:]

    def advance(self, rank: int) -> int:
        """``rank`` begins its next collective; the number of it."""
        word = rank * _LINE_BYTES // 8
        self._words[word] += 1
        return self._words[word]

    def progress(self, rank: int) -> int:
        """How many collectives it has begun."""
        return self._words[rank * _LINE_BYTES // 8]

    def add_copied(self, rank: int) -> None:
        """``rank`` has carried out its next order to copy KV blocks."""
        self._words[rank * _LINE_BYTES // 8 + 1] += 1

    def copied(self, rank: int) -> int:
        """How many such orders it has carried out."""
        return self._words[rank * _LINE_BYTES // 8 + 1]

    def behind(self, rank: int, size: int) -> tuple[int, ...]:
        """Whom ``rank`` waits for: those that have begun fewer collectives; any other, if all have begun this one."""
        mine, others = self.progress(rank), [other for other in range(size) if other != rank]
        return tuple(other for other in others if self.progress(other) < mine) or tuple(others)

    def abandon(self) -> None:
        """Tell every rank that waits, or will wait, that a rank is gone."""
        self._words[_ABANDONED] = 1

    @property
    def abandoned(self) -> bool:
        return bool(self._words[_ABANDONED])

    def close(self) -> None:
        """Tensors that still look at the memory keep it mapped until they are gone."""
        os.close(self.descriptor)
        self._words.release()
        with contextlib.suppress(BufferError):
            self._map.close()
