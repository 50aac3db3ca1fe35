"""What the sampling of one token depends on, besides the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.engine.request import Request
from pdserve.engine.sampling.token_counts import TokenCounts
from pdserve.wire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of logits and the request that it is for.

    Nothing is copied: ``token_ids`` is read while the row is sampled, by those parameters that look back.
    """

    sampling: SamplingParams
    token_ids: Sequence[int]
    """The prompt, then what was generated before this position."""
    num_prompt_tokens: int
    num_unknown_tokens: int = 0
    """Chosen after those, but not on the host yet."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """The request's, of ``token_ids``."""

    @classmethod
    def of(cls, request: Request) -> SamplingRow:
        """For the token after the request's last one."""
        return cls(request.sampling, request.token_ids, request.num_prompt_tokens, 0, request.counts)

    @classmethod
    def after_unknown(cls, request: Request) -> SamplingRow:
        """For the token after the one that a step under way chooses for the request."""
        return cls(request.sampling, request.token_ids, request.num_prompt_tokens, 1, request.counts)

    @property
    def position(self) -> int:
        """How many tokens were generated before."""
        return len(self.token_ids) + self.num_unknown_tokens - self.num_prompt_tokens

    def has_generated(self, last: Sequence[int]) -> bool:
        """Whether the answer so far ends with these tokens."""
        start = len(self.token_ids) - len(last)
        return start >= self.num_prompt_tokens and list(self.token_ids[start:]) == list(last)
