"""Holds what the sampling of one token depends on, besides the logits, and divides a step's rows into groups.

The rows of a group are computed together. They are copied, and what is computed of them takes several times as much
memory as they do. So groups bound the memory that sampling takes, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from pdserve.engine.request import Request, TokenCounts
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.wire.sampling_params import SamplingParams

CPU_LOGITS_AT_ONCE = 2**17
"""On a CPU, groups have about so many logits, which stay in its caches (3 times as fast)."""
GPU_LOGITS_AT_ONCE = 2**23
"""On a GPU, groups have at most so many logits, but at least one row."""
BYTES_PER_LOGIT = 96
"""What is computed of a group takes at most this, its copy of the logits included."""


class SamplingRow(msgspec.Struct, frozen=True):
    """What the sampling of one row of logits takes from its request.

    Nothing is copied: parameters that look back read ``token_ids`` while the row is sampled.
    """

    sampling: SamplingParams
    token_ids: Sequence[int]
    """The prompt, followed by the tokens that were generated before this position."""
    num_prompt_tokens: int
    num_unknown_tokens: int = 0
    """The number of tokens that were sampled after ``token_ids`` and are not on the host yet."""
    counts: TokenCounts = msgspec.field(default_factory=TokenCounts)
    """How often each of ``token_ids`` occurs."""
    matcher: GrammarMatcher | None = None
    """The state of the grammar, if the request has one."""

    @classmethod
    def of(cls, request: Request) -> SamplingRow:
        """Returns the row for the token after the request's last one."""
        return cls(request.sampling, request.token_ids, request.num_prompt_tokens, 0, request.counts, request.matcher)

    @classmethod
    def after_unknown(cls, request: Request, num_unknown: int = 1) -> SamplingRow:
        """Returns the row for the token after ``num_unknown`` more: those that a step under way samples, or drafts."""
        return cls(
            request.sampling, request.token_ids, request.num_prompt_tokens, num_unknown, request.counts, request.matcher
        )

    @property
    def position(self) -> int:
        """The number of tokens that were generated before this one."""
        return len(self.token_ids) + self.num_unknown_tokens - self.num_prompt_tokens

    def has_generated(self, last: Sequence[int]) -> bool:
        """Returns whether the answer so far ends with these tokens."""
        start = len(self.token_ids) - len(last)
        return start >= self.num_prompt_tokens and list(self.token_ids[start:]) == list(last)


def row_groups(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """Divides ``rows`` into the groups that are computed together, in their order."""
    if not rows:
        return []
    at_once = CPU_LOGITS_AT_ONCE if logits.device.type == "cpu" else GPU_LOGITS_AT_ONCE
    size = max(at_once // logits.shape[-1], 1)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def sampling_bytes(rows: int, vocab_size: int) -> int:
    """Returns the most memory that the sampling of ``rows`` rows takes on a GPU besides their logits."""
    return BYTES_PER_LOGIT * min(rows * vocab_size, max(GPU_LOGITS_AT_ONCE, vocab_size))
