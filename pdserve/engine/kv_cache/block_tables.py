"""Fills requests' block tables: with blocks found in the prefix cache, free blocks, and the copy that a child gets.

A request writes only to blocks that it holds alone and that cannot be found. Full blocks can be found and shared as
soon as they are computed; a partial last block never is. Nor is a prompt's last token taken from the prefix cache: it
has to be computed for its logits, and would be written into a shared block. So where a whole prompt is there and fills
its last block, that block is computed again into one of the request's own: at most one block's tokens, and no copy. So
is the last block before a prompt's last token, if that would be left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_cache.prefix_cache import Match, extend_hashes
from pdserve.engine.request import Request
from pdserve.errors import EngineError


class BlockTables:
    """The scheduler's view of the pool of blocks."""

    def __init__(self, pool: BlockManager) -> None:
        self._pool = pool

    @property
    def caching(self) -> bool:
        """Whether blocks that no request holds can be found."""
        return self._pool.caching

    @property
    def block_size(self) -> int:
        return self._pool.block_size

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
        return found if usable == len(found) else found[:usable]

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

    def hashes(self, request: Request) -> tuple[bytes, ...]:
        """Returns the hashes of the blocks that ``fillable`` counts."""
        count = self.fillable(request)
        self._hash(request, count)
        return tuple(request.block_hashes[:count])

    def missing(self, request: Request, found: Sequence[int]) -> int:
        """Returns how many blocks a request's known tokens need beside those that it has or has found."""
        return self._pool.blocks_for(len(request.token_ids)) - len(request.block_table) - len(found)

    def missing_for(self, request: Request, tokens: int) -> int:
        """Returns how many blocks a request needs for its first ``tokens`` tokens beside those that it has."""
        return max(0, self._pool.blocks_for(tokens) - len(request.block_table))

    def free_beside(self, found: Sequence[int]) -> int:
        """Returns how many blocks could be taken after those found were shared."""
        return self._pool.free_beside(found)

    def admit(self, request: Request, found: Sequence[int]) -> None:
        """Shares the blocks that were found, and reserves blocks for all known tokens. There must be enough."""
        if found:
            self._pool.share(request.block_table, found)
            request.num_computed_tokens = len(found) * self.block_size
        request.match = Match()
        if not self.reserve(request, len(request.token_ids)):
            raise EngineError("a request was admitted without the blocks that it needs")

    def reserve(self, request: Request, tokens: int) -> bool:
        """Extends a request's block table to its first ``tokens`` tokens.

        Returns False, and changes nothing, if too few blocks are free.
        """
        return self._pool.grow(request.block_table, tokens)

    def computed(self, request: Request, num_computed_tokens: int) -> None:
        """Notes that the keys and values of so many tokens are final; full blocks can be found from now on."""
        first, end = request.num_computed_tokens // self.block_size, num_computed_tokens // self.block_size
        request.num_computed_tokens = num_computed_tokens
        if end > first and self._pool.caching:
            self._hash(request, end)
            for i in range(first, end):
                self._pool.remember(request.block_table[i], request.block_hashes[i])

    def fork(self, parent: Request, child: Request) -> bool:
        """Gives a child its parent's computed prompt: full blocks are shared, the partial last one is copied.

        Returns False, and changes nothing, if too few blocks are free for the child's known tokens but the last one.
        """
        full, rest = divmod(parent.num_prompt_tokens, self.block_size)
        known = len(child.token_ids) - 1
        if self._pool.blocks_for(known) - full > self._pool.num_free:
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
