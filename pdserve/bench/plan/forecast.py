"""Shows predictions in the form of a benchmark's report: as a table, as JSON and for the plot."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.report import Better, Figure, Row, Unit
from pdserve.plan.cluster import ClusterShape
from pdserve.plan.prediction import Prediction

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
