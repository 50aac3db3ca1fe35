"""Drafts of the simulated engines: a drafter that knows the right answers, and is wrong as often as its plan says.

The model's texts repeat nothing, so requests' own texts would guess nothing. Everything else about speculation is the
product's: how many drafts a step has, which of them are accepted, and what becomes of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from lab.simulation.reference import EOS, VOCAB, after, beginning, likeliest, token_at
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.scheduling.step_budget import StepBudget
from pdserve.engine.speculation.guesses import FIRST_RATES, OwnText, PromptText, Rates
from pdserve.engine.speculation.speculation import Speculation

CONFIDENT = 16
"""A guess after a match of so many tokens counts as good. No guess is noted as a wrong one."""


class KnownText(OwnText):
    """Guesses what the model gives after a request's tokens, with mistakes."""

    def __init__(self, request: Request, right_share: float) -> None:
        super().__init__(Rates(FIRST_RATES), PromptText(request.num_prompt_tokens))
        self.matched = CONFIDENT
        self._request, self._right_share = request, right_share
        self._digest, self._num_digested = beginning(request.terms.prompt.cache_salt), 0
        self._random = Random(request.uuid)

    def read(self, tokens: Sequence[int], num_prompt_tokens: int, most: int) -> int:
        for token in tokens[self._num_digested :]:
            self._digest = after(self._digest, token)
        self._num_digested = len(tokens)
        return 0

    def guesses(self, tokens: Sequence[int], count: int) -> list[int]:
        sampling, digest = self._request.sampling, self._digest
        first, guessed = len(tokens) - self._request.num_prompt_tokens, list[int]()
        for place in range(first, first + count):
            token = token_at(likeliest(digest), place, sampling.seed if sampling.temperature else None)
            if self._random.random() >= self._right_share:
                token = self._random.choice([other for other in (EOS, *range(3, VOCAB)) if other != token])
            guessed.append(token)
            digest = after(digest, token)
        return guessed


def speculation(right_share: float | None) -> type[Speculation]:
    """Returns what takes the place of ``Speculation``, with so large a share of right drafts.

    Without a share, drafts come from requests' own texts.
    """
    if right_share is None:
        return Speculation
    share = right_share

    class KnowingSpeculation(Speculation):
        def add_drafts(self, plan: BatchPlan, budget: StepBudget) -> None:
            for work in plan.work:
                if not isinstance(work.request.own_text, KnownText):
                    work.request.own_text = KnownText(work.request, share)
            super().add_drafts(plan, budget)

    return KnowingSpeculation
