"""Mean and percentiles: the one place that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of measured values, in their own unit. NaN where there were none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float


def distribution(values: Sequence[float]) -> Distribution:
    """Percentiles interpolate between neighbours, as numpy's do and with it most load generators'."""
    if not values:
        nan = float("nan")
        return Distribution(0, nan, nan, nan, nan, nan)
    p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
    return Distribution(len(values), float(np.mean(values)), p50, p90, p99, float(max(values)))
