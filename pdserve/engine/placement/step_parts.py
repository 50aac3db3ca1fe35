"""The form in which the time of a step is known: a sum of parts, each for something that the step holds.

``step_cost`` learns the parts while an engine serves, and ``pdserve.plan`` reads them from a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Self

import msgspec


class Times(msgspec.Struct, frozen=True):
    """Fields that are times in seconds, and nothing else."""

    def times(self, factor: float) -> Self:
        """Returns what takes ``factor`` times as long."""
        return type(self)(**{name: factor * getattr(self, name) for name in self.__struct_fields__})

    @classmethod
    def mean(cls, of: Sequence[Self]) -> Self:
        """Returns the mean of each field."""
        return cls(**{name: fmean(getattr(one, name) for one in of) for name in cls.__struct_fields__})


class StepParts(Times, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The seconds that each part of a step takes. None is negative."""

    batch: float
    """What any step takes in which requests decode."""
    request: float
    """What each of these requests adds."""
    context_token: float
    """What each token of their contexts adds."""
    chunk_alone: float
    """What a step with chunks of prompts, and nothing else, takes besides their tokens."""
    chunk_beside: float
    """What chunks add besides their tokens where requests decode."""
    prompt_token: float
    """What each token of a chunk adds."""
    prompt_token_read: float
    """What each token of a chunk adds for each token of its prompt before the chunk."""

    def decoding_s(self, rows: int, context_tokens: float) -> float:
        """Returns what a step takes in which so many requests decode, with so many tokens in their contexts."""
        return self.batch + rows * self.request + context_tokens * self.context_token if rows else 0.0

    def token_s(self, prompt_context: float) -> float:
        """Returns what a token of a chunk adds that has so many tokens of its prompt before it."""
        return self.prompt_token + prompt_context * self.prompt_token_read

    def step_s(self, rows: int, context_tokens: float, prompt_tokens: int, prompt_context: float = 0.0) -> float:
        """Returns what such a step takes. It takes no less with more of anything."""
        decoding_s = self.decoding_s(rows, context_tokens)
        if not prompt_tokens:
            return decoding_s
        fixed_s = max(self.chunk_alone, decoding_s + self.chunk_beside) if rows else self.chunk_alone
        return fixed_s + prompt_tokens * self.token_s(prompt_context)

    def least(self, other: StepParts) -> StepParts:
        """Returns the parts of a node whose every part takes as long as in the faster one of the two."""
        return StepParts(**{name: min(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__})
