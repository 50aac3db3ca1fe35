"""Measures how fast this engine computes prompts, from its own steps."""

from __future__ import annotations

import math

PRIOR_TOKENS_PER_S = 1000.0
"""The rate that is assumed before any was measured."""

# A step of fewer tokens takes the time of reading the weights, and says little about the rate.
_TELLING_TOKENS = 32
_KEPT = 0.8


class PrefillRate:
    """Running means of this engine's steps. A step's weight falls by a fifth with each later step."""

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        """The mean time of steps that computed single tokens only; 0 before the first of them."""
        self.measured_at = -math.inf
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def known(self) -> bool:
        return self._seconds > 0

    @property
    def tokens_per_s(self) -> float:
        """The prompt tokens a second of steps that compute nothing else."""
        return self._tokens / self._seconds if self.known else PRIOR_TOKENS_PER_S

    def step(self, prompt_tokens: int, decoding: int, seconds: float, now: float) -> None:
        """Notes that ``prompt_tokens``, and a token of each of ``decoding`` requests, took ``seconds``."""
        if seconds <= 0:
            return
        if not prompt_tokens:
            before = self.decode_step_s or seconds
            self.decode_step_s = _KEPT * before + (1 - _KEPT) * seconds
        elif prompt_tokens >= _TELLING_TOKENS:
            others = min(self.decode_step_s, 0.75 * seconds) if decoding else 0.0
            self._tokens = _KEPT * self._tokens + prompt_tokens
            self._seconds = _KEPT * self._seconds + seconds - others
            self.measured_at = now
