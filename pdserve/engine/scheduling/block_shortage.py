"""Finds the client requests that should go on at another node, before this one has no blocks left for all.

Without that, the youngest of them would be preempted, and its client would wait until blocks are free again. A request
that is named goes on here, and is preempted like any other if nobody takes it in time.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.engine.kv_cache.block_tables import BlockTables
from pdserve.engine.request import Request
from pdserve.engine.scheduling.queues import GroupId, Queues
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.wire.engine import MoveWanted

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Running requests are looked at so often, so that a decode step costs nothing for it."""
AHEAD_S = 2.0
"""Another node may take so long until it goes on. The blocks that are needed until then have to be free."""
AHEAD_BLOCKS = 2
"""At least so many blocks of each request count as needed, however long a step takes."""
AHEAD_TOKENS = 1024
"""At most so many tokens of each request count as needed, however quick a step is."""
LEAVING_S = 2.0
"""A request that was named counts as leaving for so long: then others are named."""
AGAIN_S = 10.0
"""A request that is still here after so long may be named again: another node may have free blocks by then."""


@dataclass(slots=True)
class _Group:
    """The running answers to one client request, which move together."""

    id: GroupId
    requests: list[Request] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    """How many blocks of each cache group they need soon beside those that they hold."""

    def blocks(self) -> set[int]:
        """Returns the blocks that they hold in all cache groups. Other running requests may hold some of them, too."""
        return {block for request in self.requests for block in request.block_table.every_block()}

    @property
    def reader(self) -> Request | None:
        """One of them that another node can go on with, if there is one: its client has a part of the answer."""
        return next(
            (request for request in self.requests if request.terms.movable and request.num_generated_tokens), None
        )


class BlockShortage:
    """Names one client request after the other, until what the others need soon is free in every cache group.

    They are named in the order in which they would be preempted. The last one stays: it has all blocks then.
    """

    def __init__(self, queues: Queues, blocks: BlockTables, stop: StopRule) -> None:
        self._queues = queues
        self._blocks = blocks
        self._stop = stop
        self._next_at = -math.inf
        self._named_at: dict[GroupId, float] = {}

    def look(self, now: float, step_s: float) -> Sequence[MoveWanted]:
        """Returns those that should leave now, if it is time to look. ``step_s`` is what a decode step takes lately."""
        if now < self._next_at:
            return ()
        self._next_at = now + LOOK_S
        self._named_at = {group_id: at for group_id, at in self._named_at.items() if now < at + AGAIN_S}
        groups = self._groups(step_s)
        free = self._blocks.free_by_group()
        short = [sum(wanted) - left for left, *wanted in zip(free, *(group.wanted for group in groups), strict=True)]
        if max(short) <= 0:
            return ()
        held = {group.id: group.blocks() for group in groups}
        holders = Counter(block for blocks in held.values() for block in blocks)
        own = {group.id: [block for block in held[group.id] if holders[block] == 1] for group in groups}
        spared = {group.id: _sums(group.wanted, self._blocks.by_group(own[group.id])) for group in groups}
        leaving = [group for group in groups if now < self._named_at.get(group.id, -math.inf) + LEAVING_S]
        for group in leaving:
            short = _less(short, spared[group.id])
        may_leave = len(groups) - len(leaving) - 1
        named: list[MoveWanted] = []
        for group in groups:
            if max(short) <= 0 or len(named) >= may_leave:
                break
            reader = group.reader
            if reader is None or reader.local_id is None or not any(group.wanted) or group.id in self._named_at:
                continue
            if not any(lacked > 0 and blocks for lacked, blocks in zip(short, spared[group.id], strict=True)):
                continue
            self._named_at[group.id] = now
            counts = self._blocks.by_group(held[group.id])
            log.debug("%s should leave: held=%s wanted=%s short=%s", reader, counts, group.wanted, short)
            named.append(MoveWanted(reader.local_id, (group.wanted[0] + counts[0]) * self._blocks.block_size))
            short = _less(short, spared[group.id])
        return named

    def _tokens_ahead(self, request: Request, step_s: float) -> int:
        tokens = min(AHEAD_TOKENS, int(AHEAD_S / step_s * request.tokens_per_step)) if step_s > 0 else 0
        return max(tokens, AHEAD_BLOCKS * self._blocks.block_size)

    def _groups(self, step_s: float) -> list[_Group]:
        """Returns the client requests of this node that run, in the order in which they would be preempted."""
        groups: dict[GroupId, _Group] = {}
        for request in reversed(self._queues.running):
            if not request.serves_push:
                group = groups.setdefault(request.group_id, _Group(request.group_id))
                group.requests.append(request)
                # An answer's last token is never in a block: nothing follows it.
                ahead = self._tokens_ahead(request, step_s)
                tokens = min(len(request.token_ids) + ahead, self._stop.most_tokens(request) - 1)
                missing = self._blocks.missing_for(request, tokens)
                group.wanted = _sums(group.wanted, missing) if group.wanted else missing
        return sorted(groups.values(), key=lambda group: -len(group.requests))


def _sums(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [left + right for left, right in zip(one, other, strict=True)]


def _less(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [left - right for left, right in zip(one, other, strict=True)]
