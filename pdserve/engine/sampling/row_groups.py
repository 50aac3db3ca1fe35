"""Divides the rows of a step into groups that are computed together.

A group's rows are copied, and what is computed of them takes several times as much memory as they do. So groups bound
the memory that sampling takes, whatever the number of rows.
"""

from __future__ import annotations

import torch

CPU_LOGITS_AT_ONCE = 2**17
"""On a CPU, groups have about so many logits, which stay in its caches (3 times as fast)."""
GPU_LOGITS_AT_ONCE = 2**23
"""On a GPU, groups have at most so many logits, but at least one row."""
BYTES_PER_LOGIT = 96
"""What is computed of a group takes at most this, its copy of the logits included."""


def row_groups(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """Divides ``rows`` into the groups that are computed together, in their order."""
    if not rows:
        return []
    at_once = CPU_LOGITS_AT_ONCE if logits.device.type == "cpu" else GPU_LOGITS_AT_ONCE
    size = max(at_once // logits.shape[-1], 1)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def sampling_bytes(rows: int, vocab_size: int) -> int:
    """Returns the most memory that the sampling of ``rows`` rows takes on a GPU besides their logits."""
    return BYTES_PER_LOGIT * min(rows * vocab_size, max(GPU_LOGITS_AT_ONCE, vocab_size))
