"""Brings the numbers of one step to the device, and back, by copies for which nothing waits.

Most of what goes to the device is in one buffer. The host waits for what comes back only when it reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Numbers = Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]] | np.ndarray[Any, np.dtype[np.int32]]

ALIGNMENT = 4
"""Parts begin at multiples of so many int32 values (16 bytes): Triton compiles anew for pointers aligned otherwise."""


def packed_starts(lengths: Sequence[int]) -> list[int]:
    """Returns where parts of these lengths begin in one aligned buffer, and, last, its length."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + -(-length // ALIGNMENT) * ALIGNMENT)
    return starts


def packed(parts: Sequence[Numbers], starts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns the parts as one int32 tensor in host memory, up to the end of the last one; page-locked for a GPU.

    Page-locked memory comes from torch's cache, which does not give it out again before the copies from it are done.
    """
    end = starts[len(parts) - 1] + len(parts[-1])
    host = torch.empty(end, dtype=torch.int32, pin_memory=device.type == "cuda")
    values = host.numpy()
    for part, start in zip(parts, starts, strict=False):
        values[start : start + len(part)] = part
    return host


def to_device(parts: Sequence[Numbers], device: torch.device) -> list[torch.Tensor]:
    """Returns each part as an int32 tensor on the device."""
    starts = packed_starts([len(part) for part in parts])
    moved = packed(parts, starts, device).to(device, non_blocking=True)
    return [moved[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]


def array_to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Returns a tensor with an array's numbers on the device. On a CPU it shares the array's memory."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def block_ids(blocks: Sequence[int], count: int, begin: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the first ``count`` of ``blocks`` without the ``begin`` first ones, valid until the next call for the
    same.

    Blocks that have ``first_ids`` give these themselves, so that a long table is not made an array in each step.
    """
    kept = getattr(blocks, "first_ids", None)
    if kept is None:
        return np.asarray(blocks[begin:count], np.int32)
    ids: np.ndarray[Any, np.dtype[np.int32]] = kept(count, begin)
    return ids


def joined(parts: Sequence[np.ndarray[Any, np.dtype[np.int32]]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the numbers of all parts, one part after another."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


class HostCopy:
    """A tensor on its way to the host, behind the kernels that compute it."""

    def __init__(self, values: torch.Tensor) -> None:
        self._host, self._there = values, None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotation
            self._there.record()

    def read(self) -> torch.Tensor:
        if self._there is not None:
            self._there.synchronize()
        return self._host
