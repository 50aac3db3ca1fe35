"""The measured seconds of each cell, as they are committed."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Figures(msgspec.Struct, frozen=True):
    seconds: dict[str, list[float]] = {}
    """How long the client has waited for what the fault held up, in each repeat, by the cell's name."""
    failures: dict[str, int] = {}
    """How many repeats have failed, by the cell's name."""

    def having(self, cell: str, seconds: Sequence[float], failures: int) -> Figures:
        """Returns these figures with a cell's new ones in place of its old ones."""
        others_s = {name: kept for name, kept in self.seconds.items() if name != cell}
        others_failed = {name: kept for name, kept in self.failures.items() if name != cell}
        if seconds:
            others_s[cell] = [round(one, 3) for one in seconds]
        if failures:
            others_failed[cell] = failures
        return Figures(others_s, others_failed)


def read_figures(path: Path) -> Figures:
    return msgspec.json.decode(path.read_bytes(), type=Figures)


def put_cell(path: Path, cell: str, seconds: Sequence[float], failures: int, *, add: bool = False) -> None:
    """Puts a cell's new figures into the file, in place of its old ones or beside them.

    Others may put theirs into it at the same time.
    """
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = file.read()
        figures = msgspec.json.decode(before, type=Figures) if before else Figures()
        if add:
            seconds = [*figures.seconds.get(cell, []), *seconds]
            failures += figures.failures.get(cell, 0)
        file.truncate(0)
        file.write(msgspec.json.format(msgspec.json.encode(figures.having(cell, seconds, failures)), indent=1) + b"\n")
