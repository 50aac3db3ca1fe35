"""Chooses among the few tokens that a grammar leaves, instead of in a row as long as the vocabulary.

Between the strings and numbers of JSON, a grammar leaves a few tokens out of many thousand. Among so few, a plain
definition of each parameter is fast enough, one row at a time and on the host. ``drawing`` has the same for whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.sampling.grammar_matcher import TokenBits
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.host_copies import to_device

MAX_BYTES = 512
"""More bytes of a mask that name tokens do not count as few: these can name 4,096 tokens."""

TokenIds = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


def few_tokens(bits: TokenBits) -> TokenIds | None:
    """Returns the tokens that a mask names, in the order of their ids; None if they are many."""
    if np.count_nonzero(bits) > MAX_BYTES:
        return None
    return np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_))


def gathered(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[TokenIds]) -> list[Logits]:
    """Returns the logits of each row's tokens, on the host. Waits for a GPU."""
    if logits.device.type == "cpu":
        whole: Logits = logits.numpy()
        return [whole[row][ids] for row, ids in zip(rows, tokens, strict=True)]
    counts = [len(ids) for ids in tokens]
    places = to_device([np.repeat(rows, counts).tolist(), np.concatenate(tokens).tolist()], logits.device)
    picked: Logits = logits[places[0].long(), places[1].long()].cpu().numpy()
    return np.split(picked, np.cumsum(counts)[:-1])


def best_or_drawn(logits: Logits, sampling: SamplingParams, uniform: float | None) -> int | None:
    """Returns the place of the best token, or with ``uniform`` of the one at which the distribution passes it.

    Returns None if none of the logits is finite, or one of them is not a number.
    """
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return None
    if uniform is None:
        return best
    weights = np.exp((logits.astype(np.float64) - logits[best]) / sampling.temperature)
    if 0 < sampling.top_k < len(weights):
        weights[logits < np.partition(logits, -sampling.top_k)[-sampling.top_k]] = 0.0
    if sampling.top_p < 1:
        weights = _nucleus(weights, sampling.top_p)
    if sampling.min_p:
        weights[weights < sampling.min_p] = 0.0  # the best token has a weight of one
    ends = weights.cumsum()
    last = int(ends.searchsorted(ends[-1]))
    return min(int(ends.searchsorted(uniform * ends[-1], side="right")), last)


def _nucleus(weights: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.float64]:
    """Returns weights with zeros for all but the fewest likeliest tokens that reach the share, the first of equals."""
    order = np.argsort(-weights, kind="stable")
    sorted_weights = weights[order]
    outside = order[sorted_weights.cumsum() - sorted_weights >= share * weights.sum()]
    weights[outside[outside != order[0]]] = 0.0
    return weights
