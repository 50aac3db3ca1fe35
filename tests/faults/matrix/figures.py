"""The measured seconds of each cell, as they are committed."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Figures(msgspec.Struct, frozen=True):
    seconds: dict[str, list[float]] = {}
    """How long the client has waited for what the fault held up, in each repeat, by the cell's name."""
    failures: dict[str, int] = {}
    """How many repeats have failed, by the cell's name."""

    def having(self, cell: str, seconds: float) -> Figures:
        """Returns these figures with one more."""
        seconds_of_it = [*self.seconds.get(cell, []), round(seconds, 3)]
        return Figures({**self.seconds, cell: seconds_of_it}, self.failures)

    def having_failed(self, cell: str) -> Figures:
        """Returns these figures with one more failure."""
        return Figures(self.seconds, {**self.failures, cell: self.failures.get(cell, 0) + 1})


def read_figures(path: Path) -> Figures:
    return msgspec.json.decode(path.read_bytes(), type=Figures)


def write_figures(path: Path, figures: Figures) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
