"""Bounds what one step computes: the number of its tokens, and the time for which prompts hold up requests that decode.

A step takes as long for each request that decodes in it as for its prompts. So prompts are cut into chunks that keep a
step within the ITL target, by what steps were measured to cost (``placement.step_cost``). A few tokens are always
computed, so that every prompt comes to its end. Where nobody decodes, nobody is held up, and chunks are as long as the
number of tokens allows.
"""

from __future__ import annotations

import math

from pdserve.engine.placement.latency_targets import LEAST_PROMPT_TOKENS, NONE_YET, LatencyTargets
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import Work
from pdserve.wire.terms import RequestTargets

_LEAST_CHUNK = 3
"""A smaller chunk could be a single token of a prompt, or leave one alone (``batch_plan.chunk_tokens``)."""


class StepBudget:
    """What the step that is being planned may still compute."""

    def __init__(self, tokens: int, step_cost: StepCost, targets: LatencyTargets) -> None:
        """The step has at most ``tokens``."""
        self.tokens = tokens
        self._step_cost = step_cost
        self._targets = targets
        self._rows = 0
        self._context_tokens = 0
        self._prompt_tokens = 0
        self._prompt_s = 0.0
        self._decodes = False
        self._own_itl = NONE_YET
        self._noted: RequestTargets | None = None
        """The targets that were noted last: those of many requests are one object."""

    def spend(self, work: Work) -> None:
        """Notes work that the step does."""
        request, tokens, before = work.request, work.num_tokens, work.at
        if before is None:
            # As in most work: a call would take as long as what follows.
            before = request.num_computed_tokens
        if tokens > 1 and work.is_chunk:
            self.spend_chunk(tokens, before)
            return
        self.spend_rows(tokens, tokens * (before + 1))
        if not work.replays and before >= request.num_prompt_tokens:
            self.decode_for(request.terms.own_targets)

    def spend_chunk(self, tokens: int, before: int) -> None:
        """Notes a chunk of a prompt that has so many tokens ``before`` it."""
        self.tokens -= tokens
        self._prompt_tokens += tokens
        self._prompt_s += self._step_cost.prompt_s(tokens, before)

    def spend_rows(self, rows: int, context_tokens: int) -> None:
        """Notes rows of single tokens, which read so many tokens together."""
        self.tokens -= rows
        self._rows += rows
        self._context_tokens += context_tokens

    def decode_for(self, own: RequestTargets) -> None:
        """Notes that a request with these targets waits for its next token: prompts are to keep the step short."""
        self._decodes = True
        if own is not self._noted:
            self._own_itl = self._own_itl.beside(own)
            self._noted = own

    def rows_left_s(self) -> float:
        """Returns for how long further rows may compute before the step is longer than it should be."""
        aim_s = self._targets.aim_s(self._rows, self._context_tokens, self._own_itl) if self._decodes else None
        if aim_s is None:
            return math.inf
        cost = self._step_cost
        if not self._prompt_tokens:
            return aim_s - cost.estimate_s(self._rows, self._context_tokens, 0)
        fixed_s = cost.estimate_s(self._rows, self._context_tokens, 1) - cost.prompt_s(1)
        return aim_s - fixed_s - self._prompt_s

    def for_request(self, request: Request, at: int | None = None) -> int:
        """Returns how many of a request's tokens the step may compute. ``at`` is that of ``BatchPlan.next_work``."""
        computed = request.num_computed_tokens if at is None else at
        if computed >= request.num_prompt_tokens:
            return self.tokens
        if computed + 1 == len(request.token_ids) and not self._has_time_for_row(computed + 1):
            return 0
        return self.for_prompt(computed)

    def for_prompt(self, before: int = 0) -> int:
        """Returns how many tokens of a prompt the step may compute that has so many tokens ``before`` them.

        A step that computes other things leaves less than a least chunk undone. The prompt's turn comes: requests that
        decode leave at least three tokens, because a step has twice as many tokens as requests (``settings.checks``).
        """
        if self._decodes and self._targets.unmeasured(self._own_itl):
            return 0
        allowed = self.tokens
        within = self._prompt_tokens_within(self._rows, self._context_tokens, before)
        if within is not None:
            allowed = min(allowed, max(within, LEAST_PROMPT_TOKENS - self._prompt_tokens))
        if allowed < _LEAST_CHUNK and (self._rows or self._prompt_tokens):
            return 0
        return allowed

    def _has_time_for_row(self, context_tokens: int) -> bool:
        """Returns whether a prompt's only token, which is a row, fits beside the chunks that were cut without it.

        If not, the request goes on in the next step, where rows come before chunks.
        """
        if self._prompt_tokens <= LEAST_PROMPT_TOKENS:
            return True
        return self._prompt_tokens_within(self._rows + 1, self._context_tokens + context_tokens, 0) != 0

    def _prompt_tokens_within(self, rows: int, context_tokens: int, before: int) -> int | None:
        """Returns how many more tokens of prompts keep the step within its target beside such rows.

        Returns None if there is no bound.
        """
        aim_s = self._targets.aim_s(rows, context_tokens, self._own_itl) if self._decodes else None
        if aim_s is None:
            return None
        left_s = aim_s - self._prompt_s
        return self._step_cost.prompt_tokens_within(left_s, rows, context_tokens, prompt_context=before)
