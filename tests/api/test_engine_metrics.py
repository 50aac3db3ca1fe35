"""Tests that a node shows everything that its engine counts."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pdserve.api.node.node_metrics import EngineCollector
from pdserve.wire.engine import (
    EngineStats,
    PrefillDecisions,
    PrefillNodeStats,
    PrefillReason,
    PrefillSource,
    PrefillStats,
    StepStats,
)
from pdserve.wire.engine_counts import CacheStats, TransferCounts

STATS = EngineStats(
    cache=CacheStats(total_blocks=10, free_blocks=4),
    prefills_failed={"peer_lost": 1},
    transfer_failures={"peer_lost": 1},
    prefill=PrefillStats(
        decisions=(PrefillDecisions(PrefillSource.LOCAL, PrefillReason.SHORT, 1),),
        nodes=(PrefillNodeStats("p0", 1.0, 2, 3.0, 4.0),),
    ),
    step=StepStats(parts={"batch": 1.0}),
)


def changes(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the value with each of its numbers and names changed by itself, and where that is."""
    match value:
        case msgspec.Struct():
            for name in value.__struct_fields__:
                for where, changed in changes(getattr(value, name), f"{path}.{name}"):
                    yield where, msgspec.structs.replace(value, **{name: changed})
        case dict():
            for key, each in value.items():
                for where, changed in changes(each, f"{path}.{key}"):
                    yield where, {**value, key: changed}
        case tuple():
            for place, each in enumerate(value):
                for where, changed in changes(each, f"{path}.{place}"):
                    yield where, (*value[:place], changed, *value[place + 1 :])
        case enum.Enum():
            yield path, next(other for other in type(value) if other is not value)
        case str():
            yield path, f"{value}-other"
        case _:
            yield path, value + 1


def shown(stats: EngineStats) -> bytes:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: stats))
    return generate_latest(registry)


@pytest.mark.parametrize(("field", "changed"), list(changes(STATS)), ids=str)
def test_nothing_is_counted_that_is_not_shown(field: str, changed: EngineStats) -> None:
    assert shown(changed) != shown(STATS)


def test_a_cache_is_as_full_as_its_fullest_group() -> None:
    groups = {"group_blocks": {"window 8": 20, "state": 10}, "group_free_blocks": {"window 8": 1, "state": 9}}
    for cache, used in ((STATS.cache, 0.6), (msgspec.structs.replace(STATS.cache, **groups), 0.95)):
        said = shown(msgspec.structs.replace(STATS, cache=cache)).decode()
        assert f"pdserve_kv_cache_usage_perc {used}" in said


def test_counts_are_those_of_the_struct_that_is_counted_in() -> None:
    class Counted(TransferCounts, kw_only=True):
        more: int = 0

    counted = Counted(handshakes=3, more=1)
    copied = TransferCounts.copied(counted)
    counted.handshakes += 1
    assert copied == TransferCounts(handshakes=3)
    assert b"pdserve_kv_transfer_handshakes_total 3.0" in shown(EngineStats(transfer=copied))
