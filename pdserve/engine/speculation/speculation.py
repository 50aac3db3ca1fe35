"""Decides which tokens a decode step drafts, and how many.

A draft is a further row of its step: it takes the time of a row, and gives a token if it and all drafts before it are
right. So drafts are added, the likeliest first, as long as each of them makes the step give more tokens in a second,
by what rows were measured to cost, and within the ITL target. A step that is bound by what it computes drafts nothing.

Drafts come from the request's own text or from a model, its own MTP layers or a smaller one (``guesses``), which drafts
after each step, one token after another. How many of these are made is decided in the same way, by what they were
measured to cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from pdserve.config import SchedulerConfig, Speculate
from pdserve.engine.kv_cache.block_tables import BlockTables
from pdserve.engine.placement.latency_targets import LatencyTargets, OwnItl
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.request_limits import StopRule
from pdserve.engine.scheduling.step_budget import StepBudget
from pdserve.engine.speculation.guesses import (
    FIRST_RATES,
    READ_AT_ONCE,
    Guesser,
    ModelDrafts,
    OwnText,
    PromptText,
    Rates,
    first_rates,
)

LEAST_CHANCE = 0.1
"""A draft that is right less often is not worth the memory that its row reads."""
HOPEFUL = 0.5
"""A request is likely to have good drafts in the next step as well if its next guess is right so often."""
SURE = 0.85
"""The model drafts nothing for a request whose own text is right so often."""
TRIED_EVERY = 32
"""Once in so many steps, drafts that do not pay are looked for or made, to notice when they do again."""
LEAST_READ, MOST_READ = 32, 512
"""A draft model reads at least and at most so many tokens of texts behind a step, if there are so many."""
_KEPT = 0.8
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class _Guessed:
    """What is guessed to follow one work of a plan."""

    place: int
    tokens: Sequence[int]
    chances: Sequence[float]
    """How likely each of the tokens is right, with all before it."""
    row_s: float
    """What a row of this request adds to the step."""

    def worth(self, number: int) -> float:
        """Returns how many tokens the draft with this number gives for each second that it adds to the step."""
        return self.chances[number] / max(self.row_s, _LEAST_S)


def _may_have_drafts(request: Request) -> bool:
    """Returns whether a request that decodes may have drafts at all."""
    return request.may_draft and not request.serves_push and not request.children


class Speculation:
    """Adds drafts to planned steps, and says how many the model makes. It has no clock."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockTables,
        stop: StopRule,
        step_cost: StepCost,
        targets: LatencyTargets,
        *,
        by_model: bool,
    ) -> None:
        """``by_model`` says whether the model or a smaller one makes drafts."""
        self._most_drafts, self._most_rows = config.draft_tokens, config.most_rows
        self._by_text = config.speculates in (Speculate.AUTO, Speculate.NGRAM)
        self._by_model = by_model
        self._blocks, self._stop, self._step_cost, self._targets = blocks, stop, step_cost, targets
        self._text_rates = Rates(FIRST_RATES)
        self._model_rates = Rates(first_rates(config.draft_tokens))
        self._draft_s = 0.0
        """What it takes to have the model draft one more token of each request."""
        self._read_s = 0.0
        """What it takes a draft model to read one more token of a text."""
        self._model_steps = 0
        """How many steps there were since the model drafted one more than pays."""
        self._may_read = 0
        """How many tokens of texts may still be read before the next step."""
        self._pays, self._steps_ahead = True, 0
        """Whether drafts were added when they were last looked for, and how many steps have not looked since."""

    @property
    def is_on(self) -> bool:
        return self._by_text or self._by_model

    def add_drafts(self, plan: BatchPlan, budget: StepBudget) -> None:
        """Adds drafts to the plan's requests that decode, where they pay. All else is planned."""
        self._steps_ahead = 0
        if not self.is_on or not self._step_cost.decoding_known:
            return
        self._may_read, self._pays = READ_AT_ONCE, False
        guessed = [found for place in range(len(plan.work)) if (found := self._guess(plan, place)) is not None]
        if not guessed:
            return
        for each, count in zip(guessed, self._counts(guessed, plan, budget), strict=True):
            work = plan.work[each.place]
            request = work.request
            count = self._with_blocks(request, count, len(plan.work))
            if count:
                count = self._blocks.reserve_drafts(request, count)
            if count:
                self._pays = True
                plan.work[each.place] = msgspec.structs.replace(work, drafts=tuple(each.tokens[:count]))
                budget.spend_rows(count, count * len(request.token_ids))

    def is_hopeful(self, requests: Iterable[Request]) -> bool:
        """Returns whether the step after one that is under way is likely to draft: it then waits for this one.

        ``requests`` are those that get a token. The model may be about to draft of any of them, and the texts of those
        that decode are looked at. Where drafts did not pay when they were last looked for, or made, they are once in
        ``TRIED_EVERY`` steps.
        """
        self._may_read, self._steps_ahead = READ_AT_ONCE, self._steps_ahead + 1
        requests = [request for request in requests if _may_have_drafts(request)]
        if self._by_model:
            wanting, count = self._of_model(requests)
            if wanting and (count or self._model_steps + self._steps_ahead >= TRIED_EVERY):
                return True
        if not self._by_text:
            return False
        texts = [self._read_text(request) for request in requests if request.prompt_is_computed]
        likely = any(text.matched and text.rate() >= HOPEFUL for text in texts)
        return likely and (self._pays or self._steps_ahead >= TRIED_EVERY)

    # ------------------------------------------------------------ drafts of the model

    def wanted(self, requests: Sequence[Request]) -> tuple[list[Request], int]:
        """Returns the requests that the model is to draft tokens of now, all of which go on, and how many of each."""
        if not self._by_model:
            return [], 0
        self._may_read = READ_AT_ONCE
        wanting, count = self._of_model(requests)
        if not wanting:
            return [], 0
        self._model_steps += max(1, self._steps_ahead)
        if self._model_steps >= TRIED_EVERY:
            # One more than pays says whether it would.
            self._model_steps, count = 0, min(count + 1, self._most_drafts)
        for request in wanting if count else ():
            # Drafts end where the blocks do.
            self._with_blocks(request, min(count, self._left(request)), len(requests))
        return (wanting, count) if count else ([], 0)

    def put(self, request: Request, drafts: Sequence[int]) -> None:
        """Takes what the model has drafted of a request."""
        if request.model_drafts is None:
            request.model_drafts = ModelDrafts(self._model_rates)
        request.model_drafts.put(len(request.token_ids), drafts)

    def may_read(self, requests: Sequence[Request]) -> int:
        """Returns how many tokens a draft model may read behind a step of these requests.

        It takes about the time of a step for that, and no more than the ITL target leaves.
        """
        rows, context = len(requests), sum(len(request.token_ids) for request in requests)
        spare_s = self._step_cost.decode_step_s
        aim_s = self._targets.aim_s(rows, context, OwnItl.of(request.terms.own_targets for request in requests))
        if aim_s is not None:
            spare_s = min(spare_s, aim_s - spare_s)
        known = int(spare_s / self._read_s) if self._read_s else LEAST_READ
        return max(LEAST_READ, min(MOST_READ, known))

    def drafted_for(self, runs: int, seconds: float, num_read: int = 0) -> None:
        """Learns how long so many runs of what drafts took, each for a token of each request.

        The first one has read ``num_read`` tokens, if these were more than a step gives.
        """
        if not num_read:
            each_s = seconds / runs
            self._draft_s = _KEPT * self._draft_s + (1 - _KEPT) * each_s if self._draft_s else each_s
            return
        # Without what was read, the runs would have taken no longer.
        self._draft_s = min(self._draft_s, seconds / runs)
        each_s = max(_LEAST_S, seconds - runs * self._draft_s) / num_read
        self._read_s = _KEPT * self._read_s + (1 - _KEPT) * each_s if self._read_s else each_s

    def _of_model(self, requests: Iterable[Request]) -> tuple[list[Request], int]:
        """Returns the requests of which the model may draft, and how many drafts of each pay."""
        wanting = [request for request in requests if self._wants_model(request)]
        for request in wanting:
            if request.model_drafts is not None:
                request.model_drafts.read(request.token_ids)
        return wanting, self._model_count(wanting) if wanting else 0

    def _wants_model(self, request: Request) -> bool:
        if not _may_have_drafts(request) or self._left(request) < 1:
            return False
        if not self._by_text:
            return True
        text = self._read_text(request)
        return not text.matched or text.rate() < SURE

    def _model_count(self, requests: Sequence[Request]) -> int:
        """Returns with how many drafts of each request the next step gives most tokens in a second."""
        cost, rows = self._step_cost, len(requests)
        context = sum(len(request.token_ids) for request in requests)
        row_s = self._row_s(context // rows)
        step_s = cost.estimate_s(rows, context, 0) or cost.decode_step_s
        aim_s = self._targets.aim_s(rows, context, OwnItl.of(request.terms.own_targets for request in requests))
        rates = [request.model_drafts or self._model_rates for request in requests]
        chances, given = [1.0] * rows, float(rows)
        best, count = given / max(step_s, _LEAST_S), 0
        for number in range(self._most_drafts):
            chances = [chance * rate.rate(number) for chance, rate in zip(chances, rates, strict=True)]
            given += sum(chances)
            drafts = number + 1
            seconds = step_s + drafts * (self._draft_s + rows * row_s)
            if aim_s is not None and seconds > aim_s:
                break
            speed = given / max(seconds, _LEAST_S)
            if speed <= best:
                # Each further draft is less likely right, and takes as long.
                break
            best, count = speed, drafts
        return count

    # ------------------------------------------------------------ drafts of a step

    def _with_blocks(self, request: Request, count: int, running: int) -> int:
        """Takes blocks for so many drafts of a request; returns for how many it has blocks.

        Where blocks are short, those that are left are for tokens that are certain to come.
        """
        length = len(request.token_ids)
        if self._blocks.free_by_group()[0] < running:
            count = min(count, len(request.block_table) * self._blocks.block_size - length)
        return count if count > 0 and self._blocks.reserve(request, length + count) else 0

    def _left(self, request: Request) -> int:
        """Returns how many drafts of a request a step may check at most."""
        length = len(request.token_ids)
        # With the last draft right, one more token follows.
        return min(self._most_drafts, self._stop.most_tokens(request) - length - 1)

    def _guess(self, plan: BatchPlan, place: int) -> _Guessed | None:
        work = plan.work[place]
        request = work.request
        if not work.decodes or not _may_have_drafts(request):
            return None
        tokens, left = request.token_ids, self._left(request)
        found = [self._chances(source, tokens, left) for source in self._sources(request)]
        guesses, chances = max(found, key=lambda each: sum(each[1]), default=((), ()))
        if not chances:
            return None
        return _Guessed(place, guesses, chances, self._row_s(len(tokens)))

    def _sources(self, request: Request) -> Iterator[Guesser]:
        """Yields what may guess the request's next tokens."""
        if self._by_text:
            text = self._read_text(request)
            if text.matched:
                yield text
        if request.model_drafts is not None:
            request.model_drafts.read(request.token_ids)
            yield request.model_drafts

    def _own_text(self, request: Request) -> OwnText:
        if request.own_text is None:
            parent = request.parent
            prompt = PromptText(request.num_prompt_tokens) if parent is None else self._own_text(parent).prompt
            request.own_text = OwnText(self._text_rates, prompt)
        return request.own_text

    def _read_text(self, request: Request) -> OwnText:
        """Returns a request's text, of which as much is read as may be read now."""
        text = self._own_text(request)
        self._may_read -= text.read(request.token_ids, request.num_prompt_tokens, self._may_read)
        return text

    @staticmethod
    def _chances(source: Guesser, tokens: Sequence[int], count: int) -> tuple[Sequence[int], list[float]]:
        """Returns up to ``count`` guesses, and how likely each is right with all before it, while it is likely."""
        guesses, chances, chance = source.guesses(tokens, count), list[float](), 1.0
        for number in range(len(guesses)):
            chance *= source.rate(number)
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return guesses, chances

    def _row_s(self, context: int) -> float:
        """Returns what a draft with such a context adds to a step."""
        cost = self._step_cost
        return cost.estimate_s(2, 2 * context, 0) - cost.estimate_s(1, context, 0)

    def _counts(self, guessed: Sequence[_Guessed], plan: BatchPlan, budget: StepBudget) -> list[int]:
        """Returns how many drafts pay of each."""
        rows, context_tokens, prompt_tokens = plan.num_decoding, plan.context_tokens, plan.num_prompt_tokens
        step_s = self._step_cost.estimate_s(rows, context_tokens, prompt_tokens, prompt_context=plan.prompt_context)
        given = float(rows)
        # Steps with more rows are not recorded on a GPU, and have no memory for more logits.
        taken = sum(1 if work.is_chunk else work.num_rows for work in plan.work)
        left_s, left_tokens = budget.rows_left_s(), min(budget.tokens, self._most_rows - taken)
        counts = [0] * len(guessed)
        queue = [(-each.worth(0), index) for index, each in enumerate(guessed)]
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
                heapq.heappush(queue, (-each.worth(counts[index]), index))
        return counts
