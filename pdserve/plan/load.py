"""The requests that a prediction is made for, and what becomes of each.

Requests are drawn at a rate from lengths, or read from a trace. Rate and lengths may come from what running nodes have
counted between two looks. A prediction ends as soon as it is sure that too many answers come too late.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import PlanError
from pdserve.plan.profile import NodeSpeed

MAX_TRACE_BYTES = 256 * 2**20
MAX_TOKENS = 2**24
"""No prompt and no answer is longer: a number beyond it is a mistake in the file."""
MAX_S = 1e9


class PlannedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: the time at which it comes, in seconds, and its tokens. A line of a trace file."""

    at_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of numbers of tokens: ranges with their shares, in which logarithms are spread evenly."""

    bounds: tuple[tuple[int, int], ...]
    """The least and the most of each range."""
    shares: tuple[float, ...]
    """The sums of the shares up to each range; the last one is 1."""

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int, float]]) -> Lengths:
        """Returns a distribution of ranges (least, most, weight). Raises PlanError."""
        found = [(least, most, weight) for least, most, weight in ranges if weight > 0]
        total = sum(weight for *_, weight in found)
        if not found or not math.isfinite(total):
            raise PlanError("there are no lengths of requests to go by")
        for least, most, _ in found:
            if not 1 <= least <= most <= MAX_TOKENS:
                raise PlanError(f"lengths from {least} to {most} tokens; right are 1 to {MAX_TOKENS}, the least first")
        sums = itertools.accumulate(weight / total for *_, weight in found)
        return cls(tuple((least, most) for least, most, _ in found), tuple(sums))

    def draw(self, source: random.Random) -> int:
        least, most = self.bounds[min(bisect.bisect(self.shares, source.random()), len(self.bounds) - 1)]
        return min(most, round(math.exp(source.uniform(math.log(least), math.log(most))))) if least < most else least

    @property
    def mean(self) -> float:
        """The mean number of tokens."""
        means = [
            least if least == most else (most - least) / (math.log(most) - math.log(least))
            for least, most in self.bounds
        ]
        before = (0.0, *self.shares[:-1])
        return sum(mean * (upto - since) for mean, upto, since in zip(means, self.shares, before, strict=True))

    @property
    def longest(self) -> int:
        return max(most for _, most in self.bounds)


def read_lengths(text: str) -> Lengths:
    """Returns the lengths that ``text`` names: 256, 16-512, or several with weights: 64:3,1024-4096:1.

    Raises PlanError.
    """
    ranges = []
    for part in text.split(","):
        span, _, weight = part.strip().partition(":")
        least, dash, most = span.partition("-")
        try:
            ranges.append((int(least), int(most if dash else least), float(weight or 1)))
        except ValueError:
            raise PlanError(
                f"{part.strip()!r} is no length; right are such as 256, 16-512, and 64:3,1024-4096:1"
            ) from None
    return Lengths.of(ranges)


def poisson_load(rate: float, count: int, prompt: Lengths, output: Lengths, seed: int) -> list[PlannedRequest]:
    """Returns ``count`` requests that come independently of each other, ``rate`` of them a second."""
    source = random.Random(f"plan:{seed}")  # noqa: S311  # the times must be repeatable, not secret
    at_s, found = 0.0, []
    for _ in range(count):
        at_s += source.expovariate(rate)
        found.append(PlannedRequest(at_s, prompt.draw(source), output.draw(source)))
    return found


def read_trace(path: Path) -> list[PlannedRequest]:
    """Returns the requests in a file of JSON lines, in the order of their times. Raises PlanError."""
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise PlanError(f"the trace {path} has more than {MAX_TRACE_BYTES // 2**20} MiB; split it")
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise PlanError(f"cannot read the trace {path}: {exc.strerror}") from exc
    decoder = msgspec.json.Decoder(PlannedRequest)
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as exc:
            raise PlanError(
                f"{path}, line {number}: {exc}; right is such as "
                '{"at_s": 0.25, "prompt_tokens": 256, "output_tokens": 64}'
            ) from exc
    if not found:
        raise PlanError(f"the trace {path} has no request")
    return sorted(found, key=lambda request: request.at_s)


def rate_of(load: Sequence[PlannedRequest]) -> float:
    """Returns the requests a second between the first and the last one; 0 for a single one."""
    seconds = load[-1].at_s - load[0].at_s
    return (len(load) - 1) / seconds if seconds > 0 else 0.0


_PROMPTS, _OUTPUTS = "request_prompt_tokens", "request_generation_tokens"
_PREFIXES = ("pdserve_", "vllm:")
LEAST_REQUESTS = 10
"""Fewer requests tell nothing of their lengths."""


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """The requests of a running cluster."""

    rate: float
    requests: int
    prompts: Lengths
    outputs: Lengths


def observed_load(before: Sequence[str], after: Sequence[str], seconds: float) -> ObservedLoad:
    """Returns what came in the ``seconds`` between two looks at the metrics of the same nodes. Raises PlanError."""
    prompts, outputs = (_came_to_all(before, after, name) for name in (_PROMPTS, _OUTPUTS))
    requests = round(sum(prompts.values()))
    if requests < LEAST_REQUESTS:
        raise PlanError(
            f"{requests} requests ended in {seconds:g} s, too few to go by; --look-s says for how long they are counted"
        )
    return ObservedLoad(requests / seconds, requests, _lengths(prompts), _lengths(outputs))


def _came_to_all(before: Sequence[str], after: Sequence[str], name: str) -> dict[float, float]:
    """Returns how many values of a histogram came to all nodes, by the upper bounds of its buckets."""
    came: dict[float, float] = {}
    for earlier, later in zip(before, after, strict=True):
        for bound, count in _came(_buckets(earlier, name), _buckets(later, name)).items():
            came[bound] = came.get(bound, 0.0) + count
    return {bound: came[bound] for bound in sorted(came)}


def _buckets(metrics: str, name: str) -> dict[float, float]:
    """Returns the cumulative counts of a node's histogram by their bounds: a node may tell it under both prefixes."""
    found: dict[str, dict[float, float]] = {f"{prefix}{name}_bucket": {} for prefix in _PREFIXES}
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                if (counts := found.get(sample.name)) is not None and math.isfinite(sample.value):
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
    except (ValueError, KeyError) as exc:
        raise PlanError(f"a node's /metrics are not in Prometheus' format: {exc}") from exc
    return next((counts for counts in found.values() if counts), {})


def _came(before: dict[float, float], after: dict[float, float]) -> dict[float, float]:
    """Returns how many values came in each bucket of one node. One that has started anew counts from 0."""
    if any(count < before.get(bound, 0.0) for bound, count in after.items()):
        before = {}
    came, upto = {}, 0.0
    for bound in sorted(after):
        count = after[bound] - before.get(bound, 0.0)
        came[bound] = max(0.0, count - upto)
        upto = max(upto, count)
    return came


def _lengths(came: dict[float, float]) -> Lengths:
    ranges, least = [], 1
    for bound, count in came.items():
        most = 2 * least if math.isinf(bound) else max(1, int(bound))
        most = min(most, MAX_TOKENS)
        ranges.append((min(least, most), most, count))
        least = min(most + 1, MAX_TOKENS)
    return Lengths.of(ranges)


_BEHIND = 0.05
"""A cluster that leaves more of the requests behind does not keep up."""


@dataclass(slots=True, eq=False)
class Answer:
    """One answer, while it is made and afterwards. Times are in seconds of the simulated clock."""

    request: PlannedRequest
    tokens_left: int
    """The tokens after the first that its client has not got."""
    first_at: float = math.nan
    last_at: float = math.nan
    done: bool = False
    """Whether its client has all tokens, and its node has forgotten it."""

    @classmethod
    def to(cls, request: PlannedRequest) -> Answer:
        return cls(request, request.output_tokens - 1)

    @property
    def begun(self) -> bool:
        """Whether its client has the first token."""
        return not math.isnan(self.first_at)

    def end(self, now: float) -> None:
        self.last_at, self.done = now, True

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.request.at_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a token after the first; None for an answer of one token."""
        after_first = self.request.output_tokens - 1
        return (self.last_at - self.first_at) / after_first if after_first else None


class Bounds:
    """Counts what comes too late. Targets are in seconds, 0 for any."""

    def __init__(
        self, ttft_s: float, itl_s: float, percentile: float, load: Sequence[PlannedRequest], speed: NodeSpeed
    ) -> None:
        self.hopeless = False
        """Whether the cluster misses what is wanted, whatever happens from now on."""
        self._ttft_s, self._itl_s = ttft_s or math.inf, itl_s or math.inf
        share, gaps = 1 - percentile / 100, sum(request.output_tokens - 1 for request in load)
        # One more than the share, so that no rounding decides.
        self._answers_left, self._gaps_left = share * len(load) + 1, share * gaps + 1
        self._spreads = {beside: sorted(speed.spread_of(beside)) for beside in (False, True)}
        self._upto_middle, self._came = upto_middle(load), len(load) - upto_middle(load)
        self._at_middle = self._looked_at = 0

    def passed(self, now: float, answers: Sequence[Answer]) -> None:
        """Notes that it is ``now``: of ``answers``, those are too late whose first token should have come before."""
        while self._looked_at < len(answers):
            answer = answers[self._looked_at]
            if answer.request.at_s + self._ttft_s >= now:
                return
            self._looked_at += 1
            if not answer.begun or answer.ttft_s > self._ttft_s:
                self._answers_left -= 1
                self.hopeless |= self._answers_left < 0

    def gap(self, seconds: float, count: int, beside: bool) -> None:
        """Notes so many gaps between tokens, which are as long as that but for the spread of steps."""
        if seconds <= 0:
            return
        spread = self._spreads[beside]
        late = len(spread) - bisect_right(spread, self._itl_s / seconds)
        if late:
            self._gaps_left -= count * late / len(spread)
            self.hopeless |= self._gaps_left < 0

    def middle(self, answers: Sequence[Answer]) -> None:
        """Notes that the moment of the middle one of ``answers`` is over."""
        self._at_middle = _under_way_now(answers[: self._upto_middle])

    def last(self, answers: Sequence[Answer]) -> None:
        """Notes that the moment of the last one of them is over."""
        self.hopeless |= falls_behind(self._came, self._at_middle, _under_way_now(answers))


def upto_middle(load: Sequence[PlannedRequest]) -> int:
    """Returns how many requests come before the middle one or at the same moment as it."""
    return bisect_right(load, load[len(load) // 2].at_s, key=lambda request: request.at_s)


def _under_way_now(answers: Sequence[Answer]) -> int:
    """Returns how many of the ``answers`` that have been asked for have not ended."""
    return sum(not (answer.done or (answer.begun and not answer.tokens_left)) for answer in answers)


def falls_behind(came: int, at_middle: int, at_last: int) -> bool:
    """Returns whether the requests under way grow by more than chance while so many came after the middle one."""
    return at_last - at_middle > max(_BEHIND * came, 3 * math.sqrt(at_middle + 1))
