"""Holds the tokens that a step samples until they are read, which is later than the step is launched.

On a GPU the host is free until it reads them: the tokens cross into page-locked memory behind the step's kernels, and
the next step can take them on the device. So do penalties, biases and reports of log probabilities. A row with a
grammar, or with bad words of several tokens, needs its request's last token on the host: it is sampled when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

import torch

from pdserve.engine.sampling.drawing import draw, uniform
from pdserve.engine.sampling.host_copy import HostCopy
from pdserve.engine.sampling.logit_rules import has_own_rules, needs_last_token
from pdserve.engine.sampling.row_groups import row_groups
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.sampling.token_choice import GREEDY_BELOW, after_rules, group_logits
from pdserve.engine.sampling.token_logprobs import PendingReports
from pdserve.wire.sampling_params import SampledToken
from pdserve_kernels.host_to_device import to_device

_NOT_FINITE = -1


class PendingTokens(Protocol):
    """The sampled tokens of a step, to be read once."""

    @property
    def tokens(self) -> torch.Tensor | None:
        """Token ids ``[rows]`` on the device, valid in every row; None if they are not known there."""

    def read(self) -> list[SampledToken | None]:
        """Returns what ``sampler.sample`` returns. Waits for a GPU."""


def can_sample_on_device(row: SamplingRow) -> bool:
    """Returns whether a row's token can be sampled without the tokens that are not on the host yet."""
    return row.sampling.grammar is None and not (row.num_unknown_tokens and needs_last_token(row))


class HostTokens:
    """Tokens that are sampled when they are read; ``logits`` have to be valid until then.

    Row ``i`` is sampled from ``logits[sources[i]]``.
    """

    tokens = None

    def __init__(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], sources: Sequence[int], eos_token_ids: Set[int]
    ) -> None:
        self._logits, self._rows, self._sources, self._eos_token_ids = logits, rows, sources, eos_token_ids

    def read(self) -> list[SampledToken | None]:
        return sample(self._logits, self._rows, self._eos_token_ids, self._sources)


class DeviceTokens:
    """Tokens that are sampled behind the kernels that compute ``logits``. All rows are ``can_sample_on_device``."""

    def __init__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        sources: Sequence[int],
        eos_token_ids: Set[int],
        last: torch.Tensor | None = None,
    ) -> None:
        """Row ``i`` is sampled from ``logits[sources[i]]``. ``last`` has all rows' last tokens if they are unknown."""
        best = logits.max(-1)
        (from_row,) = to_device([sources], logits.device)
        self.tokens: torch.Tensor = best.indices.index_select(0, from_row)
        finite = best.values.isfinite().index_select(0, from_row)
        drawn = [index for index, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
        ruled = [index for index, row in enumerate(rows) if has_own_rules(row)]
        for group in (*row_groups(sorted(set(ruled).difference(drawn)), logits), *row_groups(drawn, logits)):
            own_rows, (places,) = [rows[index] for index in group], to_device([group], logits.device)
            own = group_logits(logits, [sources[index] for index in group])
            # A row that is not finite gets some token all the same, which is not looked at.
            own.masked_fill_(~finite.index_select(0, places).unsqueeze(1), 0.0)
            own_last = None if last is None else last.index_select(0, places)
            own, sane = after_rules(own, own_rows, eos_token_ids, {}, own_last)
            if sane is not None:
                own.masked_fill_(~sane.unsqueeze(1), 0.0)
                finite.index_copy_(0, places.long(), finite.index_select(0, places) & sane)
            if own_rows[0].sampling.temperature >= GREEDY_BELOW:
                uniforms = [uniform(row.sampling.seed, row.position) for row in own_rows]
                chosen = draw(own, [row.sampling for row in own_rows], uniforms)
            else:
                chosen = own.argmax(-1)
            self.tokens.index_copy_(0, places.long(), chosen)
        self._arrival = HostCopy(self.tokens.where(finite, _NOT_FINITE))
        self._asking = [index for index, row in enumerate(rows) if row.sampling.logprobs is not None]
        self._reports: PendingReports | None = None
        if self._asking:
            (places,) = to_device([self._asking], logits.device)
            asking = [rows[index] for index in self._asking]
            tokens = self.tokens.index_select(0, places)
            self._reports = PendingReports(logits, asking, [sources[index] for index in self._asking], tokens)

    def read(self) -> list[SampledToken | None]:
        tokens: list[int] = self._arrival.read().tolist()
        reports = {} if self._reports is None else dict(zip(self._asking, self._reports.read(), strict=True))
        return [
            None if token == _NOT_FINITE else SampledToken(token, reports.get(index))
            for index, token in enumerate(tokens)
        ]
