"""A cluster of many nodes under many streams, in virtual time, from one seed.

The streams are a fixed number of conversations. Each sends its next request as soon as it has its answer, to the proxy
that it always asks. A request is routed at once; then the prefill node computes its prompt, whose blocks move to the
decode node, which writes the answer. A part of the nodes may die at once, like a rack without power.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeAlias

from lab.simulation.scale.events import Events
from lab.simulation.scale.nodes import CoarseNode, DecodeModel, PrefillModel
from lab.simulation.scale.proxy import CoarseProxy, RealCosts
from pdserve.config import RegistryConfig, RelayConfig, RoutingPolicy
from pdserve.plan.profile import Profile
from pdserve_proxy.routing.attempts import Attempt
from pdserve_proxy.routing.router import Route

SYSTEM_PROMPTS = 32
SYSTEM_BYTES = 1024
CONVERSATION_BYTES = 512
START_S = 5.0
"""The streams come within so many seconds."""
LOOK_S = 1.0
"""The balance is looked at so often."""
FOLLOWED_S = 600.0
"""After a loss the run goes on until all streams have gone on, for at most so many seconds more than planned."""
NORMAL = 1.25
"""After a loss, times to the first token are normal again when a second's p99 is at most so many times what it was."""


Shares: TypeAlias = tuple[float | None, float | None]
"""p50 and p99; None where there was nothing."""


@dataclass(frozen=True)
class Plan:
    """What is simulated."""

    nodes: int = 1000
    prefill_share: float = 0.4
    proxies: int = 8
    streams: int = 100_000
    policy: RoutingPolicy = RoutingPolicy.TWO_CHOICES
    prompt_tokens: int = 512
    answer_tokens: int = 400
    """The mean lengths; lengths vary."""
    warm_up_s: float = 20.0
    seconds: float = 60.0
    lose: float = 0.0
    """The share of the nodes that dies after ``warm_up_s`` and half of ``seconds``."""
    max_resumes: int = RelayConfig().max_resumes
    seed: int = 0


@dataclass(frozen=True)
class Report:
    """What came of it. Times are virtual, but for the costs. What nothing was seen of in the run is None."""

    policy: str
    answers: int
    tokens_per_s: float
    decode_imbalance: float | None
    """The requests at the busiest decode node, as a multiple of the mean; the mean over the time."""
    prefill_imbalance: float | None
    prefill_mean: float | None
    """The mean requests at a prefill node, over the time."""
    ttft_s: Shares
    gap_s: Shares
    """The quantiles of the mean time between the tokens of an answer, over all answers."""
    same_node: float
    """The share of requests that go to the decode node of the request before in their conversation."""
    loss: LossReport | None
    costs: CostReport


@dataclass(frozen=True)
class LossReport:
    """What a loss of many nodes did. A figure is None if the run ended before there was anything to measure it by."""

    nodes: int
    noticed_s: float | None
    """When the last proxy had dropped the last of them; None if some were left at the end."""
    streams: int
    """The streams that had an answer under way there."""
    resumed: int
    """How many of them went on. All do, unless the nodes that are left are too few for them."""
    pause_s: Shares
    """The quantiles of how long the streams of lost nodes stood still."""
    most_resumed_s: float | None
    """When 99 % of them had gone on; None if fewer did."""
    last_resumed_s: float
    standing: list[int]
    """How many streams still stood still after each second."""
    surge: float | None
    """The most requests at a decode node that is left, as a multiple of the mean there before."""
    ttft_before_s: float | None
    """The p99 of other requests' time to the first token before."""
    ttft_s: Shares
    """The quantiles of that time from the loss until the last stream has gone on."""
    worst_ttft_s: float | None
    """The worst p99 of a second."""
    normal_after_s: float | None
    """When times to the first token were normal again; None if they were not in the time."""


@dataclass(frozen=True)
class CostReport:
    """What the product's code really took on this machine."""

    decisions_per_s: float
    heartbeat_us: float
    serving_ms: float
    """To make anew what requests are routed by, as after each node that comes or goes."""
    snapshot_ms: float
    """To make a snapshot of all nodes, as for a page."""
    first_choice_ms: float
    """The first decision after a node has come or gone."""


@dataclass(eq=False)
class Stream:
    """One conversation."""

    proxy: CoarseProxy
    prompt_start: bytes
    arrived_s: float = 0.0
    prompt: int = 0
    answer: int = 0
    written: float = 0.0
    """The tokens that were written at nodes that were lost."""
    began_s: float = 0.0
    """When the answer's first token came."""
    last_node: bytes = b""
    lost_s: float = math.nan
    route: Route | None = None
    attempt: Attempt | None = None
    has_turn: bool = False
    life: int = 0
    """The number of its attempt: what a former one still brings comes too late."""
    steps: float = 0.0
    """The steps that its decode node had made when the answer began there."""


@dataclass
class Found:
    """What is noted while the simulation runs."""

    ttft: list[tuple[float, float]] = field(default_factory=list)
    """When each first token came, and how long it took."""
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0
    same: int = 0
    follow_ups: int = 0
    decode_peaks: list[float] = field(default_factory=list)
    prefill_peaks: list[float] = field(default_factory=list)
    prefill_means: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    lost: int = 0
    surge: int = 0


class Scale:
    """One run."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._plan = plan
        self._profile = profile
        self._chance = Random(plan.seed)
        self.events = Events()
        self.costs = RealCosts()
        self.found = Found()
        self._measuring = False
        self._lost_at_s = math.inf
        speed, cache = profile.speed(1), profile.cache
        prefill = max(1, round(plan.nodes * plan.prefill_share))
        self.nodes: list[CoarseNode] = []
        for number in range(plan.nodes):
            # Prefill and decode nodes stand in all racks.
            is_prefill = (number + 1) * prefill // plan.nodes > number * prefill // plan.nodes
            kind = PrefillModel if is_prefill else DecodeModel
            self.nodes.append(kind(number, self.events, speed, cache))
        self._by_id = {node.info.boot_id: node for node in self.nodes}
        relay = RelayConfig(max_resumes=plan.max_resumes)
        self.proxies = [
            CoarseProxy(self.events, plan.policy, Random(self._chance.random()), relay, self.costs)
            for _ in range(plan.proxies)
        ]
        self._proxy_ids = tuple(number.to_bytes(16, "big") for number in range(plan.proxies))

    def run(self) -> Report:
        plan = self._plan
        heartbeat_s = RegistryConfig().heartbeat_ms / 1000
        for node in self.nodes:
            for proxy in self.proxies:
                proxy.register(node.info)
            self.events.at(self._chance.random() * heartbeat_s, partial(self._beat, node, heartbeat_s))
        systems = [self._chance.randbytes(SYSTEM_BYTES) for _ in range(SYSTEM_PROMPTS)]
        for number in range(plan.streams):
            start = self._chance.choice(systems) + self._chance.randbytes(CONVERSATION_BYTES)
            stream = Stream(self.proxies[number % plan.proxies], start)
            self.events.at(self._chance.random() * START_S, partial(self._start, stream))
        self.events.run_until(plan.warm_up_s)
        self._measuring = True
        self._look()
        end_s = plan.warm_up_s + plan.seconds
        if plan.lose:
            self.events.run_until(plan.warm_up_s + plan.seconds / 2)
            lost = self._lose()
            before = self._balance(DecodeModel)[1]
            self.events.run_until(end_s)
            while len(self.found.pauses) < self.found.lost and self.events.now < end_s + FOLLOWED_S:
                self.events.run_until(self.events.now + LOOK_S)
            return self._report(self._loss_report(lost, before))
        self.events.run_until(end_s)
        return self._report(None)

    # What a stream does.

    def _start(self, stream: Stream) -> None:
        """Begins with an answer that is under way, as at any moment: what is left of it is as long as a whole one."""
        self._draw(stream)
        stream.began_s = self.events.now
        self._route(stream, computed=True)

    def _ask(self, stream: Stream) -> None:
        self._draw(stream)
        self._route(stream)

    def _draw(self, stream: Stream) -> None:
        stream.arrived_s = self.events.now
        stream.prompt = max(1, round(self._chance.lognormvariate(math.log(self._plan.prompt_tokens) - 0.125, 0.5)))
        stream.answer = 1 + round(self._chance.expovariate(1 / self._plan.answer_tokens))
        stream.written = 0.0
        stream.began_s = 0.0

    def _route(self, stream: Stream, *, computed: bool = False) -> None:
        """Sends a stream to nodes, for the first time or again. Its prompt may be ``computed`` already."""
        route, attempt = stream.proxy.choose(stream.prompt_start)
        stream.route, stream.attempt = route, attempt
        stream.life = life = stream.life + 1
        decode = self._by_id[route.decode.boot_id]
        if stream.last_node:
            self.found.follow_ups += 1
            self.found.same += stream.last_node == route.decode.boot_id
        stream.last_node = route.decode.boot_id
        if not decode.alive:
            stream.proxy.unreachable(route.decode, lambda: self._again(stream, life))
            return
        stream.proxy.watch(route.decode, stream, lambda: self._node_lost(stream, life))
        assert isinstance(decode, DecodeModel)
        decode.expect()
        if computed:
            self._first_token(stream, life)
            return
        tokens = stream.prompt + int(stream.written)
        front_s = self._profile.front.seconds(tokens)
        self.events.after(front_s, lambda: self._prefill(stream, life, 0))

    def _prefill(self, stream: Stream, life: int, which: int) -> None:
        """Has a prefill node compute the prompt; the next one, if the first one falls silent."""
        if stream.life != life or stream.route is None:
            return
        info = stream.route.prefill[which % len(stream.route.prefill)]
        node = self._by_id[info.boot_id]
        assert isinstance(node, PrefillModel)
        if not node.alive and stream.proxy.registry.node(info.boot_id) is None:
            self._again(stream, life)  # both are lost
            return
        who = (stream, "prompt")
        stream.proxy.watch(info, who, lambda: self._prefill(stream, life, which + 1))
        tokens = stream.prompt + int(stream.written)

        def done() -> None:
            stream.proxy.unwatch(info, who)
            if stream.life == life:
                self._first_token(stream, life)

        node.compute(tokens, done)

    def _first_token(self, stream: Stream, life: int) -> None:
        assert stream.route is not None
        assert stream.attempt is not None
        now = self.events.now
        stream.attempt.prompt_computed()
        if stream.has_turn:
            stream.has_turn = False
            stream.proxy.end_turn()
        was_lost = not math.isnan(stream.lost_s)
        if was_lost:
            self.found.pauses.append(now - stream.lost_s)
            stream.lost_s = math.nan
        if not stream.began_s:
            stream.began_s = now
            if self._measuring and not was_lost:
                self.found.ttft.append((now, now - stream.arrived_s))
        tokens = stream.prompt + int(stream.written)
        size = tokens * self._profile.cache.bytes_per_token
        transfer = self._profile.transfer
        assert transfer is not None
        self.events.after(transfer.seconds(round(size)), lambda: self._decode(stream, life))

    def _decode(self, stream: Stream, life: int) -> None:
        if stream.life != life or stream.route is None:
            return
        node = self._by_id[stream.route.decode.boot_id]
        assert isinstance(node, DecodeModel)
        stream.steps = node.steps_so_far()
        left = max(1, stream.answer - int(stream.written))
        node.answer(stream.prompt + int(stream.written), left, lambda: self._answered(stream, life))

    def _answered(self, stream: Stream, life: int) -> None:
        if stream.life != life:
            return
        assert stream.route is not None
        assert stream.attempt is not None
        stream.attempt.end_everywhere()
        stream.proxy.unwatch(stream.route.decode, stream)
        if self._measuring:
            self.found.answers += 1
            self.found.tokens += stream.answer
            self.found.gaps.append((self.events.now - stream.began_s) / stream.answer)
        self._ask(stream)

    def _again(self, stream: Stream, life: int) -> None:
        """Tries other nodes after some that take no work."""
        if stream.life == life and stream.attempt is not None and stream.route is not None:
            stream.attempt.end_everywhere()
            stream.proxy.unwatch(stream.route.decode, stream)
            self._route(stream)

    def _node_lost(self, stream: Stream, life: int) -> None:
        """The node that writes the answer is lost: the stream goes on elsewhere, when it is its turn."""
        if stream.life != life or stream.route is None or stream.attempt is None:
            return
        node = self._by_id[stream.route.decode.boot_id]
        assert isinstance(node, DecodeModel)
        if stream.began_s:
            stream.written = min(stream.answer - 1.0, stream.written + max(0.0, node.steps_so_far() - stream.steps))
        stream.attempt.end_everywhere()
        self.found.lost += math.isnan(stream.lost_s)
        stream.lost_s = self._lost_at_s
        stream.life += 1

        def resume() -> None:
            stream.has_turn = True
            self._route(stream)

        if stream.has_turn:  # it had one already, and keeps it
            self._route(stream)
        else:
            stream.proxy.take_turn(resume)

    # What nodes do.

    def _beat(self, node: CoarseNode, heartbeat_s: float) -> None:
        if not node.alive:
            return
        heartbeat = node.heartbeat(self._proxy_ids)
        for proxy in self.proxies:
            proxy.hear(heartbeat)
        self.events.after(heartbeat_s, lambda: self._beat(node, heartbeat_s))

    def _lose(self) -> int:
        lost = self.nodes[: round(len(self.nodes) * self._plan.lose)]
        self._lost_at_s = self.events.now
        for node in lost:
            node.die()
        return len(lost)

    # What is looked at.

    def _balance(self, kind: type[CoarseNode]) -> tuple[int, float]:
        """Returns the most requests at one node of a kind, and the mean."""
        busy = [node.running + node.waiting for node in self.nodes if node.alive and isinstance(node, kind)]
        return max(busy, default=0), statistics.fmean(busy) if busy else 0.0

    def _look(self) -> None:
        for kind, peaks in ((DecodeModel, self.found.decode_peaks), (PrefillModel, self.found.prefill_peaks)):
            most, mean = self._balance(kind)
            if mean and self.events.now < self._lost_at_s:
                peaks.append(most / mean)
                if kind is PrefillModel:
                    self.found.prefill_means.append(mean)
            elif kind is DecodeModel:
                self.found.surge = max(self.found.surge, most)
        self.events.after(LOOK_S, self._look)

    def _loss_report(self, lost: int, mean_before: float) -> LossReport:
        found, at_s = self.found, self._lost_at_s
        before = percentile([took for when, took in found.ttft if when < at_s], 0.99)
        pauses = sorted(found.pauses)
        last_s = pauses[-1] if pauses else 0.0
        seconds: dict[int, list[float]] = {}
        for when, took in found.ttft:
            if when >= at_s:
                seconds.setdefault(int(when - at_s), []).append(took)
        worst = {second: _percentile(sorted(times), 0.99) for second, times in seconds.items()}
        late = [second for second, p99 in worst.items() if before is not None and p99 > NORMAL * before]
        normal_s = max(late, default=-1) + 1.0
        most = math.ceil(0.99 * found.lost)
        return LossReport(
            nodes=lost,
            noticed_s=self._noticed_s(),
            streams=found.lost,
            resumed=len(pauses),
            pause_s=shares(pauses),
            most_resumed_s=pauses[most - 1] if 0 < most <= len(pauses) else None,
            last_resumed_s=last_s,
            standing=[found.lost - bisect_right(pauses, second) for second in range(1, math.ceil(last_s) + 1)],
            surge=found.surge / mean_before if mean_before else None,
            ttft_before_s=before,
            ttft_s=shares([took for when, took in found.ttft if at_s <= when <= at_s + last_s]),
            worst_ttft_s=max(worst.values(), default=None),
            normal_after_s=normal_s if normal_s < int(self.events.now - at_s) else None,
        )

    def _noticed_s(self) -> float | None:
        """Returns how long after its last heartbeat a node is dropped, which is when its loss is known."""
        config = RegistryConfig()
        dead = [node.info.boot_id for node in self.nodes if not node.alive]
        left = any(proxy.registry.node(boot_id) is not None for proxy in self.proxies for boot_id in dead)
        return None if left else config.heartbeat_ms * config.missed_heartbeats / 1000

    def _report(self, loss: LossReport | None) -> Report:
        found = self.found
        return Report(
            policy=self._plan.policy.value,
            answers=found.answers,
            tokens_per_s=found.tokens / (self.events.now - self._plan.warm_up_s),
            decode_imbalance=_mean(found.decode_peaks),
            prefill_imbalance=_mean(found.prefill_peaks),
            prefill_mean=_mean(found.prefill_means),
            ttft_s=shares([took for when, took in found.ttft if when < self._lost_at_s]),
            gap_s=shares(found.gaps),
            same_node=found.same / max(1, found.follow_ups),
            loss=loss,
            costs=self._cost_report(),
        )

    def _cost_report(self) -> CostReport:
        proxy, costs = self.proxies[0], self.costs
        decisions_per_s, heartbeat_us = costs.decisions / costs.decisions_s, costs.heartbeats_s / costs.heartbeats * 1e6
        alive = [node for node in self.nodes if node.alive]
        serving, first, snapshot = [], [], []
        for node in alive[:10]:
            proxy.registry.mark_unreachable(node.info.boot_id)
            began = time.thread_time()
            proxy.registry.serving()
            serving.append(time.thread_time() - began)
            began = time.thread_time()
            proxy.choose(b"")[1].end_everywhere()
            first.append(time.thread_time() - began)
            began = time.thread_time()
            proxy.registry.snapshot()
            snapshot.append(time.thread_time() - began)
            proxy.hear(node.heartbeat(self._proxy_ids))  # so that it serves again
        return CostReport(
            decisions_per_s,
            heartbeat_us,
            statistics.median(serving) * 1e3,
            statistics.median(snapshot) * 1e3,
            statistics.median(first) * 1e3,
        )


def percentile(values: Sequence[float], share: float) -> float | None:
    return _percentile(sorted(values), share) if values else None


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def shares(values: Sequence[float]) -> Shares:
    return percentile(values, 0.5), percentile(values, 0.99)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
