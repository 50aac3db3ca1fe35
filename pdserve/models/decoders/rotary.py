"""Computes the cosines and sines of every position, with the scalings that the decoders here know.

The formulas are those of transformers, operation by operation, so that the tables have the same bits;
``tests/models/test_family_settings.py`` compares them.
"""

from __future__ import annotations

import math

import torch

from pdserve.models.checkpoint.family_settings import LinearScaling, Llama3Scaling, Rotary, YarnScaling


def rotary_table(
    rotary: Rotary, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(cos, sin)``, each ``[positions, head_dim / 2]``."""
    inverse, factor = frequencies(rotary, head_dim)
    if rotary.divisors:
        inverse = inverse / torch.tensor(rotary.divisors)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)


def frequencies(rotary: Rotary, head_dim: int) -> tuple[torch.Tensor, float]:
    """Returns the fp32 frequencies ``[head_dim / 2]``, and the factor of cosines and sines."""
    periods = rotary.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / periods
    match rotary.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(scaling, plain), 1.0
        case YarnScaling() as scaling:
            return _yarn(scaling, rotary.theta, periods, plain), _yarn_factor(scaling)


def _llama3(scaling: Llama3Scaling, plain: torch.Tensor) -> torch.Tensor:
    longest = scaling.original_positions / scaling.low_freq_factor
    shortest = scaling.original_positions / scaling.high_freq_factor
    lengths = 2 * math.pi / plain
    scaled = torch.where(lengths > longest, plain / scaling.factor, plain)
    share = (scaling.original_positions / lengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smoothed = (1 - share) * scaled / scaling.factor + share * scaled
    return torch.where((lengths >= shortest) & (lengths <= longest), smoothed, scaled)


def _yarn(scaling: YarnScaling, theta: float, periods: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    head_dim = 2 * len(periods)

    def dimension(rotations: float) -> float:
        return (head_dim * math.log(scaling.original_positions / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Two limits that are the same would divide by zero.
    width = high + 0.001 - low if low == high else high - low
    kept = 1 - torch.clamp((torch.arange(len(periods), dtype=torch.float32) - low) / width, 0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + plain * kept


def _yarn_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
