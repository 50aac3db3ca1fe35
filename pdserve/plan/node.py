"""One node of a simulated cluster: which requests each of its steps computes, by the engine's own rules.

What a step costs comes from the profile. How prompts are cut into chunks beside requests that decode, and where they
are computed, is asked of the parts that an engine itself asks: ``StepBudget``, ``LatencyTargets`` and ``Placement``."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field

from pdserve.config import Disaggregation, SchedulerConfig, TargetsConfig, TransferConfig
from pdserve.engine.placement.latency_targets import NONE_OWN, LatencyTargets
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.placement_rule import PlacementDecision, PromptSize
from pdserve.engine.placement.prefill_node import PrefillNode
from pdserve.engine.placement.step_cost import StepCost, StepParts
from pdserve.engine.scheduling.batch_admission import LEAST_KEPT, MAX_TRIED, Ahead
from pdserve.engine.scheduling.batch_plan import chunk_tokens
from pdserve.engine.scheduling.step_budget import StepBudget
from pdserve.plan.load import Answer
from pdserve.plan.profile import CacheGeometry, NodeSpeed
from pdserve.wire.discovery import Role
from pdserve.wire.ids import BootId
from pdserve.wire.terms import NO_OWN_TARGETS, PrefillTarget
from pdserve.wire.transfer import PrefillLoad


@dataclass(slots=True, eq=False)
class DecodingAnswer:
    """A request that decodes."""

    answer: Answer
    context: int
    """The tokens that its first step reads."""
    first_tick: int
    """The number of steps that were over when it came."""
    last_tick: int
    since: float | None
    """When its last token came; None if that was at the end of the last step."""
    gone: bool = False


@dataclass(slots=True)
class Decoding:
    """All members. Each step gives each of them a token, so a clock of steps, the *tick*, stands for all of them."""

    block_size: int
    rows: int = 0
    context_tokens: int = 0
    """The tokens that the next step reads."""
    tick: int = 0
    _ends: list[tuple[int, int, DecodingAnswer]] = field(default_factory=list)
    _joined: int = 0
    _new: list[DecodingAnswer] = field(default_factory=list)
    _growing: list[int] = field(default_factory=list)
    """How many members need a block at each tick, by the tick's remainder."""

    def __post_init__(self) -> None:
        self._growing = [0] * self.block_size

    def join(self, answer: Answer, tokens: int, since: float | None) -> None:
        """Adds an answer whose ``tokens`` are in the cache, without the last one of those that its client has."""
        member = DecodingAnswer(answer, tokens + 1, self.tick, self.tick + answer.tokens_left, since)
        self._joined += 1
        heapq.heappush(self._ends, (member.last_tick, self._joined, member))
        self.rows += 1
        self.context_tokens += member.context
        self._growing[self._remainder(member)] += 1
        if since is not None:
            self._new.append(member)

    @property
    def steps_to_end(self) -> int:
        """The number of steps until the first member ends. There has to be one."""
        while self._ends[0][2].gone:
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.tick

    def blocks_for(self, steps: int) -> int:
        """Returns how many blocks all members together need for so many more steps."""
        cycles, rest = divmod(steps, self.block_size)
        return cycles * self.rows + sum(self._growing[-(self.tick + step) % self.block_size] for step in range(rest))

    def take_new(self) -> list[DecodingAnswer]:
        """Returns the members whose next gap began before the last step ended, once."""
        new, self._new = [member for member in self._new if not member.gone], []
        return new

    def advance(self, steps: int) -> list[DecodingAnswer]:
        """Gives each member so many tokens, at most ``steps_to_end``. Returns those that have ended."""
        self.tick += steps
        self.context_tokens += steps * self.rows
        ended = []
        while self._ends and (self._ends[0][2].gone or self._ends[0][0] <= self.tick):
            member = heapq.heappop(self._ends)[2]
            if not member.gone:
                self._leave(member)
                ended.append(member)
        return ended

    def evict(self) -> DecodingAnswer:
        """Takes the youngest member out. There has to be one."""
        _, _, member = max((entry for entry in self._ends if not entry[2].gone), key=lambda entry: entry[1])
        member.gone = True
        member.answer.tokens_left = member.last_tick - self.tick
        self._leave(member)
        return member

    def context_of(self, member: DecodingAnswer) -> int:
        """Returns the tokens that the member's next step reads."""
        return member.context + self.tick - member.first_tick

    def _leave(self, member: DecodingAnswer) -> None:
        self.rows -= 1
        self.context_tokens -= self.context_of(member)
        self._growing[self._remainder(member)] -= 1

    def _remainder(self, member: DecodingAnswer) -> int:
        return (member.context - 1 - member.first_tick) % self.block_size


_MOST_LEARNT = 32
"""More steps that are alike tell an engine nothing new."""


@dataclass(slots=True, eq=False)
class PendingPrompt:
    """The tokens of one answer that are to be computed before it can go on."""

    answer: Answer
    tokens: int
    arrived: float
    target: PrefillNodeAt | None = None
    """The prefill node that the proxy has chosen; None if there is none, or the client has a token already."""
    order: PrefillOrder | None = None
    """What another node has ordered, if that has the answer."""
    done: int = 0
    since: float | None = None
    """When the client got a token last, if it has one."""
    has_blocks: bool = False
    """Whether its blocks were taken for an order that has come to nothing."""

    @property
    def left(self) -> int:
        return self.tokens - self.done


@dataclass(frozen=True, slots=True)
class PrefillNodeAt:
    """A prefill node and the name under which decode nodes know it."""

    node: SimulatedNode
    target: PrefillTarget


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """A prompt that a prefill node is to compute."""

    prompt: PendingPrompt
    by: SimulatedNode
    to: SimulatedNode
    known: PrefillNode
    """What the node that orders knows of the other one."""
    needed_s: float
    """The time that it is estimated to take."""


@dataclass(slots=True)
class NodeStep:
    """What a node computes next: one step, or several that are alike but for growing contexts."""

    rows: int
    context_tokens: int
    chunks: list[tuple[PendingPrompt, int]] = field(default_factory=list)
    count: int = 1

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)

    @property
    def prompt_context(self) -> float:
        tokens = self.prompt_tokens
        return sum(prompt.done * tokens for prompt, tokens in self.chunks) / tokens if tokens else 0.0


@functools.lru_cache(maxsize=4)
def _learnt_before(speed: NodeSpeed, longest: int) -> StepCost:
    """Returns the estimates of a node that has computed steps of all sizes before, with chunks of up to ``longest``.

    Where its neighbours matter, they were busy as often as idle.
    """
    cost = StepCost.of(StepParts.mean([speed.steps, speed.beside]), longest, speed.mean_spread)
    if speed.steps == speed.beside:
        return cost
    for rows, context, prompt_tokens in itertools.product((0, 1, 4, 16), (64, 512), (0, min(32, longest), longest)):
        for borrowing, parts in ((True, speed.steps), (False, speed.beside)):
            cost.borrowing = borrowing
            cost.observe(rows, rows * context, prompt_tokens, parts.step_s(rows, rows * context, prompt_tokens))
    return cost


class SimulatedNode:
    """The scheduler of one node, without tokens or tensors. Its caller has the clock and runs the steps."""

    def __init__(
        self,
        number: int,
        role: Role,
        speed: NodeSpeed,
        cache: CacheGeometry,
        targets: TargetsConfig,
        disaggregation: Disaggregation,
    ) -> None:
        self.role, self.speed, self.cache = role, speed, cache
        self.waiting: deque[PendingPrompt] = deque()
        self.computing: list[PendingPrompt] = []
        self.landed: deque[Answer] = deque()
        """The answers whose prompts have come from a prefill node, and that have no place yet."""
        self.pushing = 0
        """The prompts that this node has computed for others and whose blocks are on their way."""
        self.remote = 0
        """The prompts that other nodes compute for this one."""
        self.orders: list[PrefillOrder] = []
        """The orders that leave with the step that was planned last."""
        self.queued_tokens = 0
        """The tokens of prompts that are to be computed here."""
        self.preemptions = 0
        self.decoding = Decoding(cache.block_size)
        self.free_blocks = self.least_free_blocks = cache.num_blocks
        scheduler = SchedulerConfig(
            max_num_seqs=cache.max_num_seqs, max_num_batched_tokens=cache.max_num_batched_tokens
        )
        self.cost = _learnt_before(speed, cache.max_num_batched_tokens).copy()
        self._learns = speed.steps != speed.beside
        self._source = random.Random(number)  # noqa: S311  # it must be repeatable, not secret
        self.targets = LatencyTargets(targets, self.cost, role)
        self.placement = Placement(
            self.cost,
            TransferConfig(disaggregation=disaggregation),
            scheduler,
            cache.block_size,
            cache.bytes_per_token,
            self.targets,
            cache.prompt_bytes,
        )
        boot_id = BootId(number.to_bytes(16, "big"))
        self.as_target = PrefillNodeAt(self, PrefillTarget(f"{role.value}-{number}", "", boot_id))

    def learn(self, step: NodeStep, seconds: float, beside: bool, now: float) -> None:
        """Learns what steps take from some that took ``seconds`` together, as an engine does from each.

        A node that has its machine for itself knows it: its steps take what the profile says.
        """
        if not self._learns:
            return
        self.cost.borrowing = not beside
        mean_s, spread = seconds / step.count, self.speed.spread_of(beside)
        context = step.context_tokens + step.rows * (step.count - 1) // 2
        for _ in range(min(step.count, _MOST_LEARNT)):
            took_s = mean_s * self._source.choice(spread)
            self.cost.observe(
                step.rows, context, step.prompt_tokens, took_s, prompt_context=step.prompt_context, now=now
            )

    @property
    def running(self) -> int:
        return len(self.computing) + self.decoding.rows

    @property
    def requests(self) -> int:
        """The requests that this node has, also those whose prompts others compute."""
        return self.running + len(self.waiting) + self.remote + len(self.landed)

    @property
    def load(self) -> PrefillLoad:
        """The load as a prefill node tells it."""
        return PrefillLoad(self.queued_tokens, self.cost.tokens_per_s, self.decoding.rows)

    def wait(self, prompt: PendingPrompt) -> None:
        """Puts a prompt where it belongs by its time: behind those that came before it."""
        self.queued_tokens += prompt.left
        if not self.waiting or self.waiting[-1].arrived <= prompt.arrived:
            self.waiting.append(prompt)
            return
        later = next(i for i, other in enumerate(self.waiting) if other.arrived > prompt.arrived)
        self.waiting.insert(later, prompt)

    def withdraw(self, prompt: PendingPrompt) -> bool:
        """Forgets a prompt that waits. Returns False if it waits no more."""
        if prompt not in self.waiting:
            return False
        self.waiting.remove(prompt)
        self.queued_tokens -= prompt.left
        return True

    def give_up(self, order: PrefillOrder, now: float) -> None:
        """Computes a prompt here whose order has not been begun in time: its blocks are here already."""
        self.remote -= 1
        order.known.timed_out(order.prompt.answer, now)
        # It goes before prompts for which there may be no blocks until it has ended.
        order.prompt.target, order.prompt.has_blocks, order.prompt.arrived = None, True, -math.inf
        self.wait(order.prompt)

    def plan(self, now: float) -> NodeStep | None:
        """Returns the next step; None if there is nothing to compute. ``orders`` leave with it."""
        self.orders = []
        self._join_landed()
        self._make_room(now)
        while self.landed and not self.running:
            self._join_landed()
            self._make_room(now)
        budget = StepBudget(self.cache.max_num_batched_tokens, self.cost, self.targets)
        if self.decoding.rows:
            budget.spend_rows(self.decoding.rows, self.decoding.context_tokens)
            budget.decode_for(NO_OWN_TARGETS)
        chunks: list[tuple[PendingPrompt, int]] = []
        computing = list(self.computing)
        if computing:
            self._admit_short(now, budget, chunks)
        for prompt in computing:
            self._chunk(prompt, budget, chunks)
        if self.waiting:
            self._admit(now, budget, chunks)
        step = NodeStep(self.decoding.rows, self.decoding.context_tokens, chunks)
        if step.rows:
            self.free_blocks -= self.decoding.blocks_for(1)
        elif not chunks:
            return None
        if not self.computing and not self.landed and (not self.waiting or not self._has_place):
            step.count = self._steps_alike()
        self.least_free_blocks = min(self.least_free_blocks, self.free_blocks)
        return step

    def _steps_alike(self) -> int:
        """Returns how many steps are alike from now on, if nothing comes, and takes the blocks for them."""
        count = self.decoding.steps_to_end
        first = self.decoding.blocks_for(1)
        while count > 1 and self.decoding.blocks_for(count) - first > self.free_blocks:
            count //= 2
        self.free_blocks -= self.decoding.blocks_for(count) - first
        return count

    def give_back(self, step: NodeStep, steps: int) -> None:
        """Takes the blocks back for which a ``step`` that is cut after so many ``steps`` has no use."""
        self.free_blocks += self.decoding.blocks_for(step.count) - self.decoding.blocks_for(steps)
        step.count = steps

    @property
    def _has_place(self) -> bool:
        return self.running < self.cache.max_num_seqs

    def _chunk(self, prompt: PendingPrompt, budget: StepBudget, chunks: list[tuple[PendingPrompt, int]]) -> None:
        allowed = budget.for_prompt(prompt.done)
        if allowed > 0:
            tokens = chunk_tokens(prompt.left, allowed)
            budget.spend_chunk(tokens, prompt.done)
            chunks.append((prompt, tokens))

    def _join_landed(self) -> None:
        """Has answers decode for which there are places and blocks, and one in any case if nothing else runs."""
        while self.landed and self._has_place:
            if self.running and self.decoding.blocks_for(1) >= self.free_blocks:
                return
            answer = self.landed.popleft()
            self.decoding.join(answer, answer.request.prompt_tokens, answer.first_at)

    def _admit_short(self, now: float, budget: StepBudget, chunks: list[tuple[PendingPrompt, int]]) -> None:
        """Does what ``BatchAdmission.admit_short`` does. Each prompt is a client request of its own."""
        kept = (budget.for_prompt() + 1) // 2
        if kept < LEAST_KEPT:
            return
        ahead = self._ahead(0)
        for prompt in list(itertools.islice(self.waiting, MAX_TRIED)):
            if not self._has_place or budget.for_prompt() <= kept:
                return
            if not prompt.has_blocks and not self._has_room(prompt):
                return
            if prompt.left > budget.for_prompt(prompt.done) - kept:
                continue
            decision = None if prompt.target is None else self._place(prompt, prompt.target, ahead, now)
            if decision is not None and (decision.remote or decision.waits):
                continue
            self.waiting.remove(prompt)
            if not prompt.has_blocks:
                self.free_blocks -= self.cache.blocks(prompt.tokens)
            self.computing.append(prompt)
            self._chunk(prompt, budget, chunks)

    def _admit(self, now: float, budget: StepBudget, chunks: list[tuple[PendingPrompt, int]]) -> None:
        ahead = self._ahead(sum(prompt.left for prompt in self.computing))
        passed: list[PendingPrompt] = []
        while self.waiting and self._has_place and len(passed) < MAX_TRIED:
            prompt = self.waiting.popleft()
            no_budget = budget.for_prompt() <= 0
            if no_budget and prompt.target is None:
                passed.append(prompt)
                continue
            target = prompt.target
            decision = None if target is None else self._place(prompt, target, ahead, now)
            remote = decision is not None and decision.remote
            waits = decision is not None and decision.waits
            if waits or (remote and self._free_fetches <= 0) or (no_budget and not remote):
                passed.append(prompt)
                continue
            if not prompt.has_blocks:
                if not self._has_room(prompt):
                    passed.append(prompt)
                    break
                self.free_blocks -= self.cache.blocks(prompt.tokens)
            if remote and target is not None:
                self.queued_tokens -= prompt.left
                self._order(prompt, target, now)
                continue
            if decision is None:
                ahead.queued += prompt.left
            self.computing.append(prompt)
            self._chunk(prompt, budget, chunks)
        self.waiting.extendleft(reversed(passed))

    def _ahead(self, queued: int) -> Ahead:
        return Ahead(queued, self.decoding.rows, self.decoding.context_tokens, NONE_OWN)

    def _place(self, prompt: PendingPrompt, to: PrefillNodeAt, ahead: Ahead, now: float) -> PlacementDecision:
        boot_id = to.target.boot_id
        size = PromptSize(
            prompt.left,
            0,
            ahead.queued,
            self.running + self.remote,
            rows=ahead.rows,
            context_tokens=ahead.context_tokens,
            leaving_tokens=ahead.leaving[boot_id],
            waited_s=now - prompt.arrived,
            may_wait=bool(self.running),
        )
        return ahead.noted(self.placement.decide(size, to.target, now), size, boot_id)

    def _order(self, prompt: PendingPrompt, to: PrefillNodeAt, now: float) -> None:
        needed_s = self.placement.needed_s(to.target, prompt.left, 0, now)
        known = self.placement.ordered(to.target, prompt.answer, prompt.left, 0, now)
        self.remote += 1
        self.orders.append(PrefillOrder(prompt, self, to.node, known, needed_s))

    @property
    def _free_fetches(self) -> int:
        return self.cache.max_num_seqs - self.remote - len(self.landed)

    def _has_room(self, prompt: PendingPrompt) -> bool:
        """Whether a prompt fits, and each running request can still grow by a block."""
        missing = self.cache.blocks(prompt.tokens)
        if self.free_blocks >= missing + self.running:
            return True
        return not self.running and not self.remote and not self.pushing and self.free_blocks >= missing

    def _make_room(self, now: float) -> None:
        """Preempts the youngest answers while the next step needs more blocks than are free."""
        while self.decoding.rows and self.decoding.blocks_for(1) > self.free_blocks:
            member = self.decoding.evict()
            tokens = self.decoding.context_of(member)
            self.free_blocks += self.cache.blocks(tokens - 1)
            self.preemptions += 1
            since = now if member.since is None or member.first_tick < self.decoding.tick else member.since
            self.wait(PendingPrompt(member.answer, tokens, member.answer.request.at_s, since=since))
