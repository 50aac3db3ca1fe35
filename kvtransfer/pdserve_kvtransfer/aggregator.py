"""When all ranks have all of a prompt: many ranks' pieces of many blocks, turned into one completion.

Without I/O or clock. Reports may come in any order, twice, or for pieces that are not expected; only a piece that has
landed, and whose digest is the announced one, counts, and it counts once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Verdict(enum.Enum):
    """On one piece of news."""

    FINE = "fine"
    IGNORED = "ignored"
    """Known already, or about nothing that is expected."""
    CORRUPT = "corrupt"
    """A piece is not what was sent, or two announcements contradict each other."""


class Aggregator:
    """The pieces of blocks ``first_block`` to ``first_block + blocks - 1``, where ``slots[rank]`` make one block."""

    def __init__(self, first_block: int, blocks: int, slots: Sequence[int], *, checked: bool) -> None:
        """With ``checked``, pieces need an announced digest."""
        self._first_block = first_block
        self._slots = tuple(slots)
        self._missing = [sum(self._slots)] * blocks
        self._left = self._pieces = sum(self._missing)
        self._checked = checked
        # By rank and place; None where nothing is known yet.
        self._announced: list[list[int | None]] = [[None] * (slots_here * blocks) for slots_here in self._slots]
        self._found: list[list[int | None]] = [[None] * (slots_here * blocks) for slots_here in self._slots]

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
        return self.leading_from(0)

    def leading_from(self, blocks: int) -> int:
        """``leading_blocks``, of which so many are known already."""
        while blocks < len(self._missing) and not self._missing[blocks]:
            blocks += 1
        return blocks

    def landed(self, rank: int, index: int, digest: int) -> Verdict:
        """A rank has received the piece that travelled as ``index``."""
        return self._note(self._found, self._announced, rank, index, digest)

    def announced(self, rank: int, index: int, digest: int) -> Verdict:
        """What that piece must be, by its sender."""
        return self._note(self._announced, self._found, rank, index, digest)

    def _note(
        self, known: list[list[int | None]], other: list[list[int | None]], rank: int, index: int, digest: int
    ) -> Verdict:
        if not 0 <= rank < len(known):
            return Verdict.IGNORED
        slots = self._slots[rank]
        at = index - self._first_block * slots
        if not 0 <= at < len(known[rank]):
            return Verdict.IGNORED
        before = known[rank][at]
        if before is not None:
            return Verdict.IGNORED if before == digest else Verdict.CORRUPT
        known[rank][at] = digest
        if self._checked:
            expected = other[rank][at]
            if expected is None:
                return Verdict.FINE
            if expected != digest:
                return Verdict.CORRUPT
        elif known is self._announced:
            return Verdict.FINE
        self._missing[at // slots] -= 1
        self._left -= 1
        return Verdict.FINE
