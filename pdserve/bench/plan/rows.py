"""Shows predictions, and what the groups of a KV cache take, in the form of a benchmark's report."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.report import Better, Figure, Row, Unit
from pdserve.models.checkpoint.weight_form import DraftModelSize
from pdserve.plan.cluster import ClusterShape
from pdserve.plan.memory import CacheNeed, GroupNeed
from pdserve.plan.sizing import Prediction
from pdserve.wire.cache_groups import Keep

CLUSTER, VERDICT = "cluster", "verdict"
PREDICTED = "predicted"


def forecast_rows(predictions: Sequence[Prediction], chosen: ClusterShape | None = None) -> tuple[Row, ...]:
    return tuple(_row(prediction, chosen) for prediction in predictions)


def _row(prediction: Prediction, chosen: ClusterShape | None) -> Row:
    at: dict[str, int | str] = {CLUSTER: str(prediction.shape), VERDICT: _verdict(prediction, chosen)}
    return Row(PREDICTED, at, figures_of(prediction))


def _verdict(prediction: Prediction, chosen: ClusterShape | None) -> str:
    if not prediction.keeps_up:
        return "cannot keep up"
    if not prediction.meets:
        return "too slow"
    return "smallest" if prediction.shape == chosen else "fast enough"


def figures_of(prediction: Prediction) -> tuple[Figure, ...]:
    latencies = [
        Figure(f"{name} p{share}", seconds * 1e3, Unit.MS, Better.LOWER)
        for name, found in (("TTFT", prediction.ttft), ("ITL", prediction.itl))
        for share, seconds in ((50, found.p50), (90, found.p90), (95, found.p95), (99, found.p99))
    ]
    preempted = prediction.preemptions
    preemptions = [Figure("preemptions", preempted, Unit.COUNT, Better.LOWER)] if preempted else []
    busy = [Figure(f"{role.value} busy", 100 * share, Unit.PERCENT) for role, share in prediction.busy.items()]
    return (
        *latencies,
        Figure("output", prediction.output_tokens_per_s, Unit.TOKENS_PER_S, Better.HIGHER),
        Figure("requests", prediction.requests_per_s, Unit.REQUESTS_PER_S, Better.HIGHER),
        Figure("goodput", prediction.goodput, Unit.REQUESTS_PER_S, Better.HIGHER),
        *busy,
        *preemptions,
    )


GROUP, KEEPS = "group", "keeps"
KV_CACHE = "KV cache"
ALL_GROUPS = "all"
DRAFT_MODEL, NAME = "draft model", "model"
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


def draft_model_row(name: str, size: DraftModelSize) -> Row:
    """Returns a row of what a draft model takes beside the cache."""
    return Row(
        DRAFT_MODEL,
        {NAME: name},
        (
            Figure("weights", size.weights / _MIB, Unit.MIB),
            Figure("its KV cache", size.cache / _MIB, Unit.MIB),
            Figure("together", size.total / _MIB, Unit.MIB),
        ),
    )


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
