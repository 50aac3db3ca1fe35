"""Divides a cache's memory among the groups of a model. Nothing here loads torch.

Groups with a window, and states, need no more than what the requests of a batch have of them at a time. They get that,
as much again for blocks that transfers bring or take, and a share for the prefix cache; the rest of the memory holds
whole contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.layer_groups import STATE_BYTES, layer_groups
from pdserve.wire.cache_groups import ALIGNMENT, Keep

STATES_A_REQUEST = 2
"""The present state, and the next one, which a step writes."""
LEAST_STATES = 2 * STATES_A_REQUEST
"""Those of one request, and of another that a transfer brings or takes."""
CACHED_SHARE = 4
"""The prefix cache has one block of a bounded group for so many that requests need, at least."""
CHECKPOINT_SHARE = 4
"""One of so many bytes that hold whole contexts is for states from which other requests can go on."""
MOST_EMPTY_BLOCKS = 2**18
"""A group without bytes has no more blocks than this, unless one context needs them."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What one group takes."""

    keep: Keep
    block_bytes: int
    window: int = 0
    """In tokens; 0 without a window."""


def group_sizes(config: DecoderConfig, item_bytes: int, block_size: int) -> tuple[GroupSize, ...]:
    """Returns what the groups of a model take on all ranks together, if no two have the same heads."""
    found = []
    for group in layer_groups(config).groups:
        numbers = group.layers * max(1, group.heads) * group.numbers
        each = STATE_BYTES if group.keep is Keep.LATEST else group.stored * block_size * item_bytes
        found.append(GroupSize(group.keep, numbers * each, group.window))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Load:
    """What a cache is made for."""

    requests: int
    """The places of a batch."""
    step_tokens: int
    context: int
    """The longest context that may be, in tokens."""
    asked: int = 0
    """The tokens of a context that has to fit; 0 if any will do."""


def group_blocks(groups: Sequence[GroupSize], block_size: int, nbytes: int, load: Load) -> tuple[int, ...]:
    """Returns how many blocks of each group ``nbytes`` hold. The first group, of whole contexts, gets what is left.

    No window gets more blocks than whole contexts have, and states get at most half, so that a batch which finds too
    little memory has fewer requests at a time.
    """
    whole, *bounded = groups
    if not bounded:
        return (nbytes // whole.block_bytes,)
    left = nbytes - len(bounded) * ALIGNMENT
    windows = [group for group in bounded if group.keep is Keep.WINDOW]
    states = [group for group in bounded if group.keep is Keep.LATEST]
    state_bytes = sum(group.block_bytes for group in states)
    window_bytes = sum(group.block_bytes for group in windows)
    asked = _blocks(load.asked, block_size)
    # A window that is as long as the context that is asked for has as many blocks.
    needed = asked * whole.block_bytes + sum(
        min(asked, _least_window(group, block_size, load)) * group.block_bytes for group in windows
    )
    num_states = 0
    if states:
        wanted = _with_cached(2 * STATES_A_REQUEST * load.requests)
        half = left // 2 if whole.block_bytes or windows else left
        num_states = max(LEAST_STATES, min(wanted, min(half, left - needed) // state_bytes))
        left -= num_states * state_bytes
    even = max(0, left) // ((whole.block_bytes + window_bytes) or 1)
    room = (left - asked * whole.block_bytes) // (window_bytes or 1)
    counts = [
        max(min(_least_window(group, block_size, load), even), min(_wanted_window(group, block_size, load), even, room))
        for group in windows
    ]
    left -= sum(count * group.block_bytes for count, group in zip(counts, windows, strict=True))
    if states:
        spare = max(0, min(left // CHECKPOINT_SHARE, left - max(asked, *counts, 0) * whole.block_bytes))
        more = (spare if whole.block_bytes else max(0, left)) // state_bytes
        # There are no more boundaries of blocks than blocks.
        num_states += min(more, load.requests * _blocks(load.context, block_size))
        left -= more * state_bytes
    # A cache that does not hold what one request needs holds no context.
    first = (
        max(0, left) // whole.block_bytes if whole.block_bytes else _empty_blocks(load, block_size) if left >= 0 else 0
    )
    # In a window with fewer blocks than the largest steps need, a step may be as long as the longest context.
    short = [
        count for count, group in zip(counts, windows, strict=True) if count < _least_window(group, block_size, load)
    ]
    first = min([first, *short])
    window_counts = iter(counts)
    return (first, *(next(window_counts) if group.keep is Keep.WINDOW else num_states for group in bounded))


def prompt_bytes(groups: Sequence[GroupSize], block_size: int) -> int:
    """Returns the most bytes that move with a prompt beside its whole contexts: the ends of windows, and states."""
    return sum(
        group.block_bytes * (1 if group.keep is Keep.LATEST else _blocks(group.window, block_size) + 1)
        for group in groups[1:]
    )


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _of_window(group: GroupSize, block_size: int, load: Load) -> int:
    """Returns the most blocks of a window that one request has between two steps."""
    return min(group.window // block_size + 2, _blocks(load.context, block_size))


def _least_window(group: GroupSize, block_size: int, load: Load) -> int:
    """Returns the blocks with which one request can be computed in the largest steps."""
    most = _of_window(group, block_size, load) + _blocks(load.step_tokens, block_size) + 1
    return min(most, _blocks(load.context, block_size))


def _wanted_window(group: GroupSize, block_size: int, load: Load) -> int:
    requests = load.requests * _of_window(group, block_size, load) + _blocks(load.step_tokens, block_size) + 1
    return _with_cached(2 * requests)


def _with_cached(needed: int) -> int:
    return needed + -(-needed // CACHED_SHARE)


def _empty_blocks(load: Load, block_size: int) -> int:
    context = _blocks(load.context, block_size)
    return max(context, min(2 * load.requests * context, MOST_EMPTY_BLOCKS))
