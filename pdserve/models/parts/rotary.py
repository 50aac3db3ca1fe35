"""Computes the cosines and sines of every position, with the scalings that the decoders here know.

The formulas are those of transformers, operation by operation, so that the tables have the same bits;
``tests/models/test_family_settings.py`` compares them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pdserve.models.recipe import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    PartialScaling,
    QueryScale,
    Rotary,
    YarnScaling,
)


class PositionTables(NamedTuple):
    """What a layer's attention does with each of some positions."""

    cos: torch.Tensor
    """``[positions, head_dim / 2]``, like ``sin``."""
    sin: torch.Tensor
    query_scale: torch.Tensor | None
    """``[positions, 1, 1]``; None if all are 1."""
    logs: torch.Tensor | None = None
    """``log(position + 1)``, ``[positions, 1, 1]``, if queries of heads are multiplied by ``HeadScales``."""

    def at(self, positions: torch.Tensor) -> PositionTables:
        """Returns the rows of these positions, ``[tokens]``."""
        scale, logs = (None if each is None else each[positions] for each in (self.query_scale, self.logs))
        return PositionTables(self.cos[positions], self.sin[positions], scale, logs)


def query_scales(
    scale: QueryScale | None, positions: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Returns what queries at each position are multiplied by, ``[positions, 1, 1]``, or None if it is 1 for all."""
    if scale is None or positions + scale.first <= scale.step:
        return None
    steps = torch.floor((torch.arange(positions, dtype=torch.float32) + scale.first) / scale.step)
    return (1 + scale.beta * torch.log(1 + steps)).to(device, dtype).view(-1, 1, 1)


def position_logs(positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns ``log(position + 1)`` of each position, ``[positions, 1, 1]``."""
    return torch.arange(1, positions + 1, dtype=torch.float32).log().to(device, dtype).view(-1, 1, 1)


def rotary_table(
    rotary: Rotary | None,
    head_dim: int,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    learned: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``(cos, sin)``, each ``[positions, head_dim / 2]``.

    Channels that are not turned have the angle 0. Without ``rotary`` these are all. Frequencies are multiplied by the
    exponentials of ``learned``, fp32 of as many numbers as there are frequencies.
    """
    if rotary is None:
        still = torch.zeros(positions, head_dim // 2)
        return still.cos().to(device, dtype), still.to(device, dtype)
    inverse, factor = frequencies(rotary, head_dim, positions)
    if rotary.divisors:
        inverse = inverse / torch.tensor(rotary.divisors)
    if learned is not None:
        inverse = inverse * learned.to("cpu").exp()
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    still_channels = head_dim // 2 - len(inverse)
    cos, sin = F.pad(cos, (0, still_channels), value=1.0), F.pad(sin, (0, still_channels))
    return cos.to(device, dtype), sin.to(device, dtype)


def channel_order(rotary: Rotary | None, head_dim: int) -> tuple[int, ...] | None:
    """Returns in which order a head's channels have to be, so that its halves are turned against each other.

    Queries and keys in the same order have the same products. Returns None for the order of the checkpoint.
    """
    if rotary is None or not (rotary.interleaved or rotary.backwards or rotary.width not in (None, head_dim)):
        return None
    width = rotary.width or head_dim
    turned = range(width)
    first, second = (turned[::2], turned[1::2]) if rotary.interleaved else (turned[: width // 2], turned[width // 2 :])
    if rotary.backwards:
        first, second = second, first
    still = range(width, head_dim)
    middle = len(still) // 2
    return (*first, *still[:middle], *second, *still[middle:])


def frequencies(rotary: Rotary, head_dim: int, positions: int = 0) -> tuple[torch.Tensor, float]:
    """Returns the fp32 frequencies of the channels that are turned, and the factor of cosines and sines.

    ``positions`` is the longest context.
    """
    width = rotary.width or head_dim
    periods = rotary.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    plain = 1.0 / periods
    match rotary.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / factor, 1.0
        case LongScaling() as scaling:
            divisors = scaling.long if positions > scaling.original_positions else scaling.short
            return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * periods), scaling.attention_factor
        case Llama3Scaling() as scaling:
            return _llama3(scaling, plain), 1.0
        case PartialScaling(part, factor):
            turned = int(part * width // 2)
            return F.pad(plain[:turned], (0, len(plain) - turned)) / factor, 1.0
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
