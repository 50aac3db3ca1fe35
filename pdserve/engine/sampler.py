"""Choose the next token of each request.

A sampled token is a function of the request's logits, its parameters, its seed and the token's position, and of
nothing else: one uniform number is derived from (seed, position) by hashing, and the distribution is inverted at it.
The random choice is the same alone or in a batch, and on a prefill or a decode node. (The logits themselves can
differ with the batch by rounding: below 1e-4 in fp32, where no answer was seen to change; in bf16 enough to change a
close choice.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from pdserve.wire.sampling import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under it are greedy: dividing by them says nothing else, and overflows."""

SORTED_CANDIDATES = (1024, 8192)
"""Top-p first looks at so many best tokens; only if their mass is too small is the whole vocabulary sorted."""


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """One token id a row; None where the logits are not finite, so that nothing can be said.

    ``logits`` is fp32 ``[rows, vocab_size]``; ``positions`` counts the tokens that each request has generated so far.
    """
    best = logits.max(-1)
    tokens: list[int | None] = best.indices.tolist()
    finite = best.values.isfinite().tolist()
    for row, (sampling, position) in enumerate(zip(params, positions, strict=True)):
        if not finite[row]:
            tokens[row] = None
        elif sampling.temperature >= GREEDY_BELOW:
            probabilities = _probabilities(logits[row], sampling)
            tokens[row] = _invert(probabilities, _uniform(sampling.seed, position))
    return tokens


def _probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Filtered, unnormalised probabilities ``[vocab_size]``: temperature, then top-k, top-p and min-p in turn."""
    # Shifted first, so that a small temperature cannot overflow.
    scaled = (logits - logits.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        smallest = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, float("-inf"))
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    if sampling.min_p > 0:
        probabilities = probabilities.masked_fill(probabilities < sampling.min_p * probabilities.max(), 0)
    return probabilities


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches ``top_p`` (Holtzman et al., 2020)."""
    for count in (*(few for few in SORTED_CANDIDATES if few < len(probabilities)), len(probabilities)):
        best, ids = probabilities.topk(count)
        below = best.cumsum(-1) - best < top_p
        # The best token always stays, however small top_p is (in fp32 it may even be 0).
        below[0] = True
        if not bool(below.all()):
            break
    kept = torch.zeros_like(probabilities)
    kept[ids[below]] = best[below]
    return kept


def _uniform(seed: int, position: int) -> float:
    """In [0, 1), the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _invert(probabilities: torch.Tensor, uniform: float) -> int:
    """The token at which the cumulative distribution passes ``uniform``."""
    cumulative = probabilities.double().cumsum(-1)
    at = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    # Rounding at the very end of the distribution: the last token that can be drawn at all.
    return at if at < len(probabilities) else int(probabilities.nonzero()[-1])
