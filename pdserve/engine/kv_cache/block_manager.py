"""Which KV blocks are free, held by requests, kept for later, or set aside.

    FREE ─▶ HELD ─▶ FREE                 by one request or, read-only, by several: reference counted
            HELD ─▶ IDLE ─▶ HELD         in the prefix cache and held by nobody; FREE as soon as a block is needed
            HELD ─▶ QUARANTINED ─▶ FREE  something may still write to it: an accepted receive that has not completed
            HELD ─▶ UNCLEAN ─▶ FREE      holds what is not finite, and has to be cleared first

Every block is in exactly one state; a block freed twice or handed out while held is an EngineError at once, never a
wrong answer later.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pdserve.engine.kv_cache.prefix_cache import Match, PrefixCache
from pdserve.errors import EngineError


class _BlockState(enum.IntEnum):
    FREE = 0
    HELD = 1
    IDLE = 2
    QUARANTINED = 3
    UNCLEAN = 4


class BlockManager:
    """The pool of one engine's block ids, 0 to ``num_blocks - 1``."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        """Without ``prefix_cache``, no block is found again."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = prefix_cache
        self._cache = PrefixCache()
        self._state = bytearray(num_blocks)
        self._holders = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._quarantined = 0
        self._tainted: set[int] = set()
        self._unclean: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be had now, idle ones of the prefix cache among them."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_quarantined(self) -> int:
        return self._quarantined

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache can find, in use or idle."""
        return len(self._cache)

    @property
    def caching(self) -> bool:
        return self._caching

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def num_holders(self, block: int) -> int:
        """How many block tables it is in. A block may be written to only by its one holder."""
        return self._holders[block]

    # ------------------------------------------------------------ taking

    def grow(self, block_table: list[int], tokens: int) -> bool:
        """Extend ``block_table`` to hold ``tokens`` tokens. False, and nothing changed, if too few blocks are free."""
        missing = self.blocks_for(tokens) - len(block_table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block_table.append(self._take())
        return True

    def replace(self, block_table: list[int], quarantined: Iterable[int]) -> bool:
        """Put free blocks in the places of quarantined ones. False, and nothing changed, if too few are free."""
        bad = set(quarantined)
        places = [i for i, block in enumerate(block_table) if block in bad]
        if len(places) > self.num_free:
            return False
        for i in places:
            block_table[i] = self._take()
        return True

    def share(self, block_table: list[int], blocks: Iterable[int]) -> None:
        """Append blocks that are held by others or idle. They are read-only from now on."""
        for block in blocks:
            if self._state[block] == _BlockState.IDLE:
                self._cache.wake(block)
                self._state[block] = _BlockState.HELD
            elif self._state[block] != _BlockState.HELD:
                raise EngineError(f"KV block {block} is shared but holds nothing")
            self._holders[block] += 1
            block_table.append(block)

    # ------------------------------------------------------------ giving back

    def free(self, block_table: list[int]) -> None:
        """Take all blocks back and empty the table; blocks quarantined meanwhile stay where they are."""
        # The end of a prefix first, so that it is also evicted first: without what comes before it, it is useless.
        for block in reversed(block_table):
            if self._state[block] == _BlockState.HELD:
                self._holders[block] -= 1
                if not self._holders[block]:
                    self._let_go(block)
            elif self._state[block] != _BlockState.QUARANTINED:
                raise EngineError(f"KV block {block} was freed twice")
        block_table.clear()

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Set held blocks aside until ``release``."""
        for block in blocks:
            if self._state[block] != _BlockState.HELD:
                raise EngineError(f"KV block {block} is quarantined but held by nobody")
            if self._holders[block] > 1 or block in self._cache:
                raise EngineError(f"KV block {block} is quarantined but others may read it")
            self._state[block] = _BlockState.QUARANTINED
            self._holders[block] = 0
            self._quarantined += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Nothing touches these quarantined blocks any more: they are free."""
        for block in blocks:
            if self._state[block] != _BlockState.QUARANTINED:
                raise EngineError(f"KV block {block} is released but was not quarantined")
            self._quarantined -= 1
            self._let_go(block)

    # ------------------------------------------------------------ the prefix cache

    def match(self, hashes: Sequence[bytes], count: int, match: Match) -> Sequence[int]:
        """The blocks of the longest prefix of the first ``count`` of ``hashes`` that is in the prefix cache.

        To be shared before all else. ``match`` is what was found of the same hashes before, and is brought up to date.
        """
        self._cache.match(hashes, count, match)
        return match.blocks

    def free_beside(self, blocks: Sequence[int]) -> int:
        """How many blocks could be had if ``blocks``, which ``match`` has found, were shared first."""
        return self.num_free - sum(self._state[block] == _BlockState.IDLE for block in blocks)

    def remember(self, block: int, block_hash: bytes) -> None:
        """A held block is full and final: it can be found under ``block_hash``, and is read-only from now on."""
        if self._state[block] != _BlockState.HELD:
            raise EngineError(f"KV block {block} is to be remembered but held by nobody")
        if self._caching and block not in self._tainted:
            self._cache.add(block, block_hash)

    # ------------------------------------------------------------ what is not finite

    def taint(self, blocks: Iterable[int]) -> None:
        """Held blocks that may hold what is not finite: not found again, and cleared when their last holder goes."""
        for block in blocks:
            if self._state[block] != _BlockState.HELD:
                raise EngineError(f"KV block {block} is tainted but held by nobody")
            self._cache.drop(block)
            self._tainted.add(block)

    def clean(self, clear: Callable[[Sequence[int]], None]) -> None:
        """Have ``clear`` zero the tainted blocks that nobody holds any more, and free them."""
        if not self._unclean:
            return
        clear(self._unclean)
        self._tainted.difference_update(self._unclean)
        unclean, self._unclean = self._unclean, []
        for block in unclean:
            self._let_go(block)

    # ------------------------------------------------------------ states

    def _take(self) -> int:
        block = self._free.popleft() if self._free else self._cache.evict()
        self._state[block] = _BlockState.HELD
        self._holders[block] = 1
        return block

    def _let_go(self, block: int) -> None:
        if block in self._tainted:
            self._state[block] = _BlockState.UNCLEAN
            self._unclean.append(block)
        elif block in self._cache:
            self._state[block] = _BlockState.IDLE
            self._cache.rest(block)
        else:
            self._state[block] = _BlockState.FREE
            self._free.append(block)
