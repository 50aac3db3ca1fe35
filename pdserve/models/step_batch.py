"""One engine step as the model sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRow:
    """One request's part of a step: its tokens ``start`` to ``start + len(token_ids)`` are computed.

    ``block_table`` covers at least all of them. ``wants_logits`` asks for the logits after the last one.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    wants_logits: bool

    @property
    def context_len(self) -> int:
        return self.start + len(self.token_ids)
