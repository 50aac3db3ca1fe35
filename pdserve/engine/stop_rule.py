"""When generation ends."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.request import Request
from pdserve.wire.engine import FinishReason


@dataclass(frozen=True, slots=True)
class StopRule:
    """As far as the model decides it."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def ending(self, request: Request) -> FinishReason | None:
        """Why the request's last token is its last; None if it is not."""
        sampling, token_id = request.sampling, request.token_ids[-1]
        if token_id in self.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if request.num_generated_tokens >= sampling.max_tokens or len(request.token_ids) >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def next_is_last(self, request: Request) -> bool:
        """Whether the request's next token will be its last, whichever it is."""
        return (
            request.num_generated_tokens + 1 >= request.sampling.max_tokens
            or len(request.token_ids) + 1 >= self.max_model_len
        )
