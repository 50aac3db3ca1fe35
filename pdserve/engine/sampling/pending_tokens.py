"""Holds the tokens that a step samples until they are read, which is later than the step is launched.

On a GPU the host is free until it reads them: the tokens cross into page-locked memory behind the step's kernels, and
the next step can take them on the device. A row that looks back at its request's tokens, or reports on them, needs them
on the host first, and is sampled when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

import torch

from pdserve.engine.sampling.drawing import draw, uniform
from pdserve.engine.sampling.logit_rules import has_rules
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.sampling.token_choice import GREEDY_BELOW, draw_groups
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
    """Returns whether a row's token can be sampled without its request's last tokens, and without a report."""
    return row.sampling.logprobs is None and not has_rules(row)


class HostTokens:
    """Tokens that are sampled when they are read; ``logits`` have to be valid until then."""

    tokens = None

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Set[int]) -> None:
        self._logits, self._rows, self._eos_token_ids = logits, rows, eos_token_ids

    def read(self) -> list[SampledToken | None]:
        return sample(self._logits, self._rows, self._eos_token_ids)


class DeviceTokens:
    """Tokens that are sampled behind the kernels that compute ``logits``. All rows are ``can_sample_on_device``."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
        best = logits.max(-1)
        self.tokens: torch.Tensor = best.indices
        finite = best.values.isfinite()
        drawn = [index for index, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
        for group in draw_groups(drawn, logits):
            places = to_device([group], logits.device)[0].long()
            # A row that is not finite draws some token all the same, which is not looked at.
            own = logits.index_select(0, places).masked_fill_(~finite.index_select(0, places).unsqueeze(1), 0.0)
            uniforms = [uniform(rows[index].sampling.seed, rows[index].position) for index in group]
            self.tokens.index_copy_(0, places, draw(own, [rows[index].sampling for index in group], uniforms))
        self._arrival = HostCopy(self.tokens.where(finite, _NOT_FINITE))

    def read(self) -> list[SampledToken | None]:
        return [None if token == _NOT_FINITE else SampledToken(token) for token in self._arrival.read()]


class HostCopy:
    """Integers on their way to the host. The host waits for them only when they are read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._host, self._there = values, None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation
            self._there.record()

    def read(self) -> list[int]:
        if self._there is not None:
            self._there.synchronize()
        values: list[int] = self._host.tolist()
        return values
