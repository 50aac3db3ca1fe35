"""Which KV blocks are free, owned by a request, or quarantined.

A quarantined block belongs to nobody, but something may still write to it (an accepted receive that has not
completed) or read from it: it is not handed out until it is released. Every block is in exactly one state; a block
freed twice or handed out while owned is an EngineError at once, never a wrong answer later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pdserve.errors import EngineError

_FREE, _OWNED, _QUARANTINED = 0, 1, 2


class BlockManager:
    """The pool of one engine's block ids, 0 to ``num_blocks - 1``."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._state = bytearray(num_blocks)
        self._free = deque(range(num_blocks))
        self._quarantined = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return self._quarantined

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def grow(self, block_table: list[int], tokens: int) -> bool:
        """Extend ``block_table`` to hold ``tokens`` tokens. False, and nothing changed, if too few blocks are free."""
        missing = self.blocks_for(tokens) - len(block_table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block_table.append(self._take())
        return True

    def replace(self, block_table: list[int], quarantined: Iterable[int]) -> bool:
        """Put free blocks in the places of quarantined ones. False, and nothing changed, if too few are free."""
        bad = set(quarantined)
        places = [i for i, block in enumerate(block_table) if block in bad]
        if len(places) > len(self._free):
            return False
        for i in places:
            block_table[i] = self._take()
        return True

    def free(self, block_table: list[int]) -> None:
        """Take all blocks back and empty the table; blocks quarantined meanwhile stay where they are."""
        for block in block_table:
            if self._state[block] == _OWNED:
                self._put(block)
            elif self._state[block] == _FREE:
                raise EngineError(f"KV block {block} was freed twice")
        block_table.clear()

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Set owned blocks aside until ``release``."""
        for block in blocks:
            if self._state[block] != _OWNED:
                raise EngineError(f"KV block {block} is quarantined but owned by nobody")
            self._state[block] = _QUARANTINED
            self._quarantined += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Nothing touches these quarantined blocks any more: they are free."""
        for block in blocks:
            if self._state[block] != _QUARANTINED:
                raise EngineError(f"KV block {block} is released but was not quarantined")
            self._quarantined -= 1
            self._put(block)

    def _take(self) -> int:
        block = self._free.popleft()
        self._state[block] = _OWNED
        return block

    def _put(self, block: int) -> None:
        self._state[block] = _FREE
        self._free.append(block)
