"""Knows which KV blocks are free, held by requests, cached, or set aside.

    FREE ─▶ HELD ─▶ FREE                 by one request or, read-only, by several: reference counted
            HELD ─▶ IDLE ─▶ HELD         in the prefix cache and in no block table; FREE when a block is needed
            HELD ─▶ QUARANTINED ─▶ FREE  something may still write to it: an accepted receive that has not completed
            HELD ─▶ UNCLEAN ─▶ FREE      holds what is not finite, and has to be cleared first

Every block is in exactly one state; a block freed twice or handed out while held is an EngineError at once, never a
wrong answer later.

A block may be copied into another one before the next step. Until then the copy holds its source as a block table
would, and ends with its destination. So no copy reads or writes a block that can be taken.

Each cache group has blocks of its own (``pdserve.wire.cache_groups``). Group 0 keeps all blocks of a context. A
``BlockTable`` has the blocks that one context holds in every group.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pdserve.engine.kv_cache.block_table import NONE, BlockTable, PassingState, StateTable, WindowTable
from pdserve.engine.kv_cache.prefix_cache import Match, PrefixCache
from pdserve.errors import EngineError
from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep, context_blocks


class _BlockState(enum.IntEnum):
    FREE = 0
    HELD = 1
    IDLE = 2
    QUARANTINED = 3
    UNCLEAN = 4


class Pool:
    """The blocks of one group that can be taken."""

    def __init__(self, spec: GroupSpec | None, ids: range) -> None:
        self.spec = spec
        """What the group keeps; None for group 0."""
        self.ids = ids
        self.free = deque(ids)
        self.cache = PrefixCache()

    @property
    def name(self) -> str:
        return self.spec.name if self.spec is not None else ""

    @property
    def num_free(self) -> int:
        """The number of blocks that can be taken now, idle ones of the prefix cache among them."""
        return len(self.free) + self.cache.num_idle


class BlockManager:
    """The block ids of one engine: those of group 0 are 0 to ``num_blocks - 1``, and the other groups' follow.

    Where nothing else is said, counts are of group 0.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        bounded: Sequence[GroupBlocks] = (),
        block_bytes: int = 0,
    ) -> None:
        """Creates the pools, all of whose blocks are free. Without ``prefix_cache``, no block is found again.

        ``bounded`` are the groups behind group 0, whose blocks have ``block_bytes`` bytes each.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pools = [Pool(None, range(num_blocks)), *(Pool(group.spec, group.ids) for group in bounded)]
        self.bounded = [pool.spec for pool in self.pools if pool.spec is not None]
        total = 0
        for pool in self.pools:
            if pool.ids.start != total:
                raise EngineError(f"the blocks of cache group {pool.name!r} begin at {pool.ids.start}, not {total}")
            total = pool.ids.stop
        self.keeps_states = any(spec.keep is Keep.LATEST for spec in self.bounded)
        """Whether a group keeps states."""
        self._caching = prefix_cache
        self._whole = self.pools[0]
        self._cache = self._whole.cache
        self._pool_of = bytearray(total)
        """The number of each block's group."""
        for number, pool in enumerate(self.pools):
            self._pool_of[pool.ids.start : pool.ids.stop] = bytes([number]) * len(pool.ids)
        self._state = bytearray(total)
        self._holders = [0] * total
        self._quarantined = 0
        self._tainted: set[int] = set()
        self._unclean: list[int] = []
        self._copies: dict[int, int] = {}
        """The source of each block that is still to be written by a copy."""
        self.spacing = _checkpoint_spacing(bounded, block_bytes)
        """So many blocks lie between two states that the prefix cache keeps, at least."""

    @property
    def num_free(self) -> int:
        """The number of blocks that can be taken now, idle ones of the prefix cache among them."""
        return self._whole.num_free

    @property
    def num_quarantined(self) -> int:
        """The number of blocks of all groups that something may still write to."""
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
        """Extends ``block_table`` to hold ``tokens`` tokens in group 0.

        Returns False, and changes nothing, if too few blocks are free.
        """
        missing = -(-tokens // self.block_size) - len(block_table)
        if missing <= 0:
            # As in most decode steps.
            return True
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block_table.append(self._take(self._whole))
        return True

    def grow_bounded(self, table: BlockTable, computed: int, tokens: int) -> bool:
        """Takes what the tokens from ``computed`` to ``tokens`` read and write in the groups behind group 0.

        Of a window these are the blocks that the first of these tokens sees, and all that follow; of a state, a block
        for the next one. Returns False, and changes nothing, if too few blocks are free.
        """
        self._open(table)
        wanted: list[tuple[Pool, WindowTable | StateTable, Sequence[int]]] = []
        for pool, held in self._bounded_of(table):
            missing = self._missing_places(pool, held, table.has_gaps, computed, tokens)
            if missing:
                if len(missing) > pool.num_free:
                    return False
                wanted.append((pool, held, missing))
        for pool, held, missing in wanted:
            if isinstance(held, StateTable):
                held.next = self._take(pool)
                continue
            table.has_gaps |= missing[0] > len(held)
            for place in missing:
                if place < len(held):
                    held[place] = self._take(pool)
                else:
                    held.extend([NONE] * (place - len(held)))
                    held.append(self._take(pool))
        return True

    def grow_landing(self, table: BlockTable, computed: int, tokens: int) -> bool:
        """Takes what a transfer of the first ``tokens`` tokens brings in the groups behind group 0.

        What was taken for tokens behind the first ``computed``, and is not brought, goes back: a block in which nothing
        was written would count as one that was. Returns False, and takes nothing, if too few blocks are free.
        """
        for pool, held in self._bounded_of(table):
            if isinstance(held, WindowTable):
                assert pool.spec is not None
                begin = pool.spec.needed(tokens, self.block_size).start
                self._drop_places(held, range(self.blocks_for(computed), begin))
        table.has_gaps = True
        return self.grow_bounded(table, tokens, tokens)

    def _missing_places(
        self, pool: Pool, held: WindowTable | StateTable, has_gaps: bool, computed: int, tokens: int
    ) -> Sequence[int]:
        if isinstance(held, StateTable):
            return () if held.next != NONE else (0,)
        end = self.blocks_for(tokens)
        if len(held) >= end and not has_gaps:
            return ()
        assert pool.spec is not None
        first = pool.spec.needed(computed, self.block_size).start
        if not has_gaps:
            return range(max(first, len(held)), end)
        return [place for place in range(first, end) if place >= len(held) or held[place] == NONE]

    def most_blocks(self, tokens: int) -> list[int]:
        """Returns how many blocks a context of up to ``tokens`` tokens holds at most in each group behind group 0.

        Between steps, that is: a step has blocks for its tokens (``step_blocks``) as well.
        """
        return [context_blocks(spec.keep, spec.window, tokens, self.block_size) for spec in self.bounded]

    def step_blocks(self, pool: Pool, tokens: int) -> int:
        """Returns how many blocks of a group the ``tokens`` tokens of one step take beside those of windows."""
        assert pool.spec is not None
        return 0 if pool.spec.keep is Keep.LATEST else self.blocks_for(tokens)

    def taken_beside(self, group: int, tables: Iterable[BlockTable]) -> int:
        """Returns how many blocks of a group behind group 0 are taken that none of ``tables`` has.

        Others hold them: requests that wait or push, transfers of cached blocks, and the quarantine.
        """
        pool, own = self.pools[group], set[int]()
        for table in tables:
            held = table.others[group - 1] if table.others else StateTable()
            if isinstance(held, StateTable):
                own.update((held.present, held.next, *held.drafted))
            else:
                own.update(held[held.given_back :])
        own.discard(NONE)
        return len(pool.ids) - pool.num_free - len(own)

    def by_group(self, blocks: Iterable[int]) -> list[int]:
        """Returns how many of ``blocks`` are of each group."""
        counts = [0] * len(self.pools)
        for block in blocks:
            counts[self._pool_of[block]] += 1
        return counts

    def give_back(self, table: BlockTable, computed: int) -> None:
        """Frees the blocks of windows that no token after the first ``computed`` sees."""
        for pool, held in self._bounded_of(table):
            if isinstance(held, StateTable):
                continue
            assert pool.spec is not None
            for block in held.give_back(pool.spec.needed(computed, self.block_size).start):
                self._drop(block)
        if table.has_gaps:
            end = self.blocks_for(computed)
            table.has_gaps = any(isinstance(held, WindowTable) and len(held) > end for held in table.others)

    def _drop_places(self, held: list[int], numbers: range) -> None:
        for number in range(numbers.start, min(numbers.stop, len(held))):
            if held[number] != NONE:
                self._drop(held[number])
                held[number] = NONE

    def take_states(self, table: BlockTable) -> bool:
        """Takes a block for the next state in each group that keeps states, as ``grow_bounded`` does.

        The table has a place there already. Returns False, and changes nothing, if too few blocks are free.
        """
        wanted = [(pool, held) for pool, held in self._states_of(table) if held.next == NONE]
        if any(not pool.num_free for pool, _ in wanted):
            return False
        for pool, held in wanted:
            held.next = self._take(pool)
        return True

    def take_for_drafts(self, table: BlockTable, drafts: int) -> int:
        """Takes blocks for the states after so many drafts of the next step; returns for how many drafts there are.

        A part of each pool is left to states that others find in the prefix cache: what drafts save is little beside
        a prompt that is computed again. ``drop_drafts`` gives back what is left after the step.
        """
        states = self._states_of(table)
        for pool, held in states:
            if held.drafted:
                raise EngineError("a context still has the states after an earlier step's drafts")
            drafts = min(drafts, pool.num_free - len(pool.ids) // LEFT_BY_DRAFTS)
        for pool, held in states:
            held.drafted += [self._take(pool) for _ in range(drafts)]
        return max(0, drafts)

    def drop_drafts(self, table: BlockTable) -> None:
        """Frees the states after drafts that were not accepted."""
        for _, held in self._states_of(table):
            for block in held.drafted:
                self._drop(block)
            held.drafted = []

    def next_states(self, table: BlockTable) -> None:
        """Makes the states that a step has written those that the next step begins with.

        After a step with drafts these are the states before the first of them, and after each further call those after
        one more draft.
        """
        for _, held in self._states_of(table):
            if held.next == NONE and not held.drafted:
                raise EngineError("a context goes on with a state that no step has written")
            if held.present != NONE:
                self._drop(held.present)
            written = held.next if held.next != NONE else held.drafted.pop(0)
            held.present, held.next = written, NONE

    def _open(self, table: BlockTable) -> None:
        """Gives a table a place for each group."""
        if len(table.others) < len(self.bounded):
            table.open([StateTable() if spec.keep is Keep.LATEST else WindowTable() for spec in self.bounded])

    def _bounded_of(self, table: BlockTable) -> Iterable[tuple[Pool, WindowTable | StateTable]]:
        return zip(self.pools[1:], table.others, strict=False)

    def _states_of(self, table: BlockTable) -> list[tuple[Pool, StateTable]]:
        return [(pool, held) for pool, held in self._bounded_of(table) if isinstance(held, StateTable)]

    def replace(self, block_table: list[int], quarantined: Iterable[int]) -> bool:
        """Puts free blocks in the places of quarantined ones, in all groups.

        Returns False, and changes nothing, if too few blocks are free.
        """
        bad = set(quarantined)
        if not bad:
            return True
        tables = [block_table]
        states: list[tuple[Pool, StateTable]] = []
        pools = [self._whole]
        for pool, held in self._bounded_of(block_table) if isinstance(block_table, BlockTable) else ():
            if isinstance(held, StateTable):
                if held.next in bad:
                    states.append((pool, held))
            else:
                tables.append(held)
                pools.append(pool)
        places = [[i for i, block in enumerate(table) if block in bad] for table in tables]
        if any(len(found) > pool.num_free for found, pool in zip(places, pools, strict=True)):
            return False
        if any(not pool.num_free for pool, _ in states):
            return False
        for table, found, pool in zip(tables, places, pools, strict=True):
            for i in found:
                table[i] = self._take(pool)
        for pool, held_state in states:
            held_state.next = self._take(pool)
        return True

    def share(self, block_table: list[int], blocks: Iterable[int]) -> None:
        """Appends blocks that are held already or idle. They are read-only from now on."""
        for block in blocks:
            self._share(block)
            block_table.append(block)

    def share_prefix(self, table: BlockTable, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Gives an empty table the prefix of ``blocks`` in all groups. ``usable_prefix`` has found it just now."""
        self.share(table, blocks)
        if not self.bounded or not blocks:
            return
        self._open(table)
        for pool, held in self._bounded_of(table):
            assert pool.spec is not None
            if isinstance(held, StateTable):
                held.present = self._share(pool.cache.block_of(hashes[len(blocks) - 1]))
                held.checkpoint = len(blocks)
                continue
            needed = pool.spec.needed(len(blocks) * self.block_size, self.block_size)
            held.extend([NONE] * needed.start)
            held.extend(self._share(pool.cache.block_of(hashes[number])) for number in needed)

    def _share(self, block: int | None) -> int:
        if block is None or block < 0 or self._state[block] not in (_BlockState.IDLE, _BlockState.HELD):
            raise EngineError(f"KV block {block} is shared but holds nothing")
        if self._state[block] == _BlockState.IDLE:
            self._cache_of(block).wake(block)
            self._state[block] = _BlockState.HELD
        self._holders[block] += 1
        return block

    def fork_bounded(self, parent: BlockTable, child: BlockTable, tokens: int) -> bool:
        """Gives a child what its parent, with ``tokens`` computed tokens, holds in the groups behind group 0.

        States and full blocks are shared, and a partial block is to be copied. Returns False, and changes nothing, if
        too few blocks are free.
        """
        full, rest = divmod(tokens, self.block_size)
        windows = [(pool, held) for pool, held in self._bounded_of(parent) if not isinstance(held, StateTable)]
        if rest and any(not pool.num_free for pool, _ in windows):
            return False
        self._open(child)
        for (pool, held), own in zip(self._bounded_of(parent), child.others, strict=True):
            if isinstance(held, StateTable):
                assert isinstance(own, StateTable)
                own.present, own.checkpoint = self._share(held.present), held.checkpoint
                continue
            assert pool.spec is not None and isinstance(own, WindowTable)
            needed = pool.spec.needed(tokens, self.block_size)
            own.extend([NONE] * needed.start)
            own.extend(self._share(held[number]) for number in range(needed.start, full))
            if rest:
                own.append(self._take(pool))
                self.copy(held[full], own[full])
        return True

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
        """Takes the blocks of all groups back and empties the table; those quarantined meanwhile stay quarantined."""
        # The end of a prefix goes first, so that it is also evicted first: without its beginning it is useless.
        for block in reversed(block_table):
            self._drop(block)
        if isinstance(block_table, BlockTable) and block_table.others:
            for block in block_table.bounded_blocks():
                self._drop(block)
            block_table.open([])
            block_table.has_gaps = False
        block_table.clear()

    def _drop(self, block: int) -> None:
        if self._state[block] == _BlockState.HELD:
            self._drop_holder(block)
        elif self._state[block] != _BlockState.QUARANTINED:
            raise EngineError(f"KV block {block} was freed twice")

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Sets held blocks aside until ``release``."""
        for block in blocks:
            if self._state[block] != _BlockState.HELD:
                raise EngineError(f"KV block {block} is quarantined but not held")
            if self._holders[block] > 1 or block in self._cache_of(block) or block in self._copies:
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
            self._cache_of(block).add(block, block_hash)

    def remember_bounded(self, table: BlockTable, hashes: Sequence[bytes], first: int, end: int) -> None:
        """Lets what a table holds of a context's blocks ``first`` to ``end`` in windows be found by their hashes."""
        for _, held in self._bounded_of(table):
            if isinstance(held, StateTable):
                continue
            for number in range(first, min(end, len(held))):
                if held[number] != NONE:
                    self.remember(held[number], hashes[number])

    def remember_states(self, table: BlockTable, block_hash: bytes, blocks: int, *, passing: bool = False) -> None:
        """Lets the present states, which stand after ``blocks`` blocks, be found by the hash of the last of these.

        Those that are ``passing`` are forgotten when ``MOST_PASSING`` later ones of the context have come.
        """
        for pool, held in self._states_of(table):
            if held.present == NONE:
                continue
            self.remember(held.present, block_hash)
            if not passing:
                held.checkpoint = blocks
                continue
            held.passing.append(PassingState(blocks, block_hash, held.present))
            if len(held.passing) > MOST_PASSING:
                self._forget_idle(pool, held.passing.pop(0))

    def _forget_idle(self, pool: Pool, state: PassingState) -> None:
        """Frees a state that nobody holds, if it is still there and is the one that is found."""
        if pool.cache.block_of(state.block_hash) == state.block and self._state[state.block] == _BlockState.IDLE:
            pool.cache.wake(state.block)
            pool.cache.drop(state.block)
            self._let_go(state.block)

    def usable_prefix(self, hashes: Sequence[bytes], blocks: int) -> int:
        """Returns the longest prefix of ``blocks``, which group 0 has, that every other group can go on from, too."""
        while blocks:
            fewer = min((self._prefix_in(pool, hashes, blocks) for pool in self.pools[1:]), default=blocks)
            if fewer == blocks:
                break
            blocks = fewer
        return blocks

    def _prefix_in(self, pool: Pool, hashes: Sequence[bytes], blocks: int) -> int:
        """Returns ``blocks`` if a group can go on from there, or else the next smaller number with which it may."""
        assert pool.spec is not None
        block_of = pool.cache.block_of
        if pool.spec.keep is Keep.LATEST:
            return next((count for count in range(blocks, 0, -1) if block_of(hashes[count - 1]) is not None), 0)
        needed = pool.spec.needed(blocks * self.block_size, self.block_size)
        # A block that is not there is needed behind every prefix up to this one that has it.
        return next((number for number in reversed(needed) if block_of(hashes[number]) is None), blocks)

    @property
    def changes(self) -> tuple[int, ...]:
        """How often the prefix caches of the groups behind group 0 have changed."""
        return tuple(pool.cache.num_changes for pool in self.pools[1:])

    # ------------------------------------------------------------ values that are not finite

    def taint(self, blocks: Iterable[int]) -> None:
        """Marks held blocks that may have values that are not finite.

        They are not found again, and are cleared after their last holder has freed them.
        """
        for block in blocks:
            if self._state[block] != _BlockState.HELD:
                raise EngineError(f"KV block {block} is tainted but not held")
            self._cache_of(block).drop(block)
            self._tainted.add(block)

    def taint_context(self, table: BlockTable, hashes: Iterable[bytes]) -> None:
        """Marks all blocks of a context, with those that it has given back and that can be found by its ``hashes``."""
        self.taint(table.every_block())
        if not self.bounded:
            return
        for block_hash in hashes:
            for pool in self.pools[1:]:
                block = pool.cache.block_of(block_hash)
                if block is None:
                    continue
                if self._state[block] == _BlockState.IDLE:
                    # Held for a moment, it becomes unclean as others do.
                    self._share(block)
                    self.taint((block,))
                    self._drop(block)
                else:
                    self.taint((block,))

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

    def _cache_of(self, block: int) -> PrefixCache:
        return self.pools[self._pool_of[block]].cache

    def _take(self, pool: Pool) -> int:
        block = pool.free.popleft() if pool.free else pool.cache.evict()
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
        pool = self.pools[self._pool_of[block]]
        if block in self._tainted:
            self._state[block] = _BlockState.UNCLEAN
            self._unclean.append(block)
        elif block in pool.cache:
            self._state[block] = _BlockState.IDLE
            pool.cache.rest(block)
        else:
            self._state[block] = _BlockState.FREE
            pool.free.append(block)


MOST_PASSING = 2
"""So many states of each context can be found beside those that are kept, which stand far apart: the next turn of a
conversation begins behind the last one, and so does another node that goes on with the answer. While it asks, the
answer may get a block further."""
LEFT_BY_DRAFTS = 4
"""Drafts leave this part of the states, the inverse of a share, free or to the prefix cache."""
STATES_ONLY_SPACING = 16
"""The spacing of kept states where the blocks of group 0 have no bytes."""


def _checkpoint_spacing(bounded: Sequence[GroupBlocks], block_bytes: int) -> int:
    """Returns after how many blocks a state may be kept, so that states take no more memory than those blocks."""
    states = sum(group.block_bytes for group in bounded if group.spec.keep is Keep.LATEST)
    return max(1, -(-states // block_bytes)) if block_bytes else STATES_ONLY_SPACING
