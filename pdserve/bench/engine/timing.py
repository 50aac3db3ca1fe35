"""How long something takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_WARM_UP = 2
_LEAST = 3


def seconds_of(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Median time of ``call`` with all that it starts on ``device``, over at least three calls and ``budget_s``."""
    for _ in range(_WARM_UP):
        call()
    _finish(device)
    times: list[float] = []
    while len(times) < _LEAST or sum(times) < budget_s:
        start = time.perf_counter()
        call()
        _finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
