"""Says how soon this engine's tokens should come: the operator's targets, or what follows from measured steps."""

from __future__ import annotations

from pdserve.config import Batching, TargetsConfig
from pdserve.engine.placement.step_cost import StepCost
from pdserve.wire.discovery import Role

ITL_FACTOR = 2.0
"""A decode node's step may take so many times what it takes without prompts, if the operator has set no target."""
TTFT_FACTOR = 2.0
"""A first token may take so many times what its prompt takes alone on this node, if the operator has set no target."""

LEAST_PROMPT_TOKENS = 8
"""So many tokens of prompts are computed in a step however long it takes."""


class LatencyTargets:
    """The targets in force: TTFT for a prompt, ITL for a step of a decoding batch. The class has no clock.

    Without the operator's target, only a decode node bounds its steps: what it does not compute, a prefill node may. A
    mixed node's own prompts have no other place, and larger chunks of them cost less. A static batch computes its
    prompts before it decodes, so no stream waits for them.
    """

    def __init__(
        self, config: TargetsConfig, step_cost: StepCost, role: Role, batching: Batching = Batching.CONTINUOUS
    ) -> None:
        self.role = role
        """The node's present role."""
        self._ttft_s = config.target_ttft_ms / 1000
        self._itl_s = config.target_itl_ms / 1000
        self._step_cost = step_cost
        self._static = batching is Batching.STATIC

    def itl_s(self, rows: int, context_tokens: int) -> float | None:
        """Returns how long a step may take in which so many requests decode; None if there is no bound.

        There is none before a decode step was measured, either, unless the operator has set one.
        """
        if self._static:
            return None
        if self._itl_s:
            return self._itl_s
        if self.role is not Role.DECODE or not self._step_cost.decoding_known:
            return None
        return ITL_FACTOR * self._step_cost.estimate_s(rows, context_tokens, 0)

    def aim_s(self, rows: int, context_tokens: int) -> float | None:
        """Returns how long such a step is planned to take; None if there is no bound.

        As far as steps differ from their estimates, they aim below the target: it is a bound and no mean.
        """
        itl_s = self.itl_s(rows, context_tokens)
        return None if itl_s is None else itl_s / (1 + self._step_cost.spread)

    def ttft_s(self, alone_s: float) -> float:
        """Returns how long the first token of a prompt may take that takes ``alone_s`` on this node alone."""
        return self._ttft_s or TTFT_FACTOR * alone_s
