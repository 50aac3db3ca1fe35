"""Holds what the sampling of one token depends on, besides the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.engine.request import Request
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.engine.sampling.token_counts import TokenCounts
from pdserve.wire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampling of one row of logits takes from its request.

    Nothing is copied: parameters that look back read ``token_ids`` while the row is sampled.
    """

    sampling: SamplingParams
    token_ids: Sequence[int]
    """The prompt, followed by the tokens that were generated before this position."""
    num_prompt_tokens: int
    num_unknown_tokens: int = 0
    """The number of tokens that were sampled after ``token_ids`` and are not on the host yet."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """How often each of ``token_ids`` occurs."""
    matcher: GrammarMatcher | None = None
    """The state of the grammar, if the request has one."""

    @classmethod
    def of(cls, request: Request) -> SamplingRow:
        """Returns the row for the token after the request's last one."""
        return cls(request.sampling, request.token_ids, request.num_prompt_tokens, 0, request.counts, request.matcher)

    @classmethod
    def after_unknown(cls, request: Request) -> SamplingRow:
        """Returns the row for the token after the one that a step under way samples for the request."""
        return cls(request.sampling, request.token_ids, request.num_prompt_tokens, 1, request.counts, request.matcher)

    @property
    def position(self) -> int:
        """The number of tokens that were generated before this one."""
        return len(self.token_ids) + self.num_unknown_tokens - self.num_prompt_tokens

    def has_generated(self, last: Sequence[int]) -> bool:
        """Returns whether the answer so far ends with these tokens."""
        start = len(self.token_ids) - len(last)
        return start >= self.num_prompt_tokens and list(self.token_ids[start:]) == list(last)
