"""Shows what the groups of a KV cache take in the form of a benchmark's report."""

from __future__ import annotations

from pdserve.bench.report import Figure, Row, Unit
from pdserve.plan.memory import CacheNeed, GroupNeed
from pdserve.wire.cache_groups import Keep

GROUP, KEEPS = "group", "keeps"
KV_CACHE = "KV cache"
ALL_GROUPS = "all"
_KIB, _MIB = 2**10, 2**20


def memory_rows(need: CacheNeed, requests: int) -> tuple[Row, ...]:
    """Returns a row for each group, and one for all; ``requests`` are those of a batch."""
    rows = [
        Row(KV_CACHE, {GROUP: group.name, KEEPS: _keeps(group)}, _figures(group, blocks, requests))
        for group, blocks in zip(need.groups, need.blocks, strict=True)
    ]
    if len(rows) == 1:
        return tuple(rows)
    total = (
        Figure("a token", sum(group.token_bytes for group in need.groups) / _KIB, Unit.KIB),
        Figure("a context", sum(group.context_bytes for group in need.groups) / _MIB, Unit.MIB),
        Figure("a batch", sum(group.batch_bytes(requests) for group in need.groups) / _MIB, Unit.MIB),
        Figure("a prompt moves", sum(group.moved_bytes for group in need.groups) / _MIB, Unit.MIB),
    )
    return (*rows, Row(KV_CACHE, {GROUP: ALL_GROUPS, KEEPS: ""}, total))


def _figures(group: GroupNeed, blocks: int, requests: int) -> tuple[Figure, ...]:
    return (
        Figure("a block", group.block_bytes / _KIB, Unit.KIB),
        Figure("a token", group.token_bytes / _KIB, Unit.KIB),
        Figure("a context", group.context_bytes / _MIB, Unit.MIB),
        Figure("a batch", group.batch_bytes(requests) / _MIB, Unit.MIB),
        Figure("a prompt moves", group.moved_bytes / _MIB, Unit.MIB),
        Figure("blocks", blocks, Unit.COUNT),
    )


def _keeps(group: GroupNeed) -> str:
    match group.keep:
        case Keep.ALL:
            return "every block"
        case Keep.WINDOW:
            return f"last {group.window} tokens"
        case Keep.LATEST:
            return "latest state"
