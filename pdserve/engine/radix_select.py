"""The fewest heaviest tokens of each row that together weigh enough, without sorting.

Radix select: the bits of non-negative floats order as integers do, so a histogram over the upper bits says in which of
its buckets enough is reached, and the next bits need only be looked at inside that bucket. After three passes, of which
only the first sees the whole vocabulary, the limit lies among tokens of equal weight; the first ids of those are taken.
"""

from __future__ import annotations

import torch

LARGEST_KEY = 2**31 - 1
FIRST_SHIFT = 20
FIRST_BUCKETS = 2**11
LATER_SHIFTS = (10, 0)
LATER_BUCKETS = 2**10


def keep_heaviest(weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A copy of ``weights`` with zeros for all but the fewest heaviest tokens whose sum reaches their row's target.

    ``weights`` is fp32 ``[rows, tokens]``, none negative; ``targets`` float64 ``[rows]``, where one above a row's whole
    weight counts as that weight. At least one token stays.
    """
    rows = len(weights)
    keys = LARGEST_KEY - weights.view(torch.int32)
    bucket = keys >> FIRST_SHIFT
    mass = targets.new_zeros(rows, FIRST_BUCKETS).scatter_add_(1, bucket.long(), weights.double())
    at, before = _reached(mass, targets)
    row, token = (bucket == at.unsqueeze(1)).nonzero(as_tuple=True)
    for shift in LATER_SHIFTS:
        digit = (keys[row, token] >> shift) & (LATER_BUCKETS - 1)
        mass = targets.new_zeros(rows * LATER_BUCKETS)
        mass.scatter_add_(0, row * LATER_BUCKETS + digit, weights[row, token].double())
        at, more = _reached(mass.view(rows, LATER_BUCKETS), targets - before)
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
    """The first bucket of each row by whose end the target is reached, and the mass before that bucket."""
    ends = mass.cumsum(-1)
    # Sums in another order may miss the target by a rounding; and an empty bucket reaches nothing.
    wanted = torch.minimum(targets.unsqueeze(1), ends[:, -1:]).clamp(min=torch.finfo(torch.float64).tiny)
    at = torch.searchsorted(ends, wanted).clamp(max=mass.shape[1] - 1)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, at)
    return at.squeeze(1), before.squeeze(1)
