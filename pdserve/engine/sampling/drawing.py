"""Draws tokens: applies the temperature and the ``filters``, then inverts the distribution at one number a row.

The number is a hash of seed and position, so the token is the same alone or in a batch, on a prefill or a decode node,
and after a preemption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from pdserve.engine.sampling.filters import Logits, column, filter_few, filter_rows, vector
from pdserve.wire.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would give the same token, or overflow."""

INVERSION_BLOCK = 256
"""First the block of so many tokens is found, then the token in it: a running sum over everything takes longer."""


def is_drawn(sampling: SamplingParams) -> bool:
    """Returns whether a token is drawn; otherwise it is the best one."""
    return sampling.temperature >= GREEDY_BELOW


def uniform(seed: int, position: int, *, again: bool = False) -> float:
    """Returns a number in [0, 1), the same on every machine; for a second draw at one position, another one."""
    digest = hashlib.blake2b(f"{seed}:{position}{':again' if again else ''}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits: torch.Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """Draws a token for each row of ``logits`` (fp32 ``[rows, vocab_size]``, overwritten) by the row's parameters.

    Returns token ids, int64 ``[rows]``, on the device of ``logits``. Waits for a GPU only where a row has a top-p.
    """
    # The shift comes first, so that a small temperature cannot overflow.
    logits -= logits.amax(-1, keepdim=True)
    logits /= column(logits, [params.temperature for params in sampling])
    return _invert(filter_rows(logits.softmax(-1), logits, sampling), uniforms)


def best_or_drawn(logits: Logits, sampling: SamplingParams, uniform: float | None) -> int | None:
    """Returns the place of the best of a few tokens, or with ``uniform`` of that at which the distribution passes it.

    Returns None if none of the logits is finite, or one of them is not a number.
    """
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return None
    if uniform is None:
        return best
    weights = np.exp((logits.astype(np.float64) - logits[best]) / sampling.temperature)
    filter_few(weights, logits, sampling)
    ends = weights.cumsum()
    last = int(ends.searchsorted(ends[-1]))
    return min(int(ends.searchsorted(uniform * ends[-1], side="right")), last)


def _invert(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """Returns the tokens at which the cumulative distributions pass these numbers."""
    missing = -weights.shape[-1] % INVERSION_BLOCK
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    blocks = padded.view(len(weights), -1, INVERSION_BLOCK)
    ends = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    wanted = ends[:, -1:] * vector(weights, uniforms).unsqueeze(1)
    block = _passed(ends, wanted)
    left = wanted - torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks.take_along_dim(block.unsqueeze(-1), 1).squeeze(1).cumsum(-1, dtype=torch.float64)
    at = _passed(inside, left)
    return (block * INVERSION_BLOCK + at).squeeze(1)


def _passed(ends: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns the first place in each row where the running sum is above ``wanted``, or where it stops rising."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(ends, wanted, right=True), last)
