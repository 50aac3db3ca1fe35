"""A stand-in for a CUDA graph where there is no GPU: a replay computes again what was captured."""

from __future__ import annotations

from collections.abc import Callable


class RerunGraph:
    """A graph in the sense of ``runner.Graph``."""

    replays = 0

    def capture(self, compute: Callable[[], None]) -> None:
        self._compute = compute

    def replay(self) -> None:
        self.replays += 1
        self._compute()


class RerunGraphs:
    """Makes graphs and keeps all of them in the order of capture."""

    def __init__(self) -> None:
        self.made: list[RerunGraph] = []

    def __call__(self) -> RerunGraph:
        self.made.append(RerunGraph())
        return self.made[-1]
