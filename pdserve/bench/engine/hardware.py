"""Measures what a device can do at best, as yardsticks for the other figures, and how long a call takes on it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdserve.bench.report import Better, Figure, Row, Unit, measured

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
    triad_bytes_per_s: float
    """The bytes of ``a = b + s * c``: two of three are read."""
    flops: float
    """The rate of a large matrix product in the model's dtype."""
    byte_ops: float = math.nan
    """The rate of a large product of bytes, if it was measured: weights in blocks are multiplied as such."""

    @property
    def bytes_per_s(self) -> float:
        """The highest rate at which memory was read and written."""
        return max(self.copy_bytes_per_s, self.triad_bytes_per_s)

    def row(self) -> Row:
        figures = measured(
            Figure("copy, read + write", self.copy_bytes_per_s / 1e9, Unit.GB_PER_S, Better.HIGHER),
            Figure("triad, read + write", self.triad_bytes_per_s / 1e9, Unit.GB_PER_S, Better.HIGHER),
            Figure("matrix product", self.flops / 1e12, Unit.TFLOP_PER_S, Better.HIGHER),
            Figure("product of bytes", self.byte_ops / 1e12, Unit.TOP_PER_S, Better.HIGHER),
        )
        return Row("hardware", {"device": self.device.type, "threads": torch.get_num_threads()}, figures)


def measure(
    device: torch.device, dtype: torch.dtype, copy_mib: int, budget_s: float, *, byte_products: bool = False
) -> Hardware:
    """Measures the limits of ``device``. Each of three buffers has ``copy_mib``; no cache should hold them all."""
    source = torch.ones(copy_mib * 2**20 // 4, dtype=torch.float32, device=device)
    target, other = torch.empty_like(source), torch.ones_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), device, budget_s)
    triad_s = seconds_of(lambda: torch.add(source, other, alpha=3.0, out=target), device, budget_s)
    side = _SIDE[device.type]
    left = torch.randn(side, side, device=device).to(dtype)
    product_s = seconds_of(lambda: left @ left, device, budget_s)
    byte_ops = 2 * side**3 / _byte_product_s(side, device, budget_s) if byte_products else math.nan
    return Hardware(device, 2 * source.nbytes / copy_s, 3 * source.nbytes / triad_s, 2 * side**3 / product_s, byte_ops)


def _byte_product_s(side: int, device: torch.device, budget_s: float) -> float:
    left = torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device)
    return seconds_of(lambda: torch._int_mm(left, left), device, budget_s)
