"""What becomes of one request in a simulation: when its tokens came."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.plan.load import PlannedRequest


@dataclass(slots=True, eq=False)
class Answer:
    """One answer, while it is made and afterwards. Times are in seconds of the simulated clock."""

    request: PlannedRequest
    tokens_left: int
    """The tokens after the first that its client has not got."""
    first_at: float = math.nan
    last_at: float = math.nan
    done: bool = False
    """Whether its client has all tokens, and its node has forgotten it."""

    @classmethod
    def to(cls, request: PlannedRequest) -> Answer:
        return cls(request, request.output_tokens - 1)

    @property
    def begun(self) -> bool:
        """Whether its client has the first token."""
        return not math.isnan(self.first_at)

    def end(self, now: float) -> None:
        self.last_at, self.done = now, True

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.request.at_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a token after the first; None for an answer of one token."""
        after_first = self.request.output_tokens - 1
        return (self.last_at - self.first_at) / after_first if after_first else None
