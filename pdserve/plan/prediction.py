"""Turns what a simulated cluster made of a load into percentiles, throughput and goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.config import Disaggregation, TargetsConfig
from pdserve.plan.cluster import ClusterShape, Lived, TokenGaps, live, live_within
from pdserve.plan.load import Answer, Bounds, PlannedRequest, falls_behind, upto_middle
from pdserve.plan.profile import NodeSpeed, Profile
from pdserve.wire.discovery import Role


@dataclass(frozen=True, slots=True)
class Quantiles:
    """What a half, 90, 95 and 99 of 100 values do not exceed, in seconds. All are 0 without values."""

    p50: float
    p90: float
    p95: float
    p99: float
    asked: float
    """What the asked share of the values does not exceed."""


@dataclass(frozen=True, slots=True)
class PlanTargets:
    """Latencies that a share of the tokens and answers is to keep."""

    ttft_s: float
    """0 for any."""
    itl_s: float
    """0 for any."""
    percentile: float = 90.0

    def good(self, answer: Answer) -> bool:
        """Returns whether an answer met both, the ITL in the mean of its gaps."""
        tpot_s = answer.tpot_s
        return (not self.ttft_s or answer.ttft_s <= self.ttft_s) and (
            not self.itl_s or tpot_s is None or tpot_s <= self.itl_s
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected of one cluster under one load."""

    shape: ClusterShape
    ttft: Quantiles
    itl: Quantiles
    output_tokens_per_s: float
    requests_per_s: float
    goodput: float
    """The good answers a second."""
    busy: dict[Role, float]
    """The share of the time in which a node of the role computes."""
    preemptions: int
    keeps_ttft: bool
    keeps_itl: bool
    keeps_up: bool
    """Whether it answers as many as come: nothing else holds for longer than the load lasts if it does not."""

    @property
    def meets(self) -> bool:
        return self.keeps_up and self.keeps_ttft and self.keeps_itl


def predict(
    profile: Profile,
    shape: ClusterShape,
    load: Sequence[PlannedRequest],
    wanted: PlanTargets,
    targets: TargetsConfig | None = None,
    disaggregation: Disaggregation = Disaggregation.AUTO,
) -> Prediction:
    """Returns what becomes of ``load``, whose nodes have ``targets``. Raises PlanError."""
    lived = live(profile, shape, load, targets, disaggregation)
    return _prediction(lived, shape, load, wanted, profile.speed(shape.nodes_per_machine))


def predict_if_good(
    profile: Profile,
    shape: ClusterShape,
    load: Sequence[PlannedRequest],
    wanted: PlanTargets,
    targets: TargetsConfig | None = None,
    disaggregation: Disaggregation = Disaggregation.AUTO,
) -> Prediction | None:
    """Returns the same, but None as soon as it is certain that what is ``wanted`` is missed. Raises PlanError."""
    speed = profile.speed(shape.nodes_per_machine)
    bounds = Bounds(wanted.ttft_s, wanted.itl_s, wanted.percentile, load, speed)
    lived = live_within(profile, shape, load, bounds, targets, disaggregation)
    if lived is None:
        return None
    prediction = _prediction(lived, shape, load, wanted, speed)
    return prediction if prediction.meets else None


def _prediction(
    lived: Lived,
    shape: ClusterShape,
    load: Sequence[PlannedRequest],
    wanted: PlanTargets,
    speed: NodeSpeed,
) -> Prediction:
    ttft = quantiles(np.array([answer.ttft_s for answer in lived.answers]), wanted.percentile)
    itl = gap_quantiles(lived.gaps, speed, wanted.percentile)
    seconds = lived.ended_at - load[0].at_s
    counts = {Role.PREFILL: shape.prefill, Role.DECODE: shape.decode, Role.MIXED: shape.mixed}
    return Prediction(
        shape,
        ttft,
        itl,
        output_tokens_per_s=sum(request.output_tokens for request in load) / seconds,
        requests_per_s=len(load) / seconds,
        goodput=sum(map(wanted.good, lived.answers)) / seconds,
        busy={role: busy_s / seconds / counts[role] for role, busy_s in lived.busy_s.items()},
        preemptions=lived.preemptions,
        keeps_ttft=not wanted.ttft_s or ttft.asked <= wanted.ttft_s,
        keeps_itl=not wanted.itl_s or itl.asked <= wanted.itl_s,
        keeps_up=keeps_up(lived.answers),
    )


def keeps_up(answers: Sequence[Answer]) -> bool:
    """Returns whether the requests that are under way grow by no more than chance from the middle to the last one."""
    upto = upto_middle([answer.request for answer in answers])
    middle, last = (_under_way(answers, answers[at].request.at_s) for at in (upto - 1, -1))
    return not falls_behind(len(answers) - upto, middle, last)


def _under_way(answers: Sequence[Answer], at_s: float) -> int:
    return sum(answer.request.at_s <= at_s < answer.last_at for answer in answers)


def gap_quantiles(gaps: Sequence[TokenGaps], speed: NodeSpeed, percentile: float) -> Quantiles:
    """Returns the quantiles of gaps, each of which is as long as it says but for the spread of steps."""
    if not gaps:
        return Quantiles(0.0, 0.0, 0.0, 0.0, 0.0)
    values, weights = spread_gaps(gaps, speed)
    return quantiles(values, percentile, weights)


def spread_gaps(gaps: Sequence[TokenGaps], speed: NodeSpeed) -> tuple[np.ndarray, np.ndarray]:
    """Returns how long gaps are with the spread of steps, in seconds, and how many there are of each length."""
    values, weights = [], []
    for beside in (False, True):
        seconds = np.array([gap.seconds for gap in gaps if gap.beside is beside])
        counts = np.array([gap.count for gap in gaps if gap.beside is beside], dtype=float)
        times = np.array(speed.spread_of(beside))
        values.append(np.outer(seconds, times).ravel())
        weights.append(np.repeat(counts / len(times), len(times)))
    return np.concatenate(values), np.concatenate(weights)


def quantiles(values: np.ndarray, percentile: float, weights: np.ndarray | None = None) -> Quantiles:
    order = np.argsort(values)
    upto = np.cumsum(weights[order] if weights is not None else np.ones(len(values)))
    rising = values[order]
    return Quantiles(*(not_exceeded(rising, upto, share) for share in (50, 90, 95, 99, percentile)))


def not_exceeded(rising: np.ndarray, upto: np.ndarray, share: float) -> float:
    """Returns the least of ``rising`` values that so many of 100 do not exceed. ``upto`` sums up their weights."""
    return float(rising[min(int(np.searchsorted(upto, share / 100 * upto[-1])), len(rising) - 1)])
