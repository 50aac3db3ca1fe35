"""Learns from each step what steps cost, and counts how those with prompts beside streams kept the ITL target."""

from __future__ import annotations

from bisect import bisect_left

from pdserve.engine.placement.latency_targets import LatencyTargets, OwnItl
from pdserve.engine.placement.step_cost import StepCost
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.wire.engine import STEP_TOKEN_BOUNDS, StepStats


class StepWatch:
    """Takes the plan and the time of each step, before the plan's requests move on."""

    def __init__(self, step_cost: StepCost, targets: LatencyTargets) -> None:
        self._step_cost = step_cost
        self._targets = targets
        self._target_s = 0.0
        self._shared = 0
        self._shared_prompt_tokens = 0
        self._shared_late = 0
        self._num_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._tokens = 0
        self._computed_prompt_tokens = 0

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
            own = OwnItl.of(request.own_targets for request in decoding)
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
