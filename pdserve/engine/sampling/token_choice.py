"""Chooses the tokens of a step's rows: the best after the rules, or one that is drawn.

A row whose grammar leaves few tokens is chosen among those (``few_tokens``), and any other among the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch

from pdserve.engine.sampling.drawing import draw, uniform
from pdserve.engine.sampling.few_tokens import TokenIds, best_or_drawn, few_tokens, gathered
from pdserve.engine.sampling.grammar_matcher import TokenBits
from pdserve.engine.sampling.logit_rules import apply_rules, has_own_rules, moves_logits
from pdserve.engine.sampling.sampling_row import SamplingRow

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would give the same token, or overflow."""

CPU_LOGITS_AT_ONCE = 2**17
"""On a CPU, rows are drawn in groups of about so many logits, which stay in its caches (3 times as fast)."""


class TokenChoice:
    """The tokens of a step while they are chosen."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Set[int]) -> None:
        self._logits, self._rows, self._eos_token_ids = logits, rows, eos_token_ids
        best = logits.max(-1)
        self.tokens: list[int] = best.indices.tolist()
        self.finite: list[bool] = best.values.isfinite().tolist()
        """Whether a row can have a token."""

    def left(self, indices: Iterable[int]) -> list[int]:
        """Returns those of the rows that can have a token, in their order."""
        return sorted(index for index in indices if self.finite[index])

    def drop(self, indices: Iterable[int]) -> None:
        """Takes note that these rows can have no token."""
        for index in indices:
            self.finite[index] = False

    def choose(self, indices: Sequence[int], masks: Mapping[int, TokenBits | None], *, again: bool = False) -> None:
        """Chooses the tokens of these rows, by the masks of those that have one. ``again`` takes another number."""
        few: dict[int, TokenIds] = {}
        whole = []
        for index in indices:
            bits = masks.get(index)
            ids = None if bits is None or moves_logits(self._rows[index]) else few_tokens(bits)
            if ids is None:
                whole.append(index)
            else:
                few[index] = ids
        self._choose_among(few, again)
        self._choose_whole(whole, masks, again)

    def _choose_among(self, tokens: Mapping[int, TokenIds], again: bool) -> None:
        if not tokens:
            return
        found = gathered(self._logits, list(tokens), list(tokens.values()))
        for (index, ids), logits in zip(tokens.items(), found, strict=True):
            number = self._uniform(index, again) if self._is_drawn(index) else None
            place = best_or_drawn(logits, self._rows[index].sampling, number)
            if place is None:
                self.drop([index])
            else:
                self.tokens[index] = int(ids[place])

    def _choose_whole(self, indices: Sequence[int], masks: Mapping[int, TokenBits | None], again: bool) -> None:
        ruled = {index for index in indices if masks.get(index) is not None or has_own_rules(self._rows[index])}
        drawn = [index for index in indices if self._is_drawn(index)]

        def choosable(group: list[int]) -> torch.Tensor:
            """Returns a copy of the group's logits after the rules, which stays in a CPU's caches until the choice."""
            own = torch.stack([self._logits[index] for index in group])
            if ruled.isdisjoint(group):
                return own
            constrained = {at: bits for at, index in enumerate(group) if (bits := masks.get(index)) is not None}
            rows = [self._rows[index] for index in group]
            return self._finite_rows(group, apply_rules(own, rows, self._eos_token_ids, constrained))

        for group in draw_groups(sorted(ruled.difference(drawn)), self._logits):
            for index, token in zip(group, choosable(group).argmax(-1).tolist(), strict=True):
                self.tokens[index] = token
        for group in draw_groups(drawn, self._logits):
            for index, token in zip(group, self._drawn(choosable(group), group, again).tolist(), strict=True):
                self.tokens[index] = token

    def _finite_rows(self, indices: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits with zeros in rows of which none is finite, which can have no token."""
        for at, sane in enumerate(logits.amax(-1).isfinite().tolist()):
            if not sane:
                self.drop([indices[at]])
                logits[at] = 0.0
        return logits

    def _is_drawn(self, index: int) -> bool:
        return self._rows[index].sampling.temperature >= GREEDY_BELOW

    def _drawn(self, logits: torch.Tensor, indices: Sequence[int], again: bool) -> torch.Tensor:
        uniforms = [self._uniform(index, again) for index in indices]
        return draw(logits, [self._rows[index].sampling for index in indices], uniforms)

    def _uniform(self, index: int, again: bool) -> float:
        row = self._rows[index]
        return uniform(row.sampling.seed, row.position, again=again)


def draw_groups(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """Divides ``rows`` into the groups that are drawn together."""
    if not rows:
        return []
    size = max(CPU_LOGITS_AT_ONCE // logits.shape[-1], 1) if logits.device.type == "cpu" else len(rows)
    return [rows[start : start + size] for start in range(0, len(rows), size)]
