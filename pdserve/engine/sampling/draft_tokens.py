"""Samples the tokens after a step's drafts, as far as the drafts turn out right.

A row without rules and grammar needs none of the tokens before it: all such rows are sampled with the step's other
ones. A row that looks back is sampled when the drafts before it were accepted, so that it sees them as it would have in
a step of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import islice

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

    def __init__(self, logits: torch.Tensor, places: Mapping[Request, range], eos_token_ids: Set[int]) -> None:
        """``places`` says in which rows the logits after each request's drafts are."""
        self._logits, self._places, self._eos_token_ids = logits, places, eos_token_ids
        self.at_once = [(request, rows) for request, rows in places.items() if not looks_back(request)]
        """The requests whose tokens are sampled with the step's other ones, and the rows of their logits."""
        self._sampled: dict[Request, Sequence[SampledToken | None]] = {}
        self._grammar_time = GrammarTime()

    def take(self, tokens: Iterable[SampledToken | None]) -> None:
        """Takes the tokens of the requests that are sampled ``at_once``, in their order."""
        left = iter(tokens)
        self._sampled = {request: list(islice(left, len(places))) for request, places in self.at_once}

    def are_finite(self, request: Request) -> bool:
        """Returns whether the logits after all of the request's drafts are finite. Waits for a GPU.

        Those after a wrong draft count as well: what led to them is in the KV cache.
        """
        if request in self._sampled:
            return None not in self._sampled[request]
        places = self._places[request]
        return bool(self._logits[places.start : places.stop].amax(-1).isfinite().all())

    def after(self, request: Request, number: int) -> SampledToken | None:
        """Returns the token after the request's first ``number`` drafts, which are its last tokens.

        Returns None where ``sampler.sample`` does. Waits for a GPU.
        """
        if request in self._sampled:
            return self._sampled[request][number - 1]
        source = self._places[request][number - 1]
        # Of the step's logits, no others are looked at.
        logits, row = self._logits[source : source + 1], SamplingRow.of(request)
        return sample(logits, [row], self._eos_token_ids, time=self._grammar_time)[0]
