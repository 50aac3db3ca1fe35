"""The interval of a figure over rounds, by drawing the rounds anew with replacement (Efron's bootstrap)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from pdserve.bench.report import Figure, Unit

LOW, HIGH = ", low", ", high"
"""The ends of a figure's interval, behind the name of the figure."""
_DRAWS = 1000
_TAIL = 0.05
"""A figure lies below its interval, or above it, with this probability."""


def interval(name: str, rounds: int, value_of: Callable[[Sequence[int]], float]) -> list[Figure]:
    """Returns the two ends of the interval of a ratio; nothing for one round, which has none.

    ``value_of`` is given the numbers of the rounds that count, some of them twice and more. It returns NaN where these
    rounds have no value.
    """
    if rounds < 2:
        return []
    chance = random.Random(0)  # noqa: S311  # rounds must be drawn alike, not secretly
    draws = (value_of(chance.choices(range(rounds), k=rounds)) for _ in range(_DRAWS))
    drawn = sorted(value for value in draws if not math.isnan(value))
    if not drawn:
        return []
    tail = int(_TAIL * len(drawn))
    return [Figure(name + LOW, drawn[tail], Unit.RATIO), Figure(name + HIGH, drawn[-1 - tail], Unit.RATIO)]
