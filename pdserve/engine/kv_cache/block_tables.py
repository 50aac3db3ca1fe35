"""Fills requests' block tables: with blocks found in the prefix cache, free blocks, and the copy that a child gets.

A request writes only to blocks that it holds alone and that cannot be found. Full blocks can be found and shared as
soon as they are computed; a partial last block never is. Nor is a prompt's last token taken from the prefix cache: it
has to be computed for its logits, and would be written into a shared block. So where a whole prompt is there and fills
its last block, that block is computed again into one of the request's own: at most one block's tokens, and no copy. So
is the last block before a prompt's last token, if that would be left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.prefix_cache import Match, extend_hashes
from pdserve.engine.request import Request
from pdserve.errors import EngineError
from pdserve.wire.transfer import MAX_HASHES


class BlockTables:
    """The scheduler's view of the pool of blocks."""

    def __init__(self, pool: BlockManager) -> None:
        self._pool = pool
        self.block_size = pool.block_size

    @property
    def caching(self) -> bool:
        """Whether blocks that no request holds can be found."""
        return self._pool.caching

    @property
    def keeps_states(self) -> bool:
        return self._pool.keeps_states

    def find(self, request: Request) -> Sequence[int]:
        """Returns blocks of the prefix cache that a request without blocks could begin with.

        They never include the request's last token, nor all of its prompt but one token (``usable``), nor tokens after
        which one is to be scored: blocks hold keys and values, which give no logits. They are valid
        until anything changes; asking again while nothing does takes constant time.
        """
        if request.block_table or not self._pool.caching:
            return ()
        count = self.fillable(request)
        if request.needs_scores:
            count = min(count, request.num_scored_tokens // self.block_size)
        self._hash(request, count)
        found = self._pool.match(request.block_hashes, count, request.match)
        usable = self.usable(request, len(found) * self.block_size) // self.block_size
        if self._pool.bounded:
            usable = self._usable_in_all(request, usable)
            # An answer that goes on may find no state behind its prompt.
            fewer = self.usable(request, usable * self.block_size) // self.block_size
            if fewer < usable:
                usable = self._usable_in_all(request, fewer)
        return found if usable == len(found) else found[:usable]

    def _usable_in_all(self, request: Request, blocks: int) -> int:
        """Returns the longest prefix of ``blocks`` that all groups have. It is looked up again only after a change."""
        match, as_of = request.match, (blocks, *self._pool.changes)
        if match.usable_as_of != as_of:
            match.usable = self._pool.usable_prefix(request.block_hashes, blocks)
            match.usable_as_of = as_of
        return match.usable

    def usable(self, request: Request, computed_tokens: int) -> int:
        """Returns how many tokens count as computed where blocks hold the first ``computed_tokens``.

        If a single token of the prompt were left, it would be computed as a row of its own (``BatchPlan.next_work``).
        So the tokens before it are computed again with it, from the beginning of their block on.
        """
        if computed_tokens != request.num_prompt_tokens - 1:
            return computed_tokens
        return max(0, computed_tokens - 1) // self.block_size * self.block_size

    def whole_blocks(self, tokens: int) -> int:
        """Returns how many of the first ``tokens`` tokens fill whole blocks."""
        return tokens // self.block_size * self.block_size

    def fillable(self, request: Request) -> int:
        """Returns how many blocks a request's known tokens fill without the last one, whose logits are needed."""
        return (len(request.token_ids) - 1) // self.block_size

    def reusable(self, request: Request) -> int:
        """Returns how many blocks of a request's known tokens holders may be asked for.

        Of a model with cache groups, what the other groups keep behind the last one comes with it. So it must be of use
        there, and all blocks must fit into one message.
        """
        count = self.fillable(request)
        if not self._pool.bounded:
            return count
        if request.num_computed_tokens % self.block_size:
            return 0
        if self.usable(request, count * self.block_size) < count * self.block_size:
            count -= 1
        return count if count <= MAX_HASHES else 0

    def hashes(self, request: Request) -> tuple[bytes, ...]:
        """Returns the hashes of the blocks that ``reusable`` counts."""
        count = self.reusable(request)
        self._hash(request, count)
        return tuple(request.block_hashes[:count])

    def missing(self, request: Request, found: Sequence[int]) -> int:
        """Returns how many blocks a request's known tokens need beside those that it has or has found."""
        return self._pool.blocks_for(len(request.token_ids)) - len(request.block_table) - len(found)

    def missing_for(self, request: Request, tokens: int) -> list[int]:
        """Returns how many blocks of each group a request needs at most up to ``tokens`` tokens beside those it has."""
        table = request.block_table
        if not self._pool.bounded:
            return [max(0, self._pool.blocks_for(tokens) - len(table))]
        most = self._pool.most_blocks(tokens)
        held = table.num_bounded() or [0] * len(most)
        bounded = [max(0, blocks - has) for blocks, has in zip(most, held, strict=True)]
        return [max(0, self._pool.blocks_for(tokens) - len(table)), *bounded]

    def free_by_group(self) -> list[int]:
        """Returns how many blocks of each group can be taken now."""
        return [pool.num_free for pool in self._pool.pools]

    def by_group(self, blocks: Iterable[int]) -> list[int]:
        """Returns how many of ``blocks`` are of each group."""
        return self._pool.by_group(blocks)

    def free_beside(self, found: Sequence[int]) -> int:
        """Returns how many blocks could be taken after those found were shared."""
        return self._pool.free_beside(found)

    def admit(self, request: Request, found: Sequence[int]) -> None:
        """Shares the blocks that were found, and reserves blocks for all known tokens. There must be enough."""
        if found:
            self._pool.share_prefix(request.block_table, request.block_hashes, found)
            request.num_computed_tokens = len(found) * self.block_size
        request.match = Match()
        if not self._pool.grow(request.block_table, len(request.token_ids)):
            raise EngineError("a request was admitted without the blocks that it needs")

    def reserve(self, request: Request, tokens: int) -> bool:
        """Takes blocks for a step that computes a request's tokens up to ``tokens``, or for a transfer that brings
        them.

        Returns False if too few blocks are free.
        """
        pool, table = self._pool, request.block_table
        if not pool.bounded:
            return pool.grow(table, tokens)
        computed = request.num_computed_tokens
        if -(-tokens // self.block_size) == -(-computed // self.block_size):
            # The block of the last computed token is there, in every group, and has room.
            return not pool.keeps_states or pool.take_states(table)
        return pool.grow(table, tokens) and pool.grow_bounded(table, computed, tokens)

    def reserve_drafts(self, request: Request, drafts: int) -> int:
        """Takes blocks for the states after so many drafts of a step, if the model keeps states.

        Returns for how many drafts there are blocks.
        """
        return self._pool.take_for_drafts(request.block_table, drafts) if self._pool.keeps_states else drafts

    def drop_drafts(self, request: Request) -> None:
        """Gives back the states after drafts that were not accepted."""
        self._pool.drop_drafts(request.block_table)

    def reserve_landing(self, request: Request, tokens: int) -> bool:
        """Takes the blocks behind group 0 that a transfer of the first ``tokens`` tokens brings: those that the next
        token needs.

        Returns False, and takes nothing, if too few blocks are free.
        """
        if not self._pool.bounded:
            return True
        return self._pool.grow_landing(request.block_table, request.num_computed_tokens, tokens)

    def fits_bounded(self, request: Request, active: Collection[Request], step_tokens: int) -> bool:
        """Returns whether the groups behind group 0 have room for one more request.

        ``active`` requests go on to take blocks, up to what each needs at most. Whatever else is taken stays so:
        blocks of requests that wait or push, of transfers from and to the prefix cache, and those in quarantine.
        All tokens of one step, of which there are ``step_tokens`` at most, have blocks beside those of windows.
        """
        pool = self._pool
        if not pool.bounded or not active:
            return True
        wanted = [pool.step_blocks(each, step_tokens) for each in pool.pools[1:]]
        for other in (request, *active):
            for i, blocks in enumerate(pool.most_blocks(other.most_tokens)):
                wanted[i] += blocks
        # Where they fit into what is free, nobody has to know who holds the rest.
        short = [i for i, blocks in enumerate(wanted, 1) if blocks > pool.pools[i].num_free]
        if any(wanted[i - 1] > len(pool.pools[i].ids) for i in short):
            return False
        tables = [other.block_table for other in (request, *active)]
        return all(wanted[i - 1] <= len(pool.pools[i].ids) - pool.taken_beside(i, tables) for i in short)

    def computed(self, request: Request, num_computed_tokens: int) -> None:
        """Notes that the keys and values of so many tokens are final; full blocks can be found from now on.

        Where no block was filled, only states have changed.
        """
        pool, before = self._pool, request.num_computed_tokens
        request.num_computed_tokens = num_computed_tokens
        if pool.bounded and request.block_table.others:
            if num_computed_tokens < before:
                raise EngineError(f"{request} has states after {before} tokens, not after {num_computed_tokens}")
            if pool.keeps_states and num_computed_tokens > before:
                pool.next_states(request.block_table)
        first, end = before // self.block_size, num_computed_tokens // self.block_size
        if end > first:
            self._filled(request, first, end)

    def taint(self, request: Request) -> None:
        """Marks the request's blocks, which may have values that are not finite (``BlockManager.taint_context``)."""
        self._pool.taint_context(request.block_table, request.block_hashes)

    def _filled(self, request: Request, first: int, end: int) -> None:
        """Lets blocks ``first`` to ``end`` of a request, which are final, be found, and gives back what no later token
        needs.
        """
        pool, table, hashes = self._pool, request.block_table, request.block_hashes
        if pool.caching:
            self._hash(request, end)
            for i in range(first, end):
                pool.remember(table[i], hashes[i])
        if not pool.bounded:
            return
        if pool.caching:
            pool.remember_bounded(table, hashes, first, end)
            if pool.keeps_states and request.num_computed_tokens == end * self.block_size:
                pool.remember_states(table, hashes[end - 1], end, passing=not self._keeps_state(request, end))
        pool.give_back(table, request.num_computed_tokens)

    def _keeps_state(self, request: Request, blocks: int) -> bool:
        """Returns whether the prefix cache keeps the state after so many blocks of a request."""
        at_end = blocks * self.block_size == self.last_boundary(request)
        return at_end or blocks - request.block_table.checkpoint >= self._pool.spacing

    def last_boundary(self, request: Request) -> int:
        """Returns the last end of a block in a prompt behind which more than one token of it stands.

        A prompt that continues this one finds the state there. A single token behind it would be a row of its own.
        """
        return max(0, request.num_prompt_tokens - 2) // self.block_size * self.block_size

    def chunk_end(self, request: Request, tokens: int) -> int:
        """Returns how many of the next ``tokens`` tokens of a prompt are its next chunk.

        Where states are kept, chunks end where blocks do, so that prompts which begin in the same way find a state.
        """
        if not (self._pool.keeps_states and self._pool.caching) or tokens < 2:
            return tokens
        computed, boundary = request.num_computed_tokens, self.last_boundary(request)
        end = computed + tokens
        if computed < boundary < end:
            end = boundary
        elif end < request.num_prompt_tokens:
            end = max(end // self.block_size * self.block_size, 0)
        # A single token of a prompt would be a row of its own.
        return end - computed if end - computed > 1 else tokens

    def fork(self, parent: Request, child: Request) -> bool:
        """Gives a child its parent's computed prompt: full blocks are shared, the partial last one is copied.

        Returns False, and changes nothing, if too few blocks are free for the child's known tokens but the last one, or
        the parent's states stand behind its prompt.
        """
        full, rest = divmod(parent.num_prompt_tokens, self.block_size)
        known = len(child.token_ids) - 1
        if self._pool.blocks_for(known) - full > self._pool.num_free:
            return False
        if self._pool.bounded:
            if parent.num_computed_tokens != parent.num_prompt_tokens:
                return False
            if not self._pool.fork_bounded(parent.block_table, child.block_table, parent.num_prompt_tokens):
                return False
        self._pool.share(child.block_table, parent.block_table[:full])
        self._pool.grow(child.block_table, known)
        if rest:
            self._pool.copy(parent.block_table[full], child.block_table[full])
        child.block_hashes = parent.block_hashes[:full]
        child.num_computed_tokens = parent.num_prompt_tokens
        return True

    def take_copies(self) -> dict[int, int]:
        """Returns the copies that come before any other write: the source of each destination."""
        return self._pool.take_copies()

    def _hash(self, request: Request, count: int) -> None:
        extend_hashes(request.block_hashes, request.token_ids, count, self.block_size, request.terms.prompt.cache_salt)
