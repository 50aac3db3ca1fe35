"""Maps a file of weights, so that a part of it is in memory only while it is used."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch


class MappedFile:
    """The bytes of a file, which nobody may write to."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened, and ValueError if it is empty."""
        with path.open("rb") as file:
            # torch wants memory that may be written to. Nobody does, and it would not reach the file.
            self._mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        self.size = len(self._mapping)

    def tensor(self, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        """Returns ``count`` numbers, from byte ``start`` of the file on, without reading them."""
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start)

    def read_ahead(self, start: int, nbytes: int) -> None:
        """Begins to read these bytes from the disk, in larger pieces than those in which they are used."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes:
            self._mapping.madvise(mmap.MADV_WILLNEED, first, start + nbytes - first)

    def drop(self) -> None:
        """Takes all that has been read out of this process's memory. Tensors stay: their bytes come again when used."""
        self._mapping.madvise(mmap.MADV_DONTNEED)
