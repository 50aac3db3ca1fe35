"""The time that each step of a paced engine takes: what a device would need, without a device."""

from __future__ import annotations

import msgspec


class Pace(msgspec.Struct, frozen=True):
    """The times of a step's parts, which add up."""

    step_s: float
    """What every step takes."""
    row_s: float
    """What each decoding request adds."""
    prompt_token_s: float
    """What each token of a prompt adds."""

    def seconds(self, decoding: int, prompt_tokens: int) -> float:
        """Returns the time of a step of so many decoding requests and tokens of prompts."""
        return self.step_s + decoding * self.row_s + prompt_tokens * self.prompt_token_s
