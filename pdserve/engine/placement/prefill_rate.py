"""How fast this engine computes prompts, measured from its own steps."""

from __future__ import annotations

import math

PRIOR_TOKENS_PER_S = 1000.0
"""Before anything was measured."""

# A step of fewer tokens takes the time of reading the weights, and says little about the rate.
_TELLING_TOKENS = 32
_KEPT = 0.8


class PrefillRate:
    """Running means, in which a step's weight falls by a fifth with each later one."""

    def __init__(self) -> None:
        self.decode_step_s = 0.0
        """Of steps in which nothing but single tokens was computed; 0 before there was one."""
        self.measured_at = -math.inf
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def known(self) -> bool:
        return self._seconds > 0

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens a second, if nothing else is computed."""
        return self._tokens / self._seconds if self.known else PRIOR_TOKENS_PER_S

    def step(self, prompt_tokens: int, decoding: int, seconds: float, now: float) -> None:
        """A step of that many prompt tokens, and of one token of each of ``decoding`` requests, took ``seconds``."""
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
