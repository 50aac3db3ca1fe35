"""Learns from each step what steps cost, and counts how those with prompts beside streams kept the ITL target.

It also says, before a step, for how long that may keep the step loop from showing life.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import takewhile

from pdserve.engine.placement.latency_targets import LatencyTargets, OwnItl
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.wire.engine import STEP_TOKEN_BOUNDS, StepStats

FIRST_STEP_S = 60.0
"""The first step of its kind, of about as many requests and tokens, may take so long: kernels may be compiled."""
LONGER = 5.0
"""A later step may take so many times what steps like it took."""


class StepWatch:
    """Takes the plan and the time of each step, before the plan's requests move on."""

    def __init__(self, step_cost: StepCost, targets: LatencyTargets, ranks_s: float = 0.0) -> None:
        """``ranks_s`` is how long another rank may keep this one waiting in a step."""
        self._step_cost = step_cost
        self._ranks_s = ranks_s
        self._kinds: set[tuple[int, int]] = set()
        """The kinds of steps that there were."""
        self._targets = targets
        self._target_s = 0.0
        self._shared = 0
        self._shared_prompt_tokens = 0
        self._shared_late = 0
        self._num_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._tokens = 0
        self._computed_prompt_tokens = 0

    def expected_s(self, plan: BatchPlan) -> float:
        """Returns how long a step that is about to be computed may take, generously."""
        # Chunks come last, and are few. To add up the contexts of all requests would cost more than this is worth.
        chunks = list(takewhile(lambda work: work.is_chunk, reversed(plan.work)))
        tokens = sum(work.num_tokens for work in chunks)
        kind = (len(plan.work).bit_length(), tokens.bit_length())
        least_s = 0.0 if kind in self._kinds else FIRST_STEP_S
        self._kinds.add(kind)
        before = max((work.request.num_computed_tokens for work in chunks), default=0)
        cost = self._step_cost
        return max(least_s, LONGER * (cost.decode_step_s + cost.prompt_s(tokens, before))) + self._ranks_s

    def count(self, plan: BatchPlan) -> None:
        """Counts the tokens of a step."""
        tokens = 0
        for work in plan.work:
            tokens += work.num_tokens
            if not work.request.prompt_is_computed:
                self._computed_prompt_tokens += work.num_tokens
        self._tokens += tokens
        self._num_tokens[bisect_left(STEP_TOKEN_BOUNDS, tokens)] += 1

    def note(self, plan: BatchPlan, seconds: float, now: float) -> None:
        """Notes a step that took ``seconds`` until ``now``."""
        rows, context_tokens, prompt_tokens = plan.num_decoding, plan.context_tokens, plan.num_prompt_tokens
        decoding = [work.request for work in plan.work if work.num_tokens == 1 and work.request.prompt_is_computed]
        if decoding:
            own = OwnItl.of(request.terms.own_targets for request in decoding)
            self._target_s = self._targets.itl_s(rows, context_tokens, own) or 0.0
        if decoding and prompt_tokens:
            self._shared += 1
            self._shared_prompt_tokens += prompt_tokens
            self._shared_late += 0 < self._target_s < seconds
        self._step_cost.observe(
            rows, context_tokens, prompt_tokens, seconds, prompt_context=plan.prompt_context, now=now
        )

    def stats(self) -> StepStats:
        return StepStats(
            num_tokens=tuple(self._num_tokens),
            tokens=self._tokens,
            computed_prompt_tokens=self._computed_prompt_tokens,
            shared=self._shared,
            shared_prompt_tokens=self._shared_prompt_tokens,
            shared_late=self._shared_late,
            itl_target_s=self._target_s,
            parts=self._step_cost.parts,
        )
