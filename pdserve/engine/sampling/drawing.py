"""Draws tokens: applies temperature, top-k, top-p and min-p, then inverts the distribution at one number a row.

The number is a hash of seed and position, so the token is the same alone or in a batch, on a prefill or a decode node,
and after a preemption.

A wide top-p keeps the heaviest tokens of a row without sorting them, by radix select (``_keep_heaviest``): the bits of
non-negative floats order as integers do, so a histogram over the upper bits says in which of its buckets enough weight
is reached, and the next bits need only be looked at inside that bucket. After three passes, of which only the first
sees the whole vocabulary, the limit lies among tokens of equal weight; the first ids of those are taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.host_copies import array_to_device, to_device

BEST_FEW = 64
"""Top-p looks at so many best tokens first; a wider nucleus takes about 5 times as long."""

INVERSION_BLOCK = 256
"""First the block of so many tokens is found, then the token in it: a running sum over everything takes longer."""

_RADIX_LARGEST_KEY = 2**31 - 1
_RADIX_FIRST_SHIFT = 20
_RADIX_FIRST_BUCKETS = 2**11
_RADIX_LATER_SHIFTS = (10, 0)
_RADIX_LATER_BUCKETS = 2**10


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
    logits /= _column(logits, [params.temperature for params in sampling])
    weights = _top_k(logits.softmax(-1), logits, [params.top_k for params in sampling])
    weights = top_p(weights, [params.top_p for params in sampling])
    weights = _min_p(weights, [params.min_p for params in sampling])
    return _invert(weights, uniforms)


def _top_k(weights: torch.Tensor, logits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns weights with zeros for all but the best ``counts[row]`` tokens and their equals; 0 keeps all."""
    rows = [row for row, count in enumerate(counts) if 0 < count < weights.shape[-1]]
    if not rows:
        return weights
    logits = _selected(logits, rows)
    best = logits.topk(max(counts[row] for row in rows)).values
    last = _places(logits, [counts[row] - 1 for row in rows]).unsqueeze(1)
    return _replaced(weights, rows, _selected(weights, rows) * (logits >= best.gather(1, last)))


def top_p(weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """Returns weights with zeros for all but the fewest likeliest tokens whose share reaches ``shares[row]``.

    At least the best token stays; of equally likely ones those with lower ids come first (Holtzman et al., 2020).
    """
    rows = [row for row, share in enumerate(shares) if share < 1]
    if not rows:
        return weights
    part = _selected(weights, rows)
    targets = part.sum(-1, dtype=torch.float64) * _vector(weights, [shares[row] for row in rows])
    kept, settled = _nucleus_among_best(part, targets)
    wide = [row for row, done in enumerate(settled.tolist()) if not done]
    if wide:
        kept = _replaced(kept, wide, _keep_heaviest(_selected(part, wide), _selected(targets, wide)))
    return _replaced(weights, rows, kept)


def _nucleus_among_best(weights: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's nucleus as far as it lies within the best few tokens, and for which rows that is all of it."""
    best, ids = weights.topk(min(BEST_FEW, weights.shape[-1]))
    limit = best.gather(
        1, torch.searchsorted(best.cumsum(-1, dtype=torch.float64), targets.unsqueeze(1)).clamp(max=best.shape[1] - 1)
    )
    # Tokens beyond the last of the few may be as likely as that one.
    settled = (limit > best[:, -1:]).squeeze(1)
    # Equally likely tokens are sorted by their ids.
    ids, order = ids.sort(-1)
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    before = best.cumsum(-1, dtype=torch.float64) - best
    inside = before < targets.unsqueeze(1)
    inside[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, ids.gather(1, order), best * inside), settled


def _min_p(weights: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
    """Returns weights with zeros for all tokens that are less likely than ``shares[row]`` times the best."""
    if not any(shares):
        return weights
    return weights * (weights >= weights.amax(-1, keepdim=True) * _column(weights, shares))


def _invert(weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """Returns the tokens at which the cumulative distributions pass these numbers."""
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
    """Returns the first place in each row where the running sum is above ``wanted``, or where it stops rising."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(ends, wanted, right=True), last)


def _vector(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return array_to_device(np.array(values, np.float64), like.device)


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return _vector(like, values).to(like.dtype).unsqueeze(1)


def _selected(whole: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return whole if len(rows) == len(whole) else whole.index_select(0, _places(whole, rows))


def _replaced(whole: torch.Tensor, rows: list[int], part: torch.Tensor) -> torch.Tensor:
    """Returns ``whole`` with ``part`` in place of these rows; ``whole`` may be changed."""
    if len(rows) == len(whole):
        return part
    return whole.index_copy_(0, _places(whole, rows), part)


def _places(like: torch.Tensor, rows: list[int]) -> torch.Tensor:
    (places,) = to_device([rows], like.device)
    return places.long()


def _keep_heaviest(weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns weights with zeros for all but the fewest heaviest tokens whose sum reaches their row's target.

    ``weights`` is fp32 ``[rows, tokens]``, none negative. ``targets`` is float64 ``[rows]``; a target above a row's
    whole weight counts as that weight. At least one token stays.
    """
    rows = len(weights)
    keys = _RADIX_LARGEST_KEY - weights.view(torch.int32)
    bucket = keys >> _RADIX_FIRST_SHIFT
    mass = targets.new_zeros(rows, _RADIX_FIRST_BUCKETS).scatter_add_(1, bucket.long(), weights.double())
    at, before = _reached(mass, targets)
    row, token = (bucket == at.unsqueeze(1)).nonzero(as_tuple=True)
    for shift in _RADIX_LATER_SHIFTS:
        digit = (keys[row, token] >> shift) & (_RADIX_LATER_BUCKETS - 1)
        mass = targets.new_zeros(rows * _RADIX_LATER_BUCKETS)
        mass.scatter_add_(0, row * _RADIX_LATER_BUCKETS + digit, weights[row, token].double())
        at, more = _reached(mass.view(rows, _RADIX_LATER_BUCKETS), targets - before)
        before = before + more
        tied = digit == at[row]
        row, token = row[tied], token[tied]
    threshold = keys.new_empty(rows)
    threshold[row] = keys[row, token]
    kept = weights * (keys <= threshold.unsqueeze(1))
    ranks = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)
    enough = before[row] + ranks * weights[row, token].double() >= targets[row]
    surplus = enough & (ranks > 0)
    kept[row[surplus], token[surplus]] = 0
    return kept


def _reached(mass: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first bucket of each row by whose end the target is reached, and the mass before that bucket."""
    ends = mass.cumsum(-1)
    # Sums in another order may miss the target by a rounding; and an empty bucket reaches nothing.
    wanted = torch.minimum(targets.unsqueeze(1), ends[:, -1:]).clamp(min=torch.finfo(torch.float64).tiny)
    at = torch.searchsorted(ends, wanted).clamp(max=mass.shape[1] - 1)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, at)
    return at.squeeze(1), before.squeeze(1)
