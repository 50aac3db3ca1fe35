"""Holds the drafts that the model's own MTP layers have made of one answer, and how good such drafts are."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.config import SchedulerConfig, Speculate
from pdserve.engine.speculation.rates import Rates

_FIRST_RATE = 0.7
_FALLS = 0.85
"""At first, each draft is assumed to be right so many times as often as the one before it."""


def by_model(config: SchedulerConfig, has_layer: bool) -> bool:
    """Returns whether an engine has the model draft tokens, which may have the layer for it or not.

    Where the layer is asked for, and the files have none, the model is not loaded.
    """
    return config.speculates is Speculate.MTP or (config.speculates is Speculate.AUTO and has_layer)


def first_rates(most_drafts: int) -> tuple[float, ...]:
    """Returns the rates that are assumed at first, by the place among the drafts of a step."""
    return tuple(_FIRST_RATE * _FALLS**place for place in range(most_drafts))


class ModelDrafts:
    """The latest drafts of one request."""

    __slots__ = ("_at", "_drafts", "_rates")

    def __init__(self, rates: Rates) -> None:
        """``rates`` are those of the engine, by place (``first_rates``)."""
        self._rates = rates.of_request()
        self._at = 0
        self._drafts: Sequence[int] = ()

    def put(self, at: int, drafts: Sequence[int]) -> None:
        """Takes what may follow the first ``at`` tokens of the request."""
        self._at, self._drafts = at, drafts

    def read(self, tokens: Sequence[int]) -> None:
        """Compares drafts with the tokens that have come since, and drops them if any has."""
        known = tokens[self._at : self._at + len(self._drafts)]
        for place, token in enumerate(known):
            right = self._drafts[place] == token
            self._rates.note(place, right)
            if not right:
                break
        if known:
            self._drafts = ()

    def guesses(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Returns up to ``count`` tokens that are guessed to follow ``tokens``."""
        return self._drafts[:count] if self._at == len(tokens) else ()

    def rate(self, number: int = 0) -> float:
        """Returns how likely the draft after ``number`` right ones is right."""
        return self._rates.rate(number)
