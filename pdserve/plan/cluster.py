"""Lives through a load with a simulated cluster: the same arguments give the same answers.

Time passes from event to event: a request comes to its node, a step ends, blocks have moved. Nodes on one machine slow
each other down, and lend each other their cores while they have nothing to compute: a step that began with borrowed
cores goes on with its own when their owner wakes up.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.config import FEW_PROMPTS, NEWEST_SHARE, OVERLAP_FROM_TOKENS, Disaggregation, TargetsConfig, TransferConfig
from pdserve.engine.placement.step_cost import StepParts
from pdserve.errors import PlanError
from pdserve.plan.load import Answer, Bounds, PlannedRequest
from pdserve.plan.node import NodeStep, PendingPrompt, PrefillOrder, SimulatedNode
from pdserve.plan.profile import NodeSpeed, Profile
from pdserve.wire.discovery import Role

_ORDER_TIMEOUT_S = TransferConfig().prefill_timeout_ms / 1e3
"""An order that is not begun so long after its estimated time is withdrawn."""
_LAST = 2**62
"""More than all events."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The nodes of a cluster."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    nodes_per_machine: int = 1
    """So many nodes divide the cores of one machine."""

    @property
    def nodes(self) -> int:
        return self.prefill + self.decode + self.mixed

    def __str__(self) -> str:
        counts = ((self.prefill, Role.PREFILL), (self.decode, Role.DECODE), (self.mixed, Role.MIXED))
        return " + ".join(f"{count} {role}" for count, role in counts if count)

    def roles(self) -> list[Role]:
        """Returns prefill and decode nodes in turns: a machine for two has one of each if there are enough."""
        pairs = min(self.prefill, self.decode)
        rest = [Role.PREFILL] * (self.prefill - pairs) + [Role.DECODE] * (self.decode - pairs)
        return [Role.PREFILL, Role.DECODE] * pairs + rest + [Role.MIXED] * self.mixed


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """So many gaps between tokens of the same length."""

    seconds: float
    count: int
    beside: bool = False
    """Whether others on the machine computed, too."""


@dataclass(slots=True)
class Lived:
    """What a cluster made of a load."""

    answers: list[Answer]
    gaps: list[TokenGaps] = field(default_factory=list)
    busy_s: dict[Role, float] = field(default_factory=dict)
    """The seconds in which nodes of each role computed."""
    preemptions: int = 0
    free_blocks: int = 0
    """The blocks of all nodes that are free at the end."""
    least_free_blocks: int = 0
    """The fewest blocks that any node ever had."""

    @property
    def ended_at(self) -> float:
        return max(answer.last_at for answer in self.answers)


def live(
    profile: Profile,
    shape: ClusterShape,
    load: Sequence[PlannedRequest],
    targets: TargetsConfig | None = None,
    disaggregation: Disaggregation = Disaggregation.AUTO,
) -> Lived:
    """Returns what becomes of each request of ``load``, which is in the order of the times.

    Raises PlanError if the cluster can serve no such request, or if the profile does not know such machines.
    """
    lived = live_within(profile, shape, load, None, targets, disaggregation)
    assert lived is not None
    return lived


def live_within(
    profile: Profile,
    shape: ClusterShape,
    load: Sequence[PlannedRequest],
    bounds: Bounds | None,
    targets: TargetsConfig | None = None,
    disaggregation: Disaggregation = Disaggregation.AUTO,
) -> Lived | None:
    """Returns the same, or None as soon as there is no hope to keep ``bounds``. Raises PlanError."""
    _check(profile, shape, load)
    return _Simulation(profile, shape, targets or TargetsConfig(), disaggregation, bounds).run(load)


def _check(profile: Profile, shape: ClusterShape, load: Sequence[PlannedRequest]) -> None:
    """Raises PlanError if the cluster can serve no such request, or if the profile does not know its nodes."""
    if not load:
        raise PlanError("there is no request to predict anything for")
    if not shape.decode + shape.mixed:
        raise PlanError(f"a cluster of {str(shape) or 'no nodes'} answers nothing; it needs a decode or a mixed node")
    if shape.prefill and profile.transfer is None:
        raise PlanError(
            f"{shape}: the profile says nothing of transfers from prefill nodes; `pdserve plan profile --nodes 2` does"
        )
    most = max(request.prompt_tokens + request.output_tokens for request in load)
    if most > profile.cache.room:
        raise PlanError(
            f"a request of {most} tokens never fits into a KV cache of {profile.cache.room}; "
            "--kv-cache-mib makes it larger"
        )


@dataclass(slots=True, eq=False)
class _Engine:
    """A node that computes: its step under way, and the machine that it shares."""

    node: SimulatedNode
    machine: list[_Engine]
    step: NodeStep | None = None
    began: float = 0.0
    first_s: float = 0.0
    """What the first of the steps takes."""
    growth_s: float = 0.0
    """What each step takes more than the one before."""
    share: float = 0.0
    """How many of the machine's other engines computed when it began, from 0 to 1."""
    ends_at: float = 0.0
    last_from: float = 0.0
    """When the last of the steps begins."""
    version: int = 0
    busy_s: float = 0.0
    prompt_share: float = 0.0
    """The share of the latest requests at whose coming this engine had prompts to compute."""
    inbox: list[Callable[[float], None]] = field(default_factory=list)
    """What has come while a step was under way, and is seen after it."""

    @property
    def others_busy(self) -> float:
        others = len(self.machine) - 1
        return sum(other.step is not None for other in self.machine if other is not self) / others if others else 0.0

    def answers_instead_of(self, decode: _Engine) -> bool:
        """Returns whether a prefill node answers a request itself, by ``answers_itself`` of the proxy.

        Each call counts as the coming of a request.
        """
        has_prompts = bool(self.node.queued_tokens or self.inbox)
        few = self.prompt_share < FEW_PROMPTS
        self.prompt_share += NEWEST_SHARE * (has_prompts - self.prompt_share)
        return (
            self.node.role is Role.PREFILL
            and self.machine is not decode.machine
            and few
            and not has_prompts
            and self.node.requests < decode.node.requests
        )

    def until(self, steps: int) -> float:
        """Returns when so many of the steps are over."""
        return self.began + steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def over_at(self, now: float) -> int:
        """Returns how many of the steps are over."""
        assert self.step is not None
        passed, half = now - self.began, self.growth_s / 2
        if half > 1e-15:
            linear = self.first_s - half
            steps = (math.sqrt(linear * linear + 4 * half * passed) - linear) / (2 * half)
        else:
            steps = passed / self.first_s
        return max(0, min(int(steps), self.step.count - 1))


def step_s(speed: NodeSpeed, share: float, step: NodeStep) -> tuple[float, float]:
    """Returns what a step takes beside that share of the other engines, and what the next one like it takes more."""
    alone, growth = _step_s(speed.steps, step)
    if not share:
        return alone, growth
    beside, growth_beside = _step_s(speed.beside, step)
    return alone + share * (beside - alone), growth + share * (growth_beside - growth)


def _step_s(parts: StepParts, step: NodeStep) -> tuple[float, float]:
    seconds = parts.step_s(step.rows, step.context_tokens, step.prompt_tokens, step.prompt_context)
    return seconds, step.rows * parts.context_token


class _Simulation:
    def __init__(
        self,
        profile: Profile,
        shape: ClusterShape,
        targets: TargetsConfig,
        disaggregation: Disaggregation,
        bounds: Bounds | None,
    ) -> None:
        self._profile = profile
        self._bounds = bounds
        self._engines: list[_Engine] = []
        machine: list[_Engine] = []
        for number, role in enumerate(shape.roles()):
            if number % shape.nodes_per_machine == 0:
                machine = []
            speed = profile.speed(shape.nodes_per_machine)
            node = SimulatedNode(number, role, speed, profile.cache, targets, disaggregation)
            machine.append(_Engine(node, machine))
            self._engines.append(machine[-1])
        self._of = {engine.node: engine for engine in self._engines}
        self._answering = _Turns(engine for engine in self._engines if engine.node.role is not Role.PREFILL)
        self._prefilling = _Turns(engine for engine in self._engines if engine.node.role is not Role.DECODE)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._gaps: list[TokenGaps] = []

    def run(self, load: Sequence[PlannedRequest]) -> Lived | None:
        answers = [Answer.to(request) for request in load]
        coming = iter(answers)
        self._next_request(coming)
        bounds = self._bounds
        if bounds is not None:
            self._after(load[len(load) // 2].at_s, lambda _: bounds.middle(answers))
            self._after(load[-1].at_s, lambda _: bounds.last(answers))
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
            if bounds is not None:
                bounds.passed(now, answers)
                if bounds.hopeless:
                    return None
        busy: dict[Role, float] = {}
        for engine in self._engines:
            busy[engine.node.role] = busy.get(engine.node.role, 0.0) + engine.busy_s
        preemptions = sum(engine.node.preemptions for engine in self._engines)
        if lost := sum(not answer.done for answer in answers):
            raise PlanError(f"{lost} of {len(answers)} requests never end in the simulation: a fault of pdserve plan")
        nodes = [engine.node for engine in self._engines]
        free, least = sum(node.free_blocks for node in nodes), min(node.least_free_blocks for node in nodes)
        return Lived(answers, self._gaps, busy, preemptions, free, least)

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _after(self, time: float, event: Callable[[float], None]) -> None:
        """Has an event come behind all others of the same time."""
        heapq.heappush(self._events, (time, _LAST + next(self._order), event))

    # ------------------------------------------------------------ requests

    def _next_request(self, coming: Iterator[Answer]) -> None:
        answer = next(coming, None)
        if answer is None:
            return

        def come(now: float) -> None:
            self._next_request(coming)
            engine = self._answering.next()
            assert engine is not None
            other = self._prefilling.next(but=engine) if self._profile.transfer is not None else None
            if other is not None and other.answers_instead_of(engine):
                engine, other = other, None
            target = None if other is None else other.node.as_target
            prompt = PendingPrompt(answer, answer.request.prompt_tokens, now, target)
            self._tell(engine, now, lambda _: engine.node.wait(prompt))

        self._at(answer.request.at_s + self._profile.front.seconds(answer.request.prompt_tokens), come)

    def _tell(self, engine: _Engine, now: float, news: Callable[[float], None]) -> None:
        """Gives an engine news, which it sees when the step under way is over."""
        if engine.step is None:
            news(now)
            self._begin(engine, now)
            return
        engine.inbox.append(news)
        self._cut(engine, now)

    # ------------------------------------------------------------ steps

    def _begin(self, engine: _Engine, now: float) -> None:
        """Begins the next step of an engine that has none under way, if there is one."""
        step = engine.node.plan(now)
        for order in engine.node.orders:
            self._send_order(order, now)
        if step is None:
            return
        engine.step, engine.began, engine.share = step, now, engine.others_busy
        engine.first_s, engine.growth_s = step_s(engine.node.speed, engine.share, step)
        self._end_at(engine, engine.until(step.count), engine.until(step.count - 1))
        for other in engine.machine:
            if other is not engine and other.step is not None:
                self._slow(other, now)

    def _end_at(self, engine: _Engine, time: float, last_from: float) -> None:
        engine.version += 1
        version, engine.ends_at, engine.last_from = engine.version, time, last_from

        def end(now: float) -> None:
            if engine.version == version:
                self._end(engine, now)

        self._at(time, end)

    def _cut(self, engine: _Engine, now: float) -> None:
        """Has a row of alike steps end with the one under way."""
        step = engine.step
        assert step is not None
        if step.count == 1:
            return
        over = engine.over_at(now)
        if over + 1 < step.count:
            engine.node.give_back(step, over + 1)
            self._end_at(engine, engine.until(over + 1), engine.until(over))

    def _slow(self, engine: _Engine, now: float) -> None:
        """Has an engine's step go on without the cores whose owner has just woken up."""
        self._cut(engine, now)
        step, share = engine.step, engine.others_busy
        assert step is not None
        if share <= engine.share or now >= engine.ends_at:
            return
        before, _ = step_s(engine.node.speed, engine.share, step)
        after, _ = step_s(engine.node.speed, share, step)
        engine.share = share
        self._end_at(engine, now + (engine.ends_at - now) * after / before, engine.last_from)

    def _end(self, engine: _Engine, now: float) -> None:
        step, node = engine.step, engine.node
        assert step is not None
        engine.step = None
        engine.busy_s += now - engine.began
        node.learn(step, now - engine.began, engine.share > 0, now)
        if step.rows:
            self._give_tokens(engine, step, now)
        for prompt, tokens in step.chunks:
            prompt.done += tokens
            node.queued_tokens -= tokens
            if not prompt.left:
                node.computing.remove(prompt)
                self._computed(engine, prompt, now)
        inbox, engine.inbox = engine.inbox, []
        for news in inbox:
            news(now)
        self._begin(engine, now)

    def _give_tokens(self, engine: _Engine, step: NodeStep, now: float) -> None:
        decoding = engine.node.decoding
        new = decoding.take_new()
        for member in new:
            assert member.since is not None
            self._note_gaps(engine, engine.until(1) - member.since if step.count > 1 else now - member.since, 1)
        if step.rows > len(new):
            self._note_gaps(engine, now - engine.last_from, step.rows - len(new))
        if step.count > 1:
            between = step.count - 1
            self._note_gaps(engine, (engine.last_from - engine.began) / between, step.rows * between)
        for member in decoding.advance(step.count):
            member.answer.end(now)
            engine.node.free_blocks += engine.node.cache.blocks(decoding.context_of(member) - 1)

    def _note_gaps(self, engine: _Engine, seconds: float, count: int) -> None:
        beside = engine.share > 0
        self._gaps.append(TokenGaps(seconds, count, beside))
        if self._bounds is not None:
            self._bounds.gap(seconds, count, beside)

    # ------------------------------------------------------------ prompts

    def _computed(self, engine: _Engine, prompt: PendingPrompt, now: float) -> None:
        node, answer = engine.node, prompt.answer
        if prompt.order is not None:
            self._push(engine, prompt, prompt.order, now)
            return
        if prompt.since is None:
            answer.first_at = now
        else:
            # The last chunk of what is computed again gives the next token.
            answer.tokens_left -= 1
            self._note_gaps(engine, now - prompt.since, 1)
        if answer.tokens_left:
            node.decoding.join(answer, prompt.tokens, None)
        else:
            answer.end(now)
            node.free_blocks += node.cache.blocks(prompt.tokens)

    def _send_order(self, order: PrefillOrder, now: float) -> None:
        here, there = self._of[order.by], self._of[order.to]
        prompt = PendingPrompt(order.prompt.answer, order.prompt.tokens, now, order=order)

        def come(time: float) -> None:
            self._tell(there, time, lambda _: order.to.wait(prompt))

        def time_out(time: float) -> None:
            if order.to.withdraw(prompt):
                self._tell(here, time, lambda seen: order.by.give_up(order, seen))

        self._at(now, come)
        self._at(now + _ORDER_TIMEOUT_S + order.needed_s, time_out)

    def _push(self, engine: _Engine, prompt: PendingPrompt, order: PrefillOrder, now: float) -> None:
        """Sends the first token, and then the blocks that have not moved yet, to the node that has ordered them."""
        node, answer = engine.node, prompt.answer
        there, transfer, load = self._of[order.by], self._profile.transfer, node.load
        assert transfer is not None
        node.pushing += 1
        tokens = prompt.tokens
        if tokens >= OVERLAP_FROM_TOKENS:
            tokens = min(tokens, node.cache.max_num_batched_tokens)
        size = node.cache.moved_bytes(tokens)
        first_at = now + transfer.fixed_s
        landed_at = first_at + size * transfer.byte_s

        def first_token(seen: float) -> None:
            answer.first_at = answer.last_at = seen
            order.known.answered(answer, 0, load, seen)

        def landed(seen: float) -> None:
            there.node.remote -= 1
            order.known.landed(size, landed_at - first_at)
            if answer.tokens_left:
                there.node.landed.append(answer)
            else:
                answer.done = True
                there.node.free_blocks += there.node.cache.blocks(prompt.tokens)

        def free(_: float) -> None:
            node.pushing -= 1
            node.free_blocks += node.cache.blocks(prompt.tokens)

        self._at(first_at, lambda time: self._tell(there, time, first_token))
        self._at(landed_at, lambda time: self._tell(there, time, landed))
        self._at(landed_at, lambda time: self._tell(engine, time, free))


class _Turns:
    """Gives engines in turn, as the proxy does by default."""

    def __init__(self, engines: Iterator[_Engine]) -> None:
        self._engines = list(engines)
        self._turn = itertools.count()

    def next(self, but: _Engine | None = None) -> _Engine | None:
        """Returns the engine whose turn it is, or the one after it instead of ``but``; None if there is none."""
        for _ in self._engines:
            engine = self._engines[next(self._turn) % len(self._engines)]
            if engine is not but:
                return engine
        return None
