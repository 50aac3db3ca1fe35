"""Says what the groups of a model's KV cache take, before a node is there: by context, by batch and by transfer.

The numbers are those by which an engine makes its cache (``models.group_sizes``) and admits requests
(``BlockTables.fits_bounded``). They are of all ranks together, where no rank has a copy of another's heads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import PlanError
from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.layer_groups import GroupSize, Load, group_blocks, group_sizes, layer_groups
from pdserve.wire.cache_groups import Keep, context_blocks, needed_blocks

_MIB = 2**20
_MOST_MIB = 2**30
"""No larger cache is looked for."""


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """What one group takes."""

    name: str
    keep: Keep
    window: int
    """In tokens; 0 without a window."""
    block_bytes: int
    token_bytes: int
    """What each token of a context adds: 0 of a window, whose blocks come back, and of a state."""
    context_bytes: int
    """What one context holds at most between two steps."""
    step_bytes: int
    """What the tokens of the largest step take beside that, for all requests together."""
    moved_bytes: int
    """What moves to another node with a prompt."""

    def batch_bytes(self, requests: int) -> int:
        """Returns what so many contexts at once take."""
        return requests * self.context_bytes + self.step_bytes


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """What a KV cache takes."""

    groups: tuple[GroupNeed, ...]
    blocks: tuple[int, ...]
    """Those of each group in a cache of ``mib``."""
    mib: int
    """The ``--kv-cache-mib`` that was given, or the smallest one that holds the wanted requests at once."""
    requests: int
    """The contexts that this cache holds at once; one at least if it holds one at all."""


def cache_need(
    config: DecoderConfig, item_bytes: int, block_size: int, load: Load, prompt_tokens: int, mib: int = 0
) -> CacheNeed:
    """Returns what the cache of a model takes whose requests have contexts of ``load.context`` tokens.

    ``item_bytes`` are those of one number of a key. Without ``mib``, the smallest cache is looked for that holds
    ``load.requests`` contexts at once. Raises PlanError if none does.
    """
    sizes = group_sizes(config, item_bytes, block_size)
    found = mib or least_mib(sizes, block_size, load)
    blocks = group_blocks(sizes, block_size, found * _MIB, load)
    needs = [
        _need(group.name, size, block_size, load, prompt_tokens)
        for group, size in zip(layer_groups(config).groups, sizes, strict=True)
    ]
    return CacheNeed(tuple(needs), blocks, found, requests_at_once(sizes, blocks, block_size, load))


def least_mib(sizes: Sequence[GroupSize], block_size: int, load: Load) -> int:
    """Returns the MiB of the smallest cache that holds ``load.requests`` contexts at once. Raises PlanError."""

    def holds(mib: int) -> bool:
        blocks = group_blocks(sizes, block_size, mib * _MIB, load)
        return requests_at_once(sizes, blocks, block_size, load) >= load.requests

    enough = 1
    while not holds(enough):
        enough *= 2
        if enough > _MOST_MIB:
            raise PlanError(f"no KV cache holds {load.requests} contexts of {load.context:,} tokens at once")
    return bisect_left(range(enough), True, enough // 2 + 1, key=holds)


def requests_at_once(sizes: Sequence[GroupSize], blocks: Sequence[int], block_size: int, load: Load) -> int:
    """Returns how many contexts of ``load.context`` tokens a cache with so many ``blocks`` of each group holds."""
    whole = blocks[0] // _context_blocks(sizes[0], block_size, load)
    return min(whole, bounded_places(sizes, blocks, block_size, load))


def bounded_places(sizes: Sequence[GroupSize], blocks: Sequence[int], block_size: int, load: Load) -> int:
    """Returns how many requests have room in the groups behind whole contexts at once.

    It is one at least, because a request that runs alone needs less than it may take beside others; and
    ``load.requests`` for a model without such groups.
    """
    held = [
        (count - _step_blocks(size, block_size, load)) // _context_blocks(size, block_size, load)
        for size, count in zip(sizes[1:], blocks[1:], strict=True)
    ]
    return max(1, min(held)) if held else load.requests


def _need(name: str, size: GroupSize, block_size: int, load: Load, prompt_tokens: int) -> GroupNeed:
    moved = 1 if size.keep is Keep.LATEST else len(needed_blocks(size.keep, size.window, prompt_tokens, block_size))
    return GroupNeed(
        name=name,
        keep=size.keep,
        window=size.window,
        block_bytes=size.block_bytes,
        token_bytes=size.block_bytes // block_size if size.keep is Keep.ALL else 0,
        context_bytes=_context_blocks(size, block_size, load) * size.block_bytes,
        step_bytes=_step_blocks(size, block_size, load) * size.block_bytes,
        moved_bytes=moved * size.block_bytes,
    )


def _context_blocks(size: GroupSize, block_size: int, load: Load) -> int:
    """Returns how many blocks one context holds at most between two steps."""
    return context_blocks(size.keep, size.window, load.context, block_size)


def _step_blocks(size: GroupSize, block_size: int, load: Load) -> int:
    """Returns how many blocks the tokens of one step take beside those of contexts. Whole contexts have them all."""
    return -(-load.step_tokens // block_size) if size.keep is Keep.WINDOW else 0
