"""What holds in every engine after every event, whatever happens to the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from lab.simulation.engine_program import BLOCK_SIZE, RunningEngine
from pdserve.engine.kv_cache.block_manager import BlockManager, _BlockState
from pdserve.engine.kv_cache.block_table import BlockTable
from pdserve.engine.request import Request
from pdserve.wire.terms import PRIORITY_S


def wrong_blocks(engine: RunningEngine) -> str | None:
    """Returns what is wrong about an engine's blocks: each is in one state, and who holds it is known."""
    blocks = engine.blocks
    counts = {state: blocks._state.count(state) for state in _BlockState}
    known = {
        _BlockState.FREE: sum(len(pool.free) for pool in blocks.pools),
        _BlockState.HELD: sum(1 for holders in blocks._holders if holders),
        _BlockState.IDLE: sum(pool.cache.num_idle for pool in blocks.pools),
        _BlockState.QUARANTINED: blocks.num_quarantined,
        _BlockState.UNCLEAN: len(blocks._unclean),
    }
    if counts != known or sum(counts.values()) != sum(len(pool.ids) for pool in blocks.pools):
        return f"the blocks are {counts}, and counted as {known}"
    return _wrong_holders(blocks, _tables(engine))


def wrong_turns(engine: RunningEngine, priority_of: Callable[[str], int | None]) -> str | None:
    """Returns what is wrong about the order in which an engine's requests wait.

    ``priority_of`` says which priority the client of a request has asked for, if that is known.
    """
    turns = []
    for request in engine.loop._scheduler._queues.waiting:
        priority = priority_of(request.terms.prompt.request_id)
        turns.append(request.arrived + PRIORITY_S * (request.terms.prompt.priority if priority is None else priority))
    return None if turns == sorted(turns) else f"requests wait in another order than that of their turns: {turns}"


def wrong_place(engine: RunningEngine) -> str | None:
    """Returns what is wrong about who gets a place next: no other client request that waits may hold fewer."""
    queues = engine.loop._scheduler._queues
    held = Counter(request.group_id for request in chain(queues.running, queues.remote))
    first = next(queues.in_turn(), None)
    if first is None or held[first.group_id] <= min(held[request.group_id] for request in queues.waiting):
        return None
    return f"{first} is next, and holds {held[first.group_id]} places; another one that waits holds fewer"


def could_run(engine: RunningEngine) -> bool:
    """Returns whether nothing runs and a request waits whose prompt no node fetches, with blocks for all that wait."""
    scheduler = engine.loop._scheduler
    waiting = scheduler._queues.waiting
    if scheduler._queues.running or not any(map(_stays_here, waiting)):
        return False
    return engine.blocks.num_free >= sum(len(request.token_ids) // engine.blocks.block_size + 2 for request in waiting)


def _stays_here(request: Request) -> bool:
    short = request.num_prompt_tokens <= BLOCK_SIZE or not request.targets
    return short and not (request.may_ask_holders or request.terms.fetch_only or request.awaits_grammar)


def _wrong_holders(blocks: BlockManager, tables: Iterator[Iterable[int]]) -> str | None:
    owned = Counter(chain(chain.from_iterable(tables), blocks._copies.values()))
    for block, holders in enumerate(blocks._holders):
        if holders != owned[block] and blocks._state[block] != _BlockState.QUARANTINED:
            return f"block {block} has {holders} holders, and is in {owned[block]} tables and pending copies"
    return None


def _tables(engine: RunningEngine) -> Iterator[Iterable[int]]:
    """Yields the tables of all that may hold blocks."""
    connector: Any = engine.connector
    yield engine.taken
    for request in engine.loop._scheduler.live():
        yield request.block_table.every_block()
    for part in (connector._fetching, connector._reusing, connector._pushing):
        yield from map(_blocks_of, part._cancelled_blocks.values())
    for push in connector._holding._pushes.values():
        yield _blocks_of(push.table)
    if connector._returning is not None:
        for texts in connector._returning._fetches.values():
            for text in texts:
                yield _blocks_of(text.table)


def _blocks_of(table: list[int]) -> Iterable[int]:
    return table.every_block() if isinstance(table, BlockTable) else table
