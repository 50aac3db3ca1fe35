"""Samples the tokens after a step's drafts, as far as the drafts turn out right.

A row without rules and grammar needs none of the tokens before it: all such rows are sampled with the step's other
ones. A row that looks back is sampled when the drafts before it were accepted, so that it sees them as it would have in
a step of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch

from pdserve.engine.request import Request
from pdserve.engine.sampling.logit_rules import has_own_rules
from pdserve.engine.sampling.sampler import GrammarTime, sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.wire.sampling_params import SampledToken


def looks_back(request: Request) -> bool:
    """Returns whether a token of the request depends on the tokens before it, besides the logits."""
    return request.sampling.grammar is not None or has_own_rules(SamplingRow.of(request))


class DraftTokens:
    """The tokens after drafts. The logits have to be valid until they are read."""

    def __init__(self, logits: torch.Tensor, places: Mapping[Request, int], eos_token_ids: Set[int]) -> None:
        """``places`` says in which row the logits after each request's first draft are; the others' follow."""
        self._logits, self._places, self._eos_token_ids = logits, places, eos_token_ids
        self._sampled: dict[Request, Sequence[SampledToken | None]] = {}
        self._grammar_time = GrammarTime()

    def add(self, request: Request, tokens: Sequence[SampledToken | None]) -> None:
        """Takes the tokens after the request's drafts, which were sampled with the step's other ones."""
        self._sampled[request] = tokens

    def are_finite(self, request: Request, count: int) -> bool:
        """Returns whether the logits after the request's ``count`` drafts are finite. Waits for a GPU.

        Those after a wrong draft count as well: what led to them is in the KV cache.
        """
        if request in self._sampled:
            return None not in self._sampled[request]
        first = self._places[request]
        return bool(self._logits[first : first + count].amax(-1).isfinite().all())

    def after(self, request: Request, number: int) -> SampledToken | None:
        """Returns the token after the request's first ``number`` drafts, which are its last tokens.

        Returns None where ``sampler.sample`` does. Waits for a GPU.
        """
        if request in self._sampled:
            return self._sampled[request][number - 1]
        source = self._places[request] + number - 1
        # Of the step's logits, no others are looked at.
        logits, row = self._logits[source : source + 1], SamplingRow.of(request)
        return sample(logits, [row], self._eos_token_ids, time=self._grammar_time)[0]
