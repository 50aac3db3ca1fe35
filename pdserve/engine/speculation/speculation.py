"""Decides which tokens a decode step drafts, and how many.

A draft is a further row of its step: it takes the time of a row, and gives a token if it and all drafts before it are
right. So drafts are added, the likeliest first, as long as each of them makes the step give more tokens in a second,
by what rows were measured to cost, and within the ITL target. A step that is bound by what it computes drafts nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pdserve.config import Batching, SchedulerConfig, Speculate
from pdserve.engine.kv_cache.block_tables import BlockTables
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.engine.scheduling.step_budget import StepBudget
from pdserve.engine.speculation.lookup import GuessRates, OwnText

LEAST_RATE = 0.1
"""A draft that is right less often is not worth the memory that its row reads."""
HOPEFUL = 0.5
"""A request is likely to have good drafts in the next step as well if its next guess is right so often."""


@dataclass(frozen=True, slots=True)
class _Guessed:
    """What is guessed to follow one work of a plan."""

    place: int
    tokens: Sequence[int]
    chances: Sequence[float]
    """How likely each of the tokens is right, with all before it."""
    row_s: float
    """What a row of this request adds to the step."""


class Speculation:
    """Adds drafts to planned steps. It has no clock."""

    def __init__(self, config: SchedulerConfig, blocks: BlockTables, stop: StopRule, step_cost: StepCost) -> None:
        self._most_drafts = config.draft_tokens
        self.is_on = config.speculation is not Speculate.OFF and config.batching is Batching.CONTINUOUS
        self._blocks, self._stop, self._step_cost = blocks, stop, step_cost
        self._rates = GuessRates()

    def add_drafts(self, plan: BatchPlan, budget: StepBudget) -> None:
        """Adds drafts to the plan's requests that decode, where they pay. All else is planned."""
        if not self.is_on or not self._step_cost.decoding_known:
            return
        guessed = [found for place in range(len(plan.work)) if (found := self._guess(plan, place)) is not None]
        if not guessed:
            return
        for each, count in zip(guessed, self._counts(guessed, plan, budget), strict=True):
            work = plan.work[each.place]
            request = work.request
            if count and self._blocks.reserve(request, len(request.token_ids) + count):
                plan.work[each.place] = replace(work, drafts=tuple(each.tokens[:count]))
                budget.spend_rows(count, count * len(request.token_ids))

    def is_hopeful(self, requests: Iterable[Request]) -> bool:
        """Returns whether the step after one that is under way is likely to draft: it then waits for this one."""
        return self.is_on and any(
            request.may_draft
            and (text := request.own_text) is not None
            and text.matched
            and text.rates.rate(text.matched) >= HOPEFUL
            for request in requests
        )

    def _guess(self, plan: BatchPlan, place: int) -> _Guessed | None:
        work = plan.work[place]
        request = work.request
        if not (work.decodes and request.may_draft) or request.serves_push or request.children:
            return None
        if request.own_text is None:
            request.own_text = OwnText(self._rates)
        text, tokens = request.own_text, request.token_ids
        if not text.read(tokens, request.num_prompt_tokens) or not text.matched:
            return None
        # With the last draft right, one more token follows.
        count = min(self._most_drafts, self._stop.most_tokens(request) - len(tokens) - 1)
        if self._blocks.keeps_states:
            # A step that passed over the end of a block would leave no state there for the prefix cache.
            count = min(count, -len(tokens) % self._blocks.block_size)
        guesses = text.guesses(tokens, count)
        chances, chance = [], 1.0
        for number in range(len(guesses)):
            chance *= text.rates.rate(text.matched + number)
            if chance < LEAST_RATE:
                break
            chances.append(chance)
        if not chances:
            return None
        context = len(tokens)
        row_s = self._step_cost.estimate_s(2, 2 * context, 0) - self._step_cost.estimate_s(1, context, 0)
        return _Guessed(place, guesses, chances, row_s)

    def _counts(self, guessed: Sequence[_Guessed], plan: BatchPlan, budget: StepBudget) -> list[int]:
        """Returns how many drafts pay of each."""
        rows, context_tokens, prompt_tokens = plan.num_decoding, plan.context_tokens, plan.num_prompt_tokens
        step_s = self._step_cost.estimate_s(rows, context_tokens, prompt_tokens, prompt_context=plan.prompt_context)
        given = float(rows)
        left_s, left_tokens = budget.rows_left_s(), budget.tokens
        counts = [0] * len(guessed)
        queue = [(-each.chances[0] / max(each.row_s, 1e-9), index) for index, each in enumerate(guessed)]
        heapq.heapify(queue)
        while queue and left_tokens > 0:
            worth, index = heapq.heappop(queue)
            each = guessed[index]
            if -worth * step_s <= given:
                break
            if each.row_s > left_s:
                continue
            given += each.chances[counts[index]]
            step_s += each.row_s
            left_s -= each.row_s
            left_tokens -= 1
            counts[index] += 1
            if counts[index] < len(each.chances):
                heapq.heappush(queue, (-each.chances[counts[index]] / max(each.row_s, 1e-9), index))
        return counts
