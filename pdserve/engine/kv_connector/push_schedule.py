"""When the KV blocks of a prompt are pushed: chunk by chunk, or all at the end."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config import KvOverlap

PAYS_FROM_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PushSchedule:
    """A push beside the next chunk costs that chunk time, and takes its bytes out of the tail: the time between the
    first token and the last block's landing. ``docs/benchmarks.md`` has both, for prompts of several lengths.
    """

    overlap: KvOverlap

    def early(self, tokens: int) -> bool:
        """Whether blocks leave before the prompt is computed, where ``tokens`` of it have to be pushed."""
        match self.overlap:
            case KvOverlap.ON:
                return True
            case KvOverlap.OFF:
                return False
            case KvOverlap.AUTO:
                return tokens >= PAYS_FROM_TOKENS
