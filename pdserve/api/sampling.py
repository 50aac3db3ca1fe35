"""A validated request's fields to the sampling parameters of its engine requests."""

from __future__ import annotations

import secrets

from pdserve.api.openai import GenerationRequest
from pdserve.wire.sampling import SamplingParams

SEED_MASK = 2**63 - 1


def choice_seeds(request: GenerationRequest) -> list[int]:
    """One for each choice of one prompt: ``seed``, ``seed + 1`` and so on, or independent random ones."""
    return [_seed(request.seed, index) for index in range(request.choices)]


def _seed(seed: int | None, index: int) -> int:
    return secrets.randbits(63) if seed is None else (seed + index) & SEED_MASK


def sampling_params(request: GenerationRequest, seed: int, max_tokens: int) -> SamplingParams:
    """Of one choice."""
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=_or(request.min_p, 0.0),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
