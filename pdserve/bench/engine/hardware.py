"""Measures what a device can do at best, as yardsticks for the other figures, and how long a call takes on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.bench.report import Better, Figure, Row, Unit

_WARM_UP = 2
_LEAST = 3


def seconds_of(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Returns the median time of ``call`` and its work on ``device`` over at least 3 calls and ``budget_s``."""
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


_SIDE = {"cpu": 2048, "cuda": 8192}
"""The side of the square matrices, which are large enough for arithmetic to be the limit."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The measured limits of one device."""

    device: torch.device
    copy_bytes_per_s: float
    """The bytes read plus the bytes written: a kernel that only reads could read as many in that time."""
    flops: float
    """The rate of a large matrix product in the model's dtype."""

    def row(self) -> Row:
        figures = (
            Figure("copy, read + write", self.copy_bytes_per_s / 1e9, Unit.GB_PER_S, Better.HIGHER),
            Figure("matrix product", self.flops / 1e12, Unit.TFLOP_PER_S, Better.HIGHER),
        )
        return Row("hardware", {"device": self.device.type, "threads": torch.get_num_threads()}, figures)


def measure(device: torch.device, dtype: torch.dtype, copy_mib: int, budget_s: float) -> Hardware:
    source = torch.ones(copy_mib * 2**20 // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), device, budget_s)
    side = _SIDE[device.type]
    left = torch.randn(side, side, device=device).to(dtype)
    product_s = seconds_of(lambda: left @ left, device, budget_s)
    return Hardware(device, 2 * source.nbytes / copy_s, 2 * side**3 / product_s)
