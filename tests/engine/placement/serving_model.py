"""A prefill node and decode nodes in virtual time, each with a core: real schedulers and placements, modelled steps.

News of the prefill node come late, with each answer and at intervals besides, as heartbeats bring them.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdserve.config import Disaggregation, SchedulerConfig, Speculate
from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.prompt_fetcher import PromptFetcher
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.placement_rule import PlacementDecision, PromptSize
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.output_collector import OutputCollector
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.wire.discovery import Role
from pdserve.wire.engine import PrefillReason, PrefillSource
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken, SamplingParams
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import PrefillLoad
from pdserve_kvtransfer.events import FetchEvent, FetchLanded, FetchOrder, FirstTokenArrived, LoadHeard
from tests.engine.placements import make_placement
from tests.terms import made_terms

BLOCK_SIZE = 16
CHUNK = 256


@dataclass(frozen=True)
class Speed:
    """What a step takes on one core, as measured with a model of 135 million weights."""

    step_s: float = 0.031
    row_s: float = 0.0011
    token_s: float = 0.0037

    def seconds(self, rows: int, prompt_tokens: int) -> float:
        return (self.step_s + self.row_s * rows if rows else 0.0) + self.token_s * prompt_tokens


SPEED = Speed()


@dataclass(frozen=True)
class News:
    """How late decode nodes hear of the prefill node, and how often."""

    delay_s: float
    each_s: float


FRESH = News(delay_s=0.005, each_s=0.5)


@dataclass(frozen=True)
class Workload:
    """Clients that each send the next request when the last one is answered."""

    clients: int
    prompt: int = 256
    output: int = 64
    spread: float = 0.5
    """Prompts and answers are longer or shorter than these by up to this share."""

    def drawn(self, length: int, chance: random.Random) -> int:
        return round(length * chance.uniform(1 - self.spread, 1 + self.spread))


class Clock:
    """Runs what is to happen, in the order of its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), happen))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        self.now = until


class PrefillServer:
    """Computes the orders of decode nodes in turn, a chunk a step."""

    def __init__(self, clock: Clock, speed: Speed, delay_s: float) -> None:
        self.target = PrefillTarget("p0", "tcp://127.0.0.1:1", new_id())
        self.busy_s = 0.0
        self._clock, self._speed, self._delay_s = clock, speed, delay_s
        self._queue: deque[tuple[DecodeServer, FetchOrder]] = deque()
        self._left = 0
        self._waiting_tokens = 0

    @property
    def load(self) -> PrefillLoad:
        return PrefillLoad(self._left + self._waiting_tokens, 1 / self._speed.token_s)

    def order(self, node: DecodeServer, order: FetchOrder) -> None:
        self._queue.append((node, order))
        self._waiting_tokens += len(order.token_ids)
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        self._left = len(self._queue[0][1].token_ids)
        self._waiting_tokens -= self._left
        self._step()

    def _step(self) -> None:
        tokens = min(CHUNK, self._left)
        seconds = self._speed.seconds(0, tokens)
        self.busy_s += seconds

        def computed() -> None:
            self._left -= tokens
            if self._left:
                self._step()
                return
            node, order = self._queue.popleft()
            if self._queue:
                self._begin()
            token = FirstTokenArrived(order.transfer_id, (SampledToken(7),), 0, self.load)
            landed = FetchLanded(order.transfer_id, 0.0, 10**6, 0.001, 10**6)
            self._clock.after(self._delay_s, lambda: node.hear(token, landed))

        self._clock.after(seconds, computed)

    def tell_load(self, nodes: list[DecodeServer], each_s: float) -> None:
        heard = LoadHeard(self.target.boot_id, self.load)
        for node in nodes:
            self._clock.after(self._delay_s, lambda node=node: node.hear(heard))  # type: ignore[misc]
        self._clock.after(each_s, lambda: self.tell_load(nodes, each_s))


class FixedShare(Placement):
    """Gives each prompt in turn to the prefill node or to this one, so that this node computes a fixed share."""

    share = 0.0
    _credit = 0.0
    _chosen: PlacementDecision | None = None

    def decide(self, prompt: PromptSize, target: PrefillTarget, now: float) -> PlacementDecision:
        if self._chosen is None:
            self._credit += self.share
            source = PrefillSource.LOCAL if self._credit >= 1 - 1e-9 else PrefillSource.REMOTE
            self._credit -= source is PrefillSource.LOCAL
            self._chosen = PlacementDecision(source, PrefillReason.SETTING)
        return self._chosen

    def count(self, decision: PlacementDecision) -> None:
        super().count(decision)
        self._chosen = None


@dataclass
class Answer:
    """What a client has noticed of one answer."""

    asked: float
    tokens: list[float] = field(default_factory=list)


class DecodeServer:
    """A decode node with a real scheduler, placement and connector, and a modelled model."""

    def __init__(self, number: int, clock: Clock, speed: Speed, prefill: PrefillServer, placement: Placement) -> None:
        self.placement = placement
        self.answers: list[Answer] = []
        self.busy_s = 0.0
        self._clock, self._speed, self._prefill = clock, speed, prefill
        blocks = BlockManager(8192, BLOCK_SIZE, prefix_cache=False)
        thread: Any = self
        self._connector = PromptFetcher(blocks, thread, 30.0, new_id(), placement)
        config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=CHUNK, speculation=Speculate.OFF)
        self._collector = OutputCollector()
        stop = StopRule(frozenset({2}), 4096)
        self._scheduler = Scheduler(blocks, config, stop, self._collector, self._connector.release, placement)
        self._stepping = False
        self._numbers = itertools.count(1)
        self._chance = random.Random(number)
        self._open: dict[int, tuple[Answer, Workload]] = {}

    def ask(self, work: Workload) -> None:
        number = next(self._numbers)
        answer = Answer(self._clock.now)
        self.answers.append(answer)
        self._open[number] = answer, work
        prompt = work.drawn(work.prompt, self._chance)
        request = Request(
            uuid=new_id(),
            token_ids=[7] * prompt,
            num_prompt_tokens=prompt,
            sampling=SamplingParams(max_tokens=work.drawn(work.output, self._chance), seed=1),
            arrived=self._clock.now,
            terms=made_terms(1e9, prefill=(self._prefill.target,)),
            local_id=number,
        )
        self._scheduler.add(request)
        self._turn()

    def fetch(self, order: FetchOrder) -> None:
        """Sends an order, as a transfer thread would."""
        self._prefill.order(self, order)

    def cancel_fetch(self, transfer: TransferId) -> None:
        raise AssertionError("nobody gives up here")

    def hear(self, *events: FetchEvent) -> None:
        for event in events:
            self._connector.on_event(self._scheduler, event, self._clock.now)
        self._collect()
        self._turn()

    def _turn(self) -> None:
        if self._stepping:
            return
        now = self._clock.now
        plan = self._scheduler.schedule(now)
        self._connector.start(plan, now)
        if not plan.work:
            return
        seconds = self._speed.seconds(plan.num_decoding, plan.num_prompt_tokens)
        self.busy_s += seconds
        self._stepping = True
        self._clock.after(seconds, lambda: self._computed(plan, seconds))

    def _computed(self, plan: BatchPlan, seconds: float) -> None:
        self._stepping = False
        now = self._clock.now
        self.placement.step_cost.observe(
            plan.num_decoding,
            plan.context_tokens,
            plan.num_prompt_tokens,
            seconds,
            prompt_context=plan.prompt_context,
            now=now,
        )
        sampled = [SampledToken(7) for _ in plan.sampled_requests]
        assert self._scheduler.postprocess(plan, sampled, now) == []
        self._collect()
        self._turn()

    def _collect(self) -> None:
        step = self._collector.take()
        for output in step.outputs if step else []:
            answer, work = self._open[output.local_id]
            answer.tokens += [self._clock.now] * len(output.new_token_ids)
            if output.finish is not None:
                del self._open[output.local_id]
                self._clock.after(0.0, lambda work=work: self.ask(work))  # type: ignore[misc]


@dataclass(frozen=True)
class Outcome:
    """What a run has measured after its first part, in which the nodes fill."""

    tokens_per_s: float
    ttft_s: float
    """The median."""
    itl_s: float
    """The gap that one in a hundred exceeds."""
    prefill_busy: float
    local_share: float
    windows: list[float]
    """The output tokens a second in each of ten parts of the time."""


def serve(
    work: Workload,
    *,
    nodes: int = 1,
    share: float | None = None,
    news: News = FRESH,
    seconds: float = 120.0,
    prefill_speed: Speed = SPEED,
    target_itl_ms: float = 0.0,
) -> Outcome:
    """Lets clients of ``nodes`` decode nodes ask for ``seconds``. If ``share`` is given, so many prompts are local."""
    clock = Clock()
    prefill = PrefillServer(clock, prefill_speed, news.delay_s)
    servers = []
    for number in range(nodes):
        kind = Placement if share is None else FixedShare
        placement = make_placement(
            BLOCK_SIZE,
            Disaggregation.AUTO,
            max_num_batched_tokens=CHUNK,
            role=Role.DECODE,
            kind=kind,
            target_itl_ms=target_itl_ms,
        )
        if isinstance(placement, FixedShare) and share is not None:
            placement.share = share
        servers.append(DecodeServer(number, clock, SPEED, prefill, placement))
    for number in range(work.clients):
        server = servers[number % nodes]
        clock.after(0.37 * number, lambda server=server: server.ask(work))  # type: ignore[misc]
    prefill.tell_load(servers, news.each_s)
    warm = seconds / 4
    clock.run(warm)
    busy = prefill.busy_s
    clock.run(seconds)
    answers = [answer for server in servers for answer in server.answers]
    times = sorted(at for answer in answers for at in answer.tokens if at >= warm)
    gaps = sorted(
        after - before for answer in answers for before, after in itertools.pairwise(answer.tokens) if before >= warm
    )
    firsts = [answer.tokens[0] - answer.asked for answer in answers if answer.tokens and answer.tokens[0] >= warm]
    part = (seconds - warm) / 10
    windows = [sum(warm + i * part <= at < warm + (i + 1) * part for at in times) / part for i in range(10)]
    decisions = [made for server in servers for made in server.placement.stats(clock.now).decisions]
    local = sum(made.count for made in decisions if made.source is PrefillSource.LOCAL)
    return Outcome(
        tokens_per_s=len(times) / (seconds - warm),
        ttft_s=statistics.median(firsts),
        itl_s=gaps[int(0.99 * len(gaps))],
        prefill_busy=(prefill.busy_s - busy) / (seconds - warm),
        local_share=local / max(1, sum(made.count for made in decisions)),
        windows=windows,
    )
