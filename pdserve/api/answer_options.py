"""What a client asked for about the form of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.api.logprobs import ShownLogprobs
from pdserve.api.plain_choices import PlainChoices
from pdserve.api.shown_tokens import ShownToken


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Of all choices of one request."""

    model: str
    fingerprint: str
    prompt_ids: Sequence[list[int]]
    """Of each choice."""
    echoes: Sequence[str]
    """Of each choice: shown before its text."""
    token_bytes: Callable[[int], bytes]
    """Of one token by itself."""
    logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Every chunk says what was used so far."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    """Log probabilities name tokens by their ids."""
    plain: PlainChoices | None = None
    """The surface's, for the fast path; None keeps to the full one."""

    def shown(self, choice: int, tokens: Sequence[ShownToken]) -> ShownLogprobs:
        """For an answer or chunk that reports these tokens."""
        return ShownLogprobs(tokens, self.token_bytes, len(self.echoes[choice]), self.tokens_as_ids)
