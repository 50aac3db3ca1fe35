"""Lets the ranks of one host add up their tensors in memory that they share.

Every rank writes its tensor into an exchange area of its own, raises its counter, waits until all ranks have, and adds
up all areas in rank order, so that all ranks get the same bits. Areas alternate between two sets: before a rank writes
to an area again, every rank has begun the collective in between, and so has read the area.

With two ranks on a core each, a sum was measured to take 9 µs for one row of 576 numbers and 11 µs for 16 rows, where
gloo over loopback takes 100 µs at its best. SmolLM2-135M takes 61 such sums a step.
"""

from __future__ import annotations

import os
import platform
import time

import torch

from pdserve.errors import RankLost
from pdserve.models.tp.rank_board import AREA_BYTES, RankBoard
from pdserve.patience import PatientWait

_SPINS = 200
_YIELD_S = 0.005
_NAP_S = 0.0001


def ordered_stores() -> bool:
    """Returns whether other cores see a core's writes in the order in which it made them, as a counter needs it."""
    return platform.machine() in ("x86_64", "AMD64")


class SharedMemoryGroup:
    """Satisfies ``shares.TpGroup`` for CPU tensors, on CPUs with ``ordered_stores``."""

    def __init__(self, board: RankBoard, rank: int, size: int, timeout_s: float) -> None:
        """``timeout_s`` is how long one rank may keep the others waiting."""
        self.rank, self.size = rank, size
        self._board, self._timeout_s = board, timeout_s
        self._others = [other for other in range(size) if other != rank]
        # A tensor that is larger than an area is added up in parts.
        self._areas = torch.frombuffer(board.areas, dtype=torch.uint8).view(2, size, AREA_BYTES)

    def begin_step(self) -> None:
        """Does nothing: each operation counts itself."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Raises RankLost if a rank is gone or does not come."""
        flat = x.view(-1)
        at_once = AREA_BYTES // x.element_size()
        for start in range(0, flat.shape[0], at_once):
            part = flat[start : start + at_once]
            areas = self._share(part)
            self._wait_for(self._others, self._board.progress(self.rank))
            if self.size == 2:
                torch.add(areas[0], areas[1], out=part)
            else:
                total = areas[0].to(torch.float32, copy=True)
                for other in range(1, self.size):
                    total += areas[other]
                part.copy_(total)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Raises RankLost if a rank is gone or does not come."""
        rows, columns = x.shape
        if rows == 0:
            return x.new_empty(0, self.size * columns)
        out = x.new_empty(rows, self.size, columns) if self.rank == 0 else x.new_empty(rows, 0)
        at_once = max(AREA_BYTES // (columns * x.element_size()), 1)
        for start in range(0, rows, at_once):
            part = x[start : start + at_once].contiguous()
            areas = self._share(part.view(-1))
            if self.rank == 0:
                self._wait_for(self._others, self._board.progress(0))
                out[start : start + at_once] = areas.view(self.size, -1, columns).transpose(0, 1)
        return out.view(rows, -1)

    def finish_step(self) -> None:
        """Does nothing: each operation has waited until it was done."""

    def warmed_up(self) -> None:
        """Does nothing: nothing is compiled in a step on a CPU."""

    def close(self) -> None:
        del self._areas

    def _share(self, part: torch.Tensor) -> torch.Tensor:
        """Shows this rank's part to the others. Returns all parts, ``[size, elements]``, which may still come."""
        number = self._board.progress(self.rank) + 1
        # A rank that waits for no other, as in gather, must not run two collectives ahead of one that still reads.
        self._wait_for(self._others, number - 1)
        areas = self._areas[number & 1][:, : part.numel() * part.element_size()].view(part.dtype)
        areas[self.rank].copy_(part)
        self._board.advance(self.rank)
        return areas

    def _wait_for(self, ranks: list[int], number: int) -> None:
        """Waits until all of ``ranks`` have begun collective ``number``."""
        for rank in ranks:
            for _ in range(_SPINS):
                if self._board.progress(rank) >= number:
                    break
            else:
                self._wait_long(rank, number)

    def _wait_long(self, rank: int, number: int) -> None:
        # Ranks with cores of their own differ by microseconds. If ranks share cores, the other rank needs this one's.
        board, wait = self._board, PatientWait()
        while board.progress(rank) < number:
            if board.abandoned:
                raise RankLost("a tensor-parallel rank is gone")
            waited_s = wait.look()
            if waited_s > self._timeout_s:
                raise RankLost.silent(board.behind(self.rank, self.size), self._timeout_s)
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
