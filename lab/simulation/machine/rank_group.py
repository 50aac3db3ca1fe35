"""What the ranks of one simulated engine share: the board, and a group in which they wait for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lab.simulation.machine.messaging import Pollable, SimContext
from lab.simulation.machine.virtual_time import present_thread
from pdserve.config import ParallelConfig
from pdserve.errors import RankLost
from pdserve.liveness import LifeBoard
from pdserve.models.tp.rank_board import _HEADER_BYTES, RankBoard


class SharedWords(Pollable):
    """The memory of a board. Threads wait until somebody writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = memoryview(bytearray(_HEADER_BYTES)).cast("q")
        self.shown: dict[tuple[int, int], Any] = {}
        """What each rank has shown the others in the last two collectives."""

    def events(self) -> int:
        return 0


class SignWords(Pollable):
    """The memory of a life board."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.words = memoryview(bytearray(64 * count)).cast("d")

    def events(self) -> int:
        return 0


class SimLifeBoard(LifeBoard):
    """The signs of life of one simulated engine's loops, whose descriptor stands for memory of the simulation."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        found = SimContext.descriptors.open[descriptor]
        assert isinstance(found, SignWords)
        self._words = found.words

    @classmethod
    def create(cls, count: int) -> SimLifeBoard:
        return cls(SimContext.descriptors.add(SignWords(count)))

    def close(self) -> None:
        """The engine has this memory still."""


class SimBoard(RankBoard):
    """The board, whose descriptor stands for memory of the simulation."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        found = SimContext.descriptors.open[descriptor]
        assert isinstance(found, SharedWords)
        self.shared = found
        self._words = found.words

    @classmethod
    def create(cls, size: int) -> SimBoard:
        return cls(SimContext.descriptors.add(SharedWords()))

    def advance(self, rank: int) -> int:
        number = super().advance(rank)
        self.shared.notify()
        return number

    def abandon(self) -> None:
        super().abandon()
        self.shared.notify()

    def close(self) -> None:
        """The other ranks have this memory still."""


class SimGroup:
    """Satisfies ``shares.TpGroup``. Instead of tensors, ranks show each other what their steps begin and end with."""

    def __init__(self, board: SimBoard, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._board, self._timeout_s = board, timeout_s

    @classmethod
    def open(
        cls, config: ParallelConfig, rank: int, board: SimBoard, rendezvous: Path, device: torch.device
    ) -> SimGroup:
        """Takes the place of ``open_group``."""
        return cls(board, rank, config.tensor_parallel_size, config.timeout_ms / 1000)

    def exchange(self, value: object) -> list[Any]:
        """Shows ``value`` to the others, and returns what each rank shows. Raises RankLost if one does not come."""
        board = self._board
        shown, number = board.shared.shown, board.progress(self.rank) + 1
        # No rank is two collectives ahead of another, so two places are enough.
        shown[number & 1, self.rank] = value
        board.advance(self.rank)
        self._wait(number)
        return [shown[number & 1, rank] for rank in range(self.size)]

    def _wait(self, number: int) -> None:
        """Waits until every rank has begun this collective."""
        board, thread = self._board, present_thread()
        until = thread.now() + self._timeout_s
        board.shared.watch(thread)
        try:
            while any(board.progress(rank) < number for rank in range(self.size)):
                if board.abandoned:
                    raise RankLost("a tensor-parallel rank is gone")
                if thread.now() >= until:
                    raise RankLost.silent(board.behind(self.rank, self.size), self._timeout_s)
                thread.block(until - thread.now())
        finally:
            board.shared.unwatch(thread)

    def begin_step(self) -> None:
        """Does nothing: each exchange counts itself."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the simulated model has no tensors")

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the simulated model has no tensors")

    def read(self, values: torch.Tensor) -> list[int]:
        raise AssertionError("the simulated model has no tensors")

    def finish_step(self) -> None:
        """Does nothing: each exchange has waited until it was done."""

    def warmed_up(self) -> None:
        """Does nothing: nothing is compiled here."""

    def close(self) -> None:
        pass
