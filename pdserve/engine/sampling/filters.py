"""Filters a distribution: top-k, top-p and min-p, each defined once, in the order in which they apply.

Complete rows are filtered together, on the device. Between the strings and numbers of JSON, a grammar leaves a few
tokens out of many thousand: among so few, a plain definition is fast enough, one row at a time and on the host. Each
filter has both forms side by side, and one condition. A filter that is added to ``FILTERS`` takes part wherever tokens
are drawn, and in the choice of whether a grammar may be asked after a token is drawn (``cuts_any``).

A wide top-p keeps the heaviest tokens of a row without sorting them, by radix select (``_keep_heaviest``): the bits of
non-negative floats order as integers do, so a histogram over the upper bits says in which of its buckets enough weight
is reached, and the next bits need only be looked at inside that bucket. After three passes, of which only the first
sees the complete vocabulary, the limit lies among tokens of equal weight; the first ids of those are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.host_copies import array_to_device, to_device

BEST_FEW = 64
"""Top-p looks at so many best tokens first; a wider nucleus takes about 5 times as long."""

_RADIX_LARGEST_KEY = 2**31 - 1
_RADIX_FIRST_SHIFT = 20
_RADIX_FIRST_BUCKETS = 2**11
_RADIX_LATER_SHIFTS = (10, 0)
_RADIX_LATER_BUCKETS = 2**10

Weights = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


class Filter(Protocol):
    """Leaves some tokens of a distribution, the best one at least. Weights say how likely tokens are.

    The weights of the others become zero.
    """

    def cuts(self, sampling: SamplingParams, tokens: float) -> bool:
        """Returns whether the parameters may leave out some of so many tokens."""

    def of_rows(
        self, weights: torch.Tensor, logits: Callable[[], torch.Tensor], sampling: Sequence[SamplingParams]
    ) -> torch.Tensor:
        """Returns the weights that are left of rows that are all cut, fp32 ``[rows, vocab_size]``.

        ``logits`` returns the rows' logits, divided by their temperatures.
        """

    def of_few(self, weights: Weights, logits: Logits, sampling: SamplingParams) -> None:
        """Changes the weights of a few tokens to those that are left. The best token has a weight of one."""


class TopK:
    """Leaves the best tokens, ``top_k`` of them, and those that equal the last one."""

    def cuts(self, sampling: SamplingParams, tokens: float) -> bool:
        return 0 < sampling.top_k < tokens

    def of_rows(
        self, weights: torch.Tensor, logits: Callable[[], torch.Tensor], sampling: Sequence[SamplingParams]
    ) -> torch.Tensor:
        own = logits()
        best = own.topk(max(params.top_k for params in sampling)).values
        last = _places(own, [params.top_k - 1 for params in sampling]).unsqueeze(1)
        return weights * (own >= best.gather(1, last))

    def of_few(self, weights: Weights, logits: Logits, sampling: SamplingParams) -> None:
        weights[logits < np.partition(logits, -sampling.top_k)[-sampling.top_k]] = 0.0


class TopP:
    """Leaves the fewest likeliest tokens whose share reaches ``top_p``, at least the best one (Holtzman et al., 2020).

    Of equally likely tokens those with lower ids come first.
    """

    def cuts(self, sampling: SamplingParams, tokens: float) -> bool:
        return sampling.top_p < 1

    def of_rows(
        self, weights: torch.Tensor, logits: Callable[[], torch.Tensor], sampling: Sequence[SamplingParams]
    ) -> torch.Tensor:
        targets = weights.sum(-1, dtype=torch.float64) * vector(weights, [params.top_p for params in sampling])
        left, settled = _nucleus_among_best(weights, targets)
        wide = [row for row, done in enumerate(settled.tolist()) if not done]
        if wide:
            left = _replaced(left, wide, _keep_heaviest(_selected(weights, wide), _selected(targets, wide)))
        return left

    def of_few(self, weights: Weights, logits: Logits, sampling: SamplingParams) -> None:
        order = np.argsort(-weights, kind="stable")
        sorted_weights = weights[order]
        beyond = order[sorted_weights.cumsum() - sorted_weights >= sampling.top_p * weights.sum()]
        weights[beyond[beyond != order[0]]] = 0.0


class MinP:
    """Leaves the tokens that are at least ``min_p`` times as likely as the best one."""

    def cuts(self, sampling: SamplingParams, tokens: float) -> bool:
        return sampling.min_p > 0

    def of_rows(
        self, weights: torch.Tensor, logits: Callable[[], torch.Tensor], sampling: Sequence[SamplingParams]
    ) -> torch.Tensor:
        least = weights.amax(-1, keepdim=True) * column(weights, [params.min_p for params in sampling])
        return weights * (weights >= least)

    def of_few(self, weights: Weights, logits: Logits, sampling: SamplingParams) -> None:
        weights[weights < sampling.min_p] = 0.0


FILTERS: tuple[Filter, ...] = (TopK(), TopP(), MinP())
"""All filters, in the order in which they apply."""


def cuts_any(sampling: SamplingParams) -> bool:
    """Returns whether a filter may leave out tokens, of however many there are."""
    return any(each.cuts(sampling, math.inf) for each in FILTERS)


def filter_rows(weights: torch.Tensor, logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """Returns the weights ``[rows, vocab_size]`` after each row's filters. ``weights`` itself may be changed, too.

    Waits for a GPU only where a row has a top-p.
    """
    for each in FILTERS:
        rows = [row for row, params in enumerate(sampling) if each.cuts(params, weights.shape[-1])]
        if rows:
            own = [sampling[row] for row in rows]
            left = each.of_rows(_selected(weights, rows), partial(_selected, logits, rows), own)
            weights = _replaced(weights, rows, left)
    return weights


def filter_few(weights: Weights, logits: Logits, sampling: SamplingParams) -> None:
    """Changes the weights of a few tokens to those that the filters leave. The best token has a weight of one."""
    for each in FILTERS:
        if each.cuts(sampling, len(weights)):
            each.of_few(weights, logits, sampling)


def vector(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """Returns a number for each row, float64 ``[rows]``, on the device of ``like``."""
    return array_to_device(np.array(values, np.float64), like.device)


def column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """Returns a number for each row, ``[rows, 1]``, on the device and in the format of ``like``."""
    return vector(like, values).to(like.dtype).unsqueeze(1)


def _selected(every: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return every if len(rows) == len(every) else every.index_select(0, _places(every, rows))


def _replaced(every: torch.Tensor, rows: list[int], part: torch.Tensor) -> torch.Tensor:
    """Returns ``every`` with ``part`` in place of these rows; ``every`` may be changed."""
    if len(rows) == len(every):
        return part
    return every.index_copy_(0, _places(every, rows), part)


def _places(like: torch.Tensor, rows: list[int]) -> torch.Tensor:
    (places,) = to_device([rows], like.device)
    return places.long()


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


def _keep_heaviest(weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns weights with zeros for all but the fewest heaviest tokens whose sum reaches their row's target.

    ``weights`` is fp32 ``[rows, tokens]``, none negative. ``targets`` is float64 ``[rows]``; a target above a row's
    complete weight counts as that weight. At least one token stays.
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
    left = weights * (keys <= threshold.unsqueeze(1))
    ranks = torch.arange(len(row), device=row.device) - torch.searchsorted(row, row)
    enough = before[row] + ranks * weights[row, token].double() >= targets[row]
    surplus = enough & (ranks > 0)
    left[row[surplus], token[surplus]] = 0
    return left


def _reached(mass: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first bucket of each row by whose end the target is reached, and the mass before that bucket."""
    ends = mass.cumsum(-1)
    # Sums in another order may miss the target by a rounding; and an empty bucket reaches nothing.
    wanted = torch.minimum(targets.unsqueeze(1), ends[:, -1:]).clamp(min=torch.finfo(torch.float64).tiny)
    at = torch.searchsorted(ends, wanted).clamp(max=mass.shape[1] - 1)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(1, at)
    return at.squeeze(1), before.squeeze(1)
