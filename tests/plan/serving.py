"""Systems of ``pdserve bench goodput`` in virtual time: ``python -m tests.plan.serving``.

Clients ask again as soon as they have their answer, or requests come at a rate. Nodes have the targets that answers are
judged by.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pdserve.config import Disaggregation, TargetsConfig
from pdserve.plan.answer import Answer
from pdserve.plan.cluster import ClusterShape, _Simulation, live
from pdserve.plan.load import Lengths, PlannedRequest, poisson_load
from pdserve.plan.node import PendingPrompt
from pdserve.plan.prediction import PlanTargets
from pdserve.plan.profile import Profile, read_profile

PROFILE = Path(__file__).parents[2] / "docs" / "benchmarks" / "goodput" / "profile.json"
"""The demo model on two cores, as `pdserve plan profile` has measured it."""
PROMPT, OUTPUT = 256, 64
SYSTEMS = {
    "mixed": (ClusterShape(mixed=1), Disaggregation.NEVER),
    "always": (ClusterShape(prefill=1, decode=1, nodes_per_machine=2), Disaggregation.ALWAYS),
    "auto": (ClusterShape(prefill=1, decode=1, nodes_per_machine=2), Disaggregation.AUTO),
}
_SEEDS = 3
_THINK_S = 0.003
_SERVED_PER_S = 0.1
"""Fewer good answers a second are those of the first requests."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a system made of a load."""

    good_per_s: float
    ttft_s: float
    """The median."""


@dataclass(slots=True, eq=False)
class ClientsAnswer(Answer):
    """An answer whose end somebody waits for."""

    ended: Callable[[float], None] | None = None

    def end(self, now: float) -> None:
        Answer.end(self, now)
        if self.ended is not None:
            self.ended(now)


class ClosedLoop(_Simulation):
    """Clients in place of a load. They come a fiftieth of a second after each other."""

    def answers(self, clients: int, seconds: float) -> list[Answer]:
        """Returns the answers of clients that ask for so many seconds."""
        answers: list[Answer] = []

        def ask(at_s: float) -> None:
            if at_s > seconds:
                return
            answer = ClientsAnswer.to(PlannedRequest(at_s, PROMPT, OUTPUT))
            assert isinstance(answer, ClientsAnswer)
            answer.ended = lambda now: ask(now + _THINK_S)
            answers.append(answer)
            self._at(at_s + self._profile.front.seconds(PROMPT), lambda now: self._come(answer, now))

        for client in range(clients):
            ask(0.02 * client)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return answers

    def _come(self, answer: Answer, now: float) -> None:
        engine = self._answering.next()
        assert engine is not None
        other = self._prefilling.next(but=engine)
        prompt = PendingPrompt(answer, PROMPT, now, None if other is None else other.node.as_target)
        self._tell(engine, now, lambda _: engine.node.wait(prompt))


def to_clients(profile: Profile, clients: int, system: str, targets: PlanTargets, seconds: float = 100.0) -> Served:
    shape, disaggregation = SYSTEMS[system]
    answers = ClosedLoop(profile, shape, _config(targets), disaggregation, None).answers(clients, seconds)
    return _served(answers, targets, seconds)


def at_rate(profile: Profile, rate: float, system: str, targets: PlanTargets, count: int = 200) -> Served:
    """Returns the mean of some loads."""
    shape, disaggregation = SYSTEMS[system]
    served = []
    for seed in range(_SEEDS):
        load = poisson_load(rate, count, Lengths.of([(PROMPT,) * 2 + (1,)]), Lengths.of([(OUTPUT,) * 2 + (1,)]), seed)
        answers = live(profile, shape, load, _config(targets), disaggregation).answers
        served.append(_served(answers, targets, load[-1].at_s))
    return Served(statistics.fmean(one.good_per_s for one in served), statistics.fmean(one.ttft_s for one in served))


def _config(targets: PlanTargets) -> TargetsConfig:
    return TargetsConfig(target_ttft_ms=targets.ttft_s * 1e3, target_itl_ms=targets.itl_s * 1e3)


def _served(answers: Sequence[Answer], targets: PlanTargets, seconds: float) -> Served:
    return Served(sum(map(targets.good, answers)) / seconds, statistics.median(answer.ttft_s for answer in answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--ttft-ms", type=float, default=704.0)
    parser.add_argument("--itl-ms", type=float, nargs="+", default=[17.3, 43.3])
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--rates", type=float, nargs="*", default=[1.8, 2.8])
    chosen = parser.parse_args()
    profile = read_profile(chosen.profile)
    print("| load | ITL target, ms | `mixed` | `always` | `auto` | `auto` : the better | TTFT p50 : `mixed` |")
    print("|---|---|---|---|---|---|---|")
    loads: list[tuple[str, Callable[[str, PlanTargets], Served]]] = [
        (f"{clients} client{'s' * (clients > 1)}", partial(to_clients, profile, clients)) for clients in chosen.clients
    ]
    loads += [(f"{rate:g} req/s", partial(at_rate, profile, rate)) for rate in chosen.rates]
    for itl_ms, (name, serve) in itertools.product(chosen.itl_ms, loads):
        targets = PlanTargets(chosen.ttft_ms / 1e3, itl_ms / 1e3)
        mixed, always, auto = (serve(system, targets) for system in SYSTEMS)
        better = max(mixed.good_per_s, always.good_per_s)
        ratio = f"{auto.good_per_s / better:.2f}" if max(better, auto.good_per_s) > _SERVED_PER_S else ""
        goods = " | ".join(f"{one.good_per_s:.2f}" for one in (mixed, always, auto))
        print(f"| {name} | {itl_ms:g} | {goods} | {ratio} | {auto.ttft_s / mixed.ttft_s:.2f} |")


if __name__ == "__main__":
    main()
