"""Draw tokens: temperature, top-k, top-p and min-p in turn, then the distribution is inverted at one number a row.

The number is a hash of seed and position, so the choice is the same alone or in a batch, on a prefill or a decode node,
and after a preemption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from pdserve.engine.radix_select import keep_heaviest
from pdserve.wire.sampling import SamplingParams
from pdserve_kernels.staging import stage

BEST_FEW = 64
"""Top-p looks at so many best tokens first; a wider nucleus takes about 5 times as long."""

INVERSION_BLOCK = 256
"""First the block of so many tokens is found, then the token in it: a running sum over everything takes longer."""


def uniform(seed: int, position: int) -> float:
    """In [0, 1), the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(logits: torch.Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """One token id for each row of ``logits`` (fp32 ``[rows, vocab_size]``, overwritten), by its own parameters.

    Returns int64 ``[rows]`` on the device of ``logits``. Waits for a GPU only where a row has a top-p.
    """
    # Shifted first, so that a small temperature cannot overflow.
    logits -= logits.amax(-1, keepdim=True)
    logits /= _column(logits, [params.temperature for params in sampling])
    weights = _top_k(logits.softmax(-1), logits, [params.top_k for params in sampling])
    weights = top_p(weights, [params.top_p for params in sampling])
    weights = _min_p(weights, [params.min_p for params in sampling])
    return _invert(weights, uniforms)


def _top_k(weights: torch.Tensor, logits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Zeros for all but the best ``counts[row]`` tokens and their equals; 0 keeps all."""
    rows = [row for row, count in enumerate(counts) if 0 < count < weights.shape[-1]]
    if not rows:
        return weights
    logits = _part(logits, rows)
    best = logits.topk(max(counts[row] for row in rows)).values
    last = stage([[counts[row] - 1 for row in rows]], logits.device)[0].long().unsqueeze(1)
    return _replaced(weights, rows, _part(weights, rows) * (logits >= best.gather(1, last)))


def top_p(weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """Zeros for all but the fewest most likely tokens whose share of the weight reaches ``shares[row]``.

    At least the best token stays; of equally likely ones those with lower ids come first (Holtzman et al., 2020).
    """
    rows = [row for row, share in enumerate(shares) if share < 1]
    if not rows:
        return weights
    part = _part(weights, rows)
    targets = part.sum(-1, dtype=torch.float64) * _vector(weights, [shares[row] for row in rows])
    kept, settled = _nucleus_among_best(part, targets)
    wide = [row for row, done in enumerate(settled.tolist()) if not done]
    if wide:
        kept = _replaced(kept, wide, keep_heaviest(_part(part, wide), targets[wide]))
    return _replaced(weights, rows, kept)


def _nucleus_among_best(weights: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nucleus where it lies within the best few tokens, as it mostly does, and for which rows it does."""
    best, ids = weights.topk(min(BEST_FEW, weights.shape[-1]))
    limit = best.gather(
        1, torch.searchsorted(best.cumsum(-1, dtype=torch.float64), targets.unsqueeze(1)).clamp(max=best.shape[1] - 1)
    )
    # Beyond the last of the few there may be others like it.
    settled = (limit > best[:, -1:]).squeeze(1)
    # Equal ones in the order of their ids.
    ids, order = ids.sort(-1)
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    before = best.cumsum(-1, dtype=torch.float64) - best
    inside = before < targets.unsqueeze(1)
    inside[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, ids.gather(1, order), best * inside), settled


def _min_p(weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """Zeros for all that is less likely than ``shares[row]`` times the best."""
    if not any(shares):
        return weights
    return weights * (weights >= weights.amax(-1, keepdim=True) * _column(weights, shares))


def _invert(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """The tokens at which the cumulative distributions pass these numbers."""
    missing = -weights.shape[-1] % INVERSION_BLOCK
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    blocks = padded.view(len(weights), -1, INVERSION_BLOCK)
    ends = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    wanted = ends[:, -1:] * _vector(weights, uniforms).unsqueeze(1)
    block = _passed(ends, wanted)
    left = wanted - torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks.take_along_dim(block.unsqueeze(-1), 1).squeeze(1).cumsum(-1, dtype=torch.float64)
    at = _passed(inside, left)
    return (block * INVERSION_BLOCK + at).squeeze(1)


def _passed(ends: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The first place in each row where the running sum is above ``wanted``, or at least where it stops rising."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(ends, wanted, right=True), last)


def _vector(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    on_gpu = like.device.type == "cuda"
    return torch.tensor(values, dtype=torch.float64, pin_memory=on_gpu).to(like.device, non_blocking=True)


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return _vector(like, values).to(like.dtype).unsqueeze(1)


def _part(whole: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return whole if len(rows) == len(whole) else whole[rows]


def _replaced(whole: torch.Tensor, rows: list[int], part: torch.Tensor) -> torch.Tensor:
    """``whole`` with ``part`` for these rows; may change it."""
    if len(rows) == len(whole):
        return part
    whole[rows] = part
    return whole
