"""The measured seconds of each cell, as they are committed."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Figures(msgspec.Struct, frozen=True):
    seconds: dict[str, list[float]] = {}
    """How long the client has waited for what the fault held up, in each repeat, by the cell's name."""

    def having(self, cell: str, seconds: float) -> Figures:
        """Returns these figures with one more."""
        return Figures({**self.seconds, cell: [*self.seconds.get(cell, []), round(seconds, 3)]})


def read_figures(path: Path) -> Figures:
    return msgspec.json.decode(path.read_bytes(), type=Figures)


def write_figures(path: Path, figures: Figures) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
