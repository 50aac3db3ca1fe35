"""Knows which KV blocks are free, held by requests, cached, or set aside.

    FREE ─▶ HELD ─▶ FREE                 by one request or, read-only, by several: reference counted
            HELD ─▶ IDLE ─▶ HELD         in the prefix cache and in no block table; FREE when a block is needed
            HELD ─▶ QUARANTINED ─▶ FREE  something may still write to it: an accepted receive that has not completed
            HELD ─▶ UNCLEAN ─▶ FREE      holds what is not finite, and has to be cleared first

Every block is in exactly one state; a block freed twice or handed out while held is an EngineError at once, never a
wrong answer later.

A block may be copied into another one before the next step. Until then the copy holds its source as a block table
would, and ends with its destination. So no copy reads or writes a block that can be taken.
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
        """Creates the pool, all of whose blocks are free. Without ``prefix_cache``, no block is found again."""
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
        self._copies: dict[int, int] = {}
        """The source of each block that is still to be written by a copy."""

    @property
    def num_free(self) -> int:
        """The number of blocks that can be taken now, idle ones of the prefix cache among them."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_quarantined(self) -> int:
        return self._quarantined

    @property
    def num_cached(self) -> int:
        """The number of blocks that the prefix cache can find, in use or idle."""
        return len(self._cache)

    @property
    def caching(self) -> bool:
        return self._caching

    def blocks_for(self, tokens: int) -> int:
        """Returns how many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def num_holders(self, block: int) -> int:
        """Returns how many block tables and pending copies hold a block. Only a block with one may be written to."""
        return self._holders[block]

    # ------------------------------------------------------------ taking

    def grow(self, block_table: list[int], tokens: int) -> bool:
        """Extends ``block_table`` to hold ``tokens`` tokens.

        Returns False, and changes nothing, if too few blocks are free.
        """
        missing = self.blocks_for(tokens) - len(block_table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block_table.append(self._take())
        return True

    def replace(self, block_table: list[int], quarantined: Iterable[int]) -> bool:
        """Puts free blocks in the places of quarantined ones.

        Returns False, and changes nothing, if too few blocks are free.
        """
        bad = set(quarantined)
        places = [i for i, block in enumerate(block_table) if block in bad]
        if len(places) > self.num_free:
            return False
        for i in places:
            block_table[i] = self._take()
        return True

    def share(self, block_table: list[int], blocks: Iterable[int]) -> None:
        """Appends blocks that are held already or idle. They are read-only from now on."""
        for block in blocks:
            if self._state[block] == _BlockState.IDLE:
                self._cache.wake(block)
                self._state[block] = _BlockState.HELD
            elif self._state[block] != _BlockState.HELD:
                raise EngineError(f"KV block {block} is shared but holds nothing")
            self._holders[block] += 1
            block_table.append(block)

    # ------------------------------------------------------------ copies

    def copy(self, source: int, destination: int) -> None:
        """Notes that a held block is to be copied into another one, which one block table holds."""
        if self._state[source] != _BlockState.HELD or self._state[destination] != _BlockState.HELD:
            raise EngineError(f"KV block {source} is to be copied into {destination}, but both have to be held")
        if self._holders[destination] != 1 or destination in self._copies or source in self._copies:
            raise EngineError(f"KV block {source} is to be copied into {destination}, which others use or still write")
        self._holders[source] += 1
        self._copies[destination] = source

    def take_copies(self) -> dict[int, int]:
        """Returns the source of each destination, and ends the copies' holds.

        They have to be made before anything else is written.
        """
        copies, self._copies = self._copies, {}
        for source in copies.values():
            self._drop_holder(source)
        return copies

    # ------------------------------------------------------------ giving back

    def free(self, block_table: list[int]) -> None:
        """Takes all blocks back and empties the table; blocks quarantined meanwhile stay quarantined."""
        # The end of a prefix goes first, so that it is also evicted first: without its beginning it is useless.
        for block in reversed(block_table):
            if self._state[block] == _BlockState.HELD:
                self._drop_holder(block)
            elif self._state[block] != _BlockState.QUARANTINED:
                raise EngineError(f"KV block {block} was freed twice")
        block_table.clear()

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Sets held blocks aside until ``release``."""
        for block in blocks:
            if self._state[block] != _BlockState.HELD:
                raise EngineError(f"KV block {block} is quarantined but not held")
            if self._holders[block] > 1 or block in self._cache or block in self._copies:
                raise EngineError(f"KV block {block} is quarantined but others may read it, or a copy writes it")
            self._state[block] = _BlockState.QUARANTINED
            self._holders[block] = 0
            self._quarantined += 1

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """Frees quarantined blocks, to which nothing can write any more."""
        for block in blocks:
            if self._state[block] != _BlockState.QUARANTINED:
                raise EngineError(f"KV block {block} leaves quarantine but was not quarantined")
            self._quarantined -= 1
            self._let_go(block)

    # ------------------------------------------------------------ the prefix cache

    def match(self, hashes: Sequence[bytes], count: int, match: Match) -> Sequence[int]:
        """Returns the blocks of the longest prefix of the first ``count`` of ``hashes`` that the prefix cache has.

        They have to be shared before anything else changes. ``match`` is what was found of the same hashes before, and
        is brought up to date.
        """
        self._cache.match(hashes, count, match)
        return match.blocks

    def free_beside(self, blocks: Sequence[int]) -> int:
        """Returns how many blocks could be taken after ``blocks``, which ``match`` has found, were shared."""
        return self.num_free - sum(self._state[block] == _BlockState.IDLE for block in blocks)

    def with_few_idle(self, blocks: Sequence[int], most: int) -> tuple[list[int], int]:
        """Returns the longest prefix of ``blocks``, which ``match`` has found, that has ``most`` idle ones at most.

        The number is how many are idle. Only they can be taken no more once they are shared.
        """
        idle = 0
        for i, block in enumerate(blocks):
            if self._state[block] == _BlockState.IDLE:
                if idle == most:
                    return list(blocks[:i]), idle
                idle += 1
        return list(blocks), idle

    def remember(self, block: int, block_hash: bytes) -> None:
        """Lets a held block, which is full and final, be found by its hash. It is read-only from now on."""
        if self._state[block] != _BlockState.HELD:
            raise EngineError(f"KV block {block} is to be remembered but not held")
        if self._caching and block not in self._tainted:
            self._cache.add(block, block_hash)

    # ------------------------------------------------------------ values that are not finite

    def taint(self, blocks: Iterable[int]) -> None:
        """Marks held blocks that may have values that are not finite.

        They are not found again, and are cleared after their last holder has freed them.
        """
        for block in blocks:
            if self._state[block] != _BlockState.HELD:
                raise EngineError(f"KV block {block} is tainted but not held")
            self._cache.drop(block)
            self._tainted.add(block)

    def clean(self, clear: Callable[[Sequence[int]], None]) -> None:
        """Lets ``clear`` zero the tainted blocks that are not held any more, and frees them."""
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

    def _drop_holder(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        source = self._copies.pop(block, None)
        if source is not None:
            self._drop_holder(source)
        self._let_go(block)

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
