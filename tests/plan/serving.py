"""Systems of ``benchmarks goodput`` in virtual time: ``python -m tests.plan.serving``.

Clients ask again as soon as they have their answer, or requests come at a rate. Nodes have the targets that answers are
judged by, or with ``--tell off`` know nothing of them.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path

from benchmarks.goodput.workload import MIX
from benchmarks.settings import BenchGoodputConfig
from pdserve.config import Disaggregation, TargetsConfig
from pdserve.engine.placement import latency_targets
from pdserve.plan.cluster import ClusterShape, Lived, TokenGaps, _Simulation, live
from pdserve.plan.load import Answer, Lengths, PlannedRequest, poisson_load, read_lengths
from pdserve.plan.node import PendingPrompt
from pdserve.plan.profile import Profile, read_profile
from pdserve.plan.sizing import PlanTargets, gap_quantiles

_PROFILES = Path(__file__).parents[2] / "docs" / "benchmarks" / "goodput"
PROFILE = _PROFILES / "profile.json"
"""The demo model on two cores, as `pdserve plan profile` has measured it."""
AVX2_PROFILE = _PROFILES / "profile-avx2.json"
"""The same on two cores that have AVX2 alone: a prompt takes half as long again there."""
RequestShape = tuple[Lengths, Lengths]
"""The tokens of requests' prompts and of their answers."""
SYSTEMS = {
    "mixed": (ClusterShape(mixed=1), Disaggregation.NEVER),
    "always": (ClusterShape(prefill=1, decode=1, nodes_per_machine=2), Disaggregation.ALWAYS),
    "auto": (ClusterShape(prefill=1, decode=1, nodes_per_machine=2), Disaggregation.AUTO),
}
_MIXED = BenchGoodputConfig().workload
_SEEDS = 3
_THINK_S = 0.003
_COLUMNS = (
    "load",
    "ITL target, ms",
    *(f"`{system}`" for system in SYSTEMS),
    "`auto` : the better",
    "output : `mixed`",
    "TTFT p50 : `mixed`",
    "ITL p99 : p50",
)
_SERVED_PER_S = 0.1
"""Fewer good answers a second are those of the first requests."""


def read_shape(text: str) -> RequestShape:
    """Returns what ``text`` says: 256/64, 32-1024/16-256, or mix as in ``benchmarks goodput``."""
    if text == MIX:
        prompts = (_MIXED.min_prompt_tokens, _MIXED.max_prompt_tokens, 1.0)
        outputs = (_MIXED.min_output_tokens, _MIXED.max_output_tokens, 1.0)
        return Lengths.of([prompts]), Lengths.of([outputs])
    prompt, output = map(read_lengths, text.split("/"))
    return prompt, output


SHAPE = read_shape("256/64")


@dataclass(frozen=True, slots=True)
class Served:
    """What a system made of a load."""

    good_per_s: float
    ttft_s: float
    """The median."""
    tokens_per_s: float
    itl_s: float
    """The median."""
    itl_p99_s: float


@dataclass(slots=True, eq=False)
class ClientsAnswer(Answer):
    """An answer whose end somebody waits for."""

    ended: Callable[[float], None] | None = None

    def end(self, now: float) -> None:
        Answer.end(self, now)
        if self.ended is not None:
            self.ended(now)


class ClosedLoop(_Simulation):
    """Clients in place of a load. They come a fiftieth of a second after each other.

    Clients whose requests are all alike fall into step with each other, and no prompt meets another one. Those with a
    ``spread`` do not: their prompts and answers are longer or shorter by up to that share.
    """

    @property
    def gaps(self) -> list[TokenGaps]:
        return self._gaps

    def answers(
        self, clients: int, seconds: float, spread: float = 0.0, shape: RequestShape = SHAPE, seed: int = 0
    ) -> list[Answer]:
        """Returns the answers of clients that ask for so many seconds."""
        answers: list[Answer] = []
        chance = random.Random(f"{clients}:{seed}")  # it must be repeatable, not secret

        def ask(at_s: float) -> None:
            if at_s > seconds:
                return
            prompt, output = (round(lengths.draw(chance) * chance.uniform(1 - spread, 1 + spread)) for lengths in shape)
            answer = ClientsAnswer.to(PlannedRequest(at_s, prompt, output))
            assert isinstance(answer, ClientsAnswer)
            answer.ended = lambda now: ask(now + _THINK_S)
            answers.append(answer)
            self._at(at_s + self._profile.front.seconds(prompt), lambda now: self._come(answer, now))

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
        prompt = PendingPrompt(
            answer, answer.request.prompt_tokens, now, None if other is None else other.node.as_target
        )
        self._tell(engine, now, lambda _: engine.node.wait(prompt))


def to_clients(
    profile: Profile,
    clients: int,
    system: str,
    targets: PlanTargets,
    *,
    told: bool = True,
    spread: float = 0.0,
    seconds: float = 100.0,
    shape: RequestShape = SHAPE,
) -> Served:
    """Returns what clients get that ask for so many seconds: the mean of some runs.

    Nodes know the ``targets`` if they are ``told``.
    """
    nodes = _config(targets, told)
    lived = (
        _lived_with_clients(profile, clients, system, nodes, spread, seconds, shape, seed) for seed in range(_SEEDS)
    )
    return _mean([_served(one, profile, system, targets, seconds) for one in lived])


def at_rate(
    profile: Profile,
    rate: float,
    system: str,
    targets: PlanTargets,
    *,
    told: bool = True,
    count: int = 200,
    shape: RequestShape = SHAPE,
) -> Served:
    """Returns the mean of some loads."""
    served = []
    for seed in range(_SEEDS):
        lived = _lived_at_rate(profile, rate, system, _config(targets, told), count, seed, shape)
        served.append(_served(lived, profile, system, targets, lived.answers[-1].request.at_s))
    return _mean(served)


def _mean(served: list[Served]) -> Served:
    return Served(*map(statistics.fmean, zip(*map(astuple, served), strict=True)))


@cache
def _lived_with_clients(
    profile: Profile,
    clients: int,
    system: str,
    nodes: TargetsConfig,
    spread: float,
    seconds: float,
    shape: RequestShape,
    seed: int,
) -> Lived:
    cluster, disaggregation = SYSTEMS[system]
    loop = ClosedLoop(profile, cluster, nodes, disaggregation, None)
    return Lived(loop.answers(clients, seconds, spread, shape, seed), loop.gaps)


@cache
def _lived_at_rate(
    profile: Profile, rate: float, system: str, nodes: TargetsConfig, count: int, seed: int, shape: RequestShape
) -> Lived:
    cluster, disaggregation = SYSTEMS[system]
    return live(profile, cluster, poisson_load(rate, count, *shape, seed), nodes, disaggregation)


def _config(targets: PlanTargets, told: bool) -> TargetsConfig:
    if not told:
        return TargetsConfig()
    return TargetsConfig(target_ttft_ms=targets.ttft_s * 1e3, target_itl_ms=targets.itl_s * 1e3)


def _served(lived: Lived, profile: Profile, system: str, targets: PlanTargets, seconds: float) -> Served:
    """Returns what ``lived`` is by ``targets``, of which requests began for so many seconds."""
    shape, _ = SYSTEMS[system]
    answers, itl = lived.answers, gap_quantiles(lived.gaps, profile.speed(shape.nodes_per_machine), 99.0)
    return Served(
        sum(map(targets.good, answers)) / seconds,
        statistics.median(answer.ttft_s for answer in answers),
        sum(answer.request.output_tokens for answer in answers) / lived.ended_at,
        itl.p50,
        itl.p99,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--shape", default="256/64", help="the tokens of prompts and of answers, or mix")
    parser.add_argument("--ttft-ms", type=float, default=704.0)
    parser.add_argument("--itl-ms", type=float, nargs="+", default=[17.3, 43.3])
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--tell", choices=("on", "off"), default="on")
    parser.add_argument("--itl-factor", type=float, help="what decode nodes that are told nothing allow their steps")
    parser.add_argument("--spread", type=float, default=0.0, help="clients' requests differ by up to this share")
    parser.add_argument("--rates", type=float, nargs="*", default=[1.8, 2.8])
    chosen = parser.parse_args()
    profile = read_profile(chosen.profile)
    told = chosen.tell == "on"
    shape = read_shape(chosen.shape)
    latency_targets.ITL_FACTOR = chosen.itl_factor or latency_targets.ITL_FACTOR
    print(_row(*_COLUMNS))
    print("|---" * len(_COLUMNS) + "|")
    loads: list[tuple[str, Callable[[str, PlanTargets], Served]]] = [
        (
            f"{clients} client{'s' * (clients > 1)}",
            partial(to_clients, profile, clients, told=told, spread=chosen.spread, shape=shape),
        )
        for clients in chosen.clients
    ]
    loads += [(f"{rate:g} req/s", partial(at_rate, profile, rate, told=told, shape=shape)) for rate in chosen.rates]
    for itl_ms, (name, serve) in itertools.product(chosen.itl_ms, loads):
        targets = PlanTargets(chosen.ttft_ms / 1e3, itl_ms / 1e3)
        mixed, always, auto = (serve(system, targets) for system in SYSTEMS)
        better = max(mixed.good_per_s, always.good_per_s)
        ratio = f"{auto.good_per_s / better:.2f}" if max(better, auto.good_per_s) > _SERVED_PER_S else ""
        goods = (f"{one.good_per_s:.2f}" for one in (mixed, always, auto))
        to_mixed = (auto.tokens_per_s / mixed.tokens_per_s, auto.ttft_s / mixed.ttft_s, auto.itl_p99_s / auto.itl_s)
        print(_row(name, f"{itl_ms:g}", *goods, ratio, *(f"{value:.2f}" for value in to_mixed)), flush=True)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
