"""When all ranks have all of a prompt: many ranks' pieces of many blocks, turned into one completion.

Without I/O or clock. Reports may come in any order, twice, or for pieces that are not expected; only a piece that has
landed, and whose digest is the announced one, counts, and it counts once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Verdict(enum.Enum):
    """On one piece of news."""

    FINE = "fine"
    IGNORED = "ignored"
    """Known already, or about nothing that is expected."""
    CORRUPT = "corrupt"
    """A piece is not what was sent, or two announcements contradict each other."""


@dataclass(frozen=True, slots=True)
class PieceKey:
    rank: int
    index: int


class Aggregator:
    """The pieces of blocks ``first_block`` to ``first_block + blocks - 1``, where ``slots[rank]`` make one block."""

    def __init__(self, first_block: int, blocks: int, slots: Sequence[int], *, checked: bool) -> None:
        """With ``checked``, pieces need an announced digest."""
        self._first_block = first_block
        self._slots = tuple(slots)
        self._missing = [sum(self._slots)] * blocks
        self._left = self._pieces = sum(self._missing)
        self._checked = checked
        self._announced: dict[PieceKey, int] = {}
        self._found: dict[PieceKey, int] = {}

    @property
    def complete(self) -> bool:
        return self._left == 0

    @property
    def share_missing(self) -> float:
        """Of all pieces, those that have not landed yet: 1 at the start, 0 when complete."""
        return self._left / self._pieces if self._pieces else 0.0

    @property
    def leading_blocks(self) -> int:
        """How many blocks from the first on are there in full, on every rank."""
        return next((i for i, missing in enumerate(self._missing) if missing), len(self._missing))

    def landed(self, rank: int, index: int, digest: int) -> Verdict:
        """A rank has received the piece that travelled as ``index``."""
        return self._note(self._found, PieceKey(rank, index), digest)

    def announced(self, rank: int, index: int, digest: int) -> Verdict:
        """What that piece must be, by its sender."""
        return self._note(self._announced, PieceKey(rank, index), digest)

    def _note(self, known: dict[PieceKey, int], key: PieceKey, digest: int) -> Verdict:
        if not self._expected(key):
            return Verdict.IGNORED
        if key in known:
            return Verdict.IGNORED if known[key] == digest else Verdict.CORRUPT
        known[key] = digest
        if self._checked:
            if key not in self._found or key not in self._announced:
                return Verdict.FINE
            if self._found[key] != self._announced[key]:
                return Verdict.CORRUPT
        elif known is self._announced:
            return Verdict.FINE
        self._missing[key.index // self._slots[key.rank] - self._first_block] -= 1
        self._left -= 1
        return Verdict.FINE

    def _expected(self, key: PieceKey) -> bool:
        if not 0 <= key.rank < len(self._slots):
            return False
        return 0 <= key.index // self._slots[key.rank] - self._first_block < len(self._missing)
