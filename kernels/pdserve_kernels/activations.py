"""Names the functions between the products of a feed-forward part. It needs no torch."""

from __future__ import annotations

import enum

CLAMPED_SLOPE, CLAMPED_AT = 1.702, 7.0


class Activation(enum.Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"
    XIELU = "xielu"
    CLAMPED_SILU = "clamped_silu"
    """``gate * sigmoid(CLAMPED_SLOPE * gate) * (up + 1)``, of a gate up to ``CLAMPED_AT``, and an up within it."""
