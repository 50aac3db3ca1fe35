"""Finds the smallest cluster that keeps the wanted latencies under a load, and its neighbours.

A ``Prediction`` says what a simulated cluster makes of the load: percentiles, throughput and goodput.

Some clusters need no simulation: their nodes are too few for the tokens of the load, or no node keeps the wanted ITL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pdserve.config import Disaggregation, TargetsConfig
from pdserve.engine.placement.step_cost import StepParts
from pdserve.errors import PlanError
from pdserve.plan.cluster import ClusterShape, Lived, TokenGaps, live, live_within
from pdserve.plan.load import Answer, Bounds, PlannedRequest, falls_behind, upto_middle
from pdserve.plan.profile import CacheGeometry, NodeSpeed, Profile, chunks_of
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
    lived: Lived, shape: ClusterShape, load: Sequence[PlannedRequest], wanted: PlanTargets, speed: NodeSpeed
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


_LEFT = 0.15
"""This share of the work may be left at the end although a cluster keeps up: it is under way."""
_CHANCE = 3.0
"""Chance may leave more of few requests: this divided by the square root of their number."""


def least_nodes(
    profile: Profile,
    load: Sequence[PlannedRequest],
    nodes_per_machine: int,
    itl_s: float = 0.0,
    percentile: float = 90.0,
) -> int:
    """Returns the least number of nodes of any kind whose steps could do the work of ``load`` while it comes.

    That holds for loads that come at one rate, as those that are drawn. A burst at the end of a trace may be computed
    afterwards: how many nodes it needs is up to the targets. The batches of the nodes are as full as the ITL target of
    ``itl_s`` (0 for none) and the KV cache allow. Raises PlanError.
    """
    seconds = load[-1].at_s - load[0].at_s
    share = 1 - _LEFT - _CHANCE / math.sqrt(len(load))
    if share <= 0 or not seconds:
        return 1
    speed, cache = profile.speed(nodes_per_machine), profile.cache
    # A node computes with all cores for one share of the time, or with its own all the time: each part is no less.
    parts = speed.steps.times(nodes_per_machine).least(speed.beside)
    longest_s = itl_s / speed.least_spread if itl_s else math.inf
    decoding_s = _decoding_s(parts, load, cache, longest_s, percentile / 100)
    prompts_s = sum(_prompt_s(parts, request.prompt_tokens, cache.max_num_batched_tokens) for request in load)
    return max(1, math.ceil(share * (decoding_s + prompts_s) / seconds))


def check_itl(
    profile: Profile, load: Sequence[PlannedRequest], nodes_per_machine: int, itl_s: float, percentile: float
) -> None:
    """Raises PlanError if a step of one request takes longer than the ITL target of ``itl_s`` (0 for none)."""
    contexts = [request.prompt_tokens + 1 for request in load if request.output_tokens > 1]
    if not itl_s or not contexts:
        return
    speed = profile.speed(nodes_per_machine)
    step_s = speed.steps.least(speed.beside).decoding_s(1, min(contexts))
    step_s *= min(_quantile(speed.spread_of(beside), percentile) for beside in (False, True))
    if step_s > itl_s:
        raise PlanError(
            f"no number of nodes keeps an ITL p{percentile:g} of {itl_s * 1e3:g} ms: a step for one request alone "
            f"takes {step_s * 1e3:.3g} ms. Want a longer ITL, or measure a faster machine"
        )


def _quantile(spread: Sequence[float], percentile: float) -> float:
    """Returns the least of the values that so many percent of them do not exceed."""
    return sorted(spread)[max(0, math.ceil(len(spread) * percentile / 100 - 1e-6) - 1)]


def _prompt_s(parts: StepParts, prompt_tokens: int, chunk: int) -> float:
    """Returns what a prompt adds to steps at least, where others share the rest of its last chunk."""
    fixed_s = min(parts.chunk_alone, parts.chunk_beside) * prompt_tokens / chunk
    return fixed_s + sum(tokens * parts.token_s(done) for done, tokens in chunks_of(prompt_tokens, chunk))


def _decoding_s(
    parts: StepParts, load: Sequence[PlannedRequest], cache: CacheGeometry, longest_s: float, share: float
) -> float:
    """Returns what the tokens after the first take at least, of which ``share`` come in steps of ``longest_s``."""
    tokens = sum(request.output_tokens - 1 for request in load)
    contexts = sum(
        (request.output_tokens - 1) * (request.prompt_tokens + request.output_tokens / 2) for request in load
    )
    rows = cache.max_num_seqs
    steps = max(tokens / rows, contexts / cache.room)
    if parts.decoding_s(rows, 0) > longest_s:
        rows_in_time = max(1.0, (longest_s - parts.batch) / max(parts.request, 1e-9))
        steps = max(steps, tokens * (share / rows_in_time + (1 - share) / rows))
    return steps * parts.batch + tokens * parts.request + contexts * parts.context_token


_FEW = 8
"""Every cluster of so many nodes and fewer is tried."""


@dataclass(frozen=True, slots=True)
class Sized:
    """The smallest cluster that does, if there is any, and what was found of those around it."""

    chosen: ClusterShape | None
    tried: tuple[Prediction, ...]
    """The choice, its neighbours and as many mixed nodes, the smaller first; some of the largest without a choice."""


class Sizing:
    """Asks of one cluster after the other whether it does, and of none twice."""

    def __init__(
        self,
        predict: Callable[[ClusterShape], Prediction],
        predict_if_good: Callable[[ClusterShape], Prediction | None],
        most_nodes: int,
        nodes_per_machine: int,
        least: int = 1,
        *,
        apart: bool = True,
    ) -> None:
        """Fewer than ``least`` nodes are not looked at, and none of their own for prompts unless ``apart``."""
        self._predict, self._predict_if_good = predict, predict_if_good
        self._most, self._per_machine = most_nodes, nodes_per_machine
        self._least = least
        self._apart_too = apart
        self._known: dict[ClusterShape, Prediction | None] = {}

    def find(self) -> Sized:
        """Returns the smallest cluster: of equal ones, that with the most goodput. Raises PlanError."""
        if self._least > self._most:
            raise PlanError(
                f"{self._most} nodes are too few: the tokens of the load alone keep {self._least} nodes busy. "
                "Allow more with --max-nodes"
            )
        chosen = self._among_all() or self._among_large()
        shown = self._around(chosen) if chosen is not None else self._largest()
        tried = sorted(
            map(self._of, shown),
            key=lambda prediction: (prediction.shape.nodes, prediction.shape.mixed, prediction.shape.prefill),
        )
        return Sized(chosen, tuple(tried))

    def _around(self, chosen: ClusterShape) -> set[ClusterShape]:
        near = {near for near in neighbours(chosen) if near.nodes <= self._most}
        return {chosen, self._mixed(chosen.nodes), *near}

    def _largest(self) -> set[ClusterShape]:
        """Returns some clusters of as many nodes as there may be."""
        quarters = {max(1, self._most * quarter // 4) for quarter in (1, 2, 3)} if self._apart_too else set()
        apart = {self._apart(prefill, self._most - prefill) for prefill in quarters if prefill < self._most}
        return {self._mixed(self._most), *apart}

    def _among_all(self) -> ClusterShape | None:
        """Tries every cluster of few nodes."""
        for nodes in range(min(self._least, self._most), min(self._most, _FEW) + 1):
            prefill_too = range(1, nodes if self._apart_too else 1)
            apart = [self._apart(prefill, nodes - prefill) for prefill in prefill_too]
            good = [found for shape in (self._mixed(nodes), *apart) if (found := self._good(shape)) is not None]
            if good:
                return max(good, key=lambda prediction: prediction.goodput).shape
        return None

    def _among_large(self) -> ClusterShape | None:
        """Walks along the border between clusters that do and others. More nodes are never taken to be worse."""
        if self._most <= _FEW:
            return None
        best = self._smallest_mixed()
        if not self._apart_too:
            return None if best is None else best.shape
        prefill, decode = 1, (self._most if best is None else best.shape.nodes) - 1
        while decode:
            found = self._good(self._apart(prefill, decode))
            if found is not None:
                if best is None or (found.shape.nodes, -found.goodput) < (best.shape.nodes, -best.goodput):
                    best = found
                decode -= 1
            else:
                prefill += 1
            decode = min(decode, (self._most if best is None else best.shape.nodes) - prefill)
        return None if best is None else best.shape

    def _good(self, shape: ClusterShape) -> Prediction | None:
        """Returns what is expected of a cluster if it does; None otherwise."""
        if shape not in self._known:
            self._known[shape] = None if shape.nodes < self._least else self._predict_if_good(shape)
        return self._known[shape]

    def _of(self, shape: ClusterShape) -> Prediction:
        """Returns what is expected of a cluster, whether it does or not."""
        return self._known.get(shape) or self._predict(shape)

    def _smallest_mixed(self) -> Prediction | None:
        """Takes more and more nodes until they do, and then halves the interval."""
        too_few = max(_FEW, self._least - 1)
        enough, more = min(too_few + 1, self._most), 1
        while (found := self._good(self._mixed(enough))) is None:
            if enough == self._most:
                return None
            too_few, more = enough, 2 * more
            enough = min(enough + more, self._most)
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            if (smaller := self._good(self._mixed(middle))) is not None:
                enough, found = middle, smaller
            else:
                too_few = middle
        return found

    def _mixed(self, nodes: int) -> ClusterShape:
        return ClusterShape(mixed=nodes, nodes_per_machine=self._per_machine)

    def _apart(self, prefill: int, decode: int) -> ClusterShape:
        return ClusterShape(prefill, decode, nodes_per_machine=self._per_machine)


def neighbours(shape: ClusterShape) -> list[ClusterShape]:
    """Returns the clusters with one node more or less of a kind, and with one moved from one kind to the other."""
    moves = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1))
    if shape.mixed:
        return [replace(shape, mixed=shape.mixed + more) for more in (-1, 1) if shape.mixed + more]
    return [
        replace(shape, prefill=shape.prefill + prefill, decode=shape.decode + decode)
        for prefill, decode in moves
        if shape.prefill + prefill > 0 and shape.decode + decode > 0
    ]


def checked_sizing(sizing: Sizing, what: str) -> Sized:
    """Returns what ``sizing`` finds. Raises PlanError if no cluster does, with the best that was tried."""
    sized = sizing.find()
    if sized.chosen is None:
        best = max(sized.tried, key=lambda found: (found.goodput, -found.ttft.asked, -found.itl.asked))
        raise PlanError(
            f"no cluster that was tried keeps {what}: {best.shape} has a TTFT of {best.ttft.asked * 1e3:.0f} ms and an "
            f"ITL of {best.itl.asked * 1e3:.1f} ms there. Allow more with --max-nodes, or want less"
        )
    return sized
