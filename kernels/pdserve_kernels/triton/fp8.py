"""Rounds keys and values to FP8 (``reference.quantised``), and reads them and weights in FP8.

Numbers are made of their bits, because GPUs before sm_89 have no instructions for e4m3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def largest_bits(x):
    """Returns the bits of the absolute values of fp32 ``x``, int32. They are in the order of the values, NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def stored_exponent(largest):
    """Returns the exponent that is stored with numbers, int32, for the largest of their ``largest_bits``."""
    above = largest >> 23
    return tl.where(above == 255, 255, tl.maximum(above - 7, 16))


@triton.jit
def scaled_down(x, exponent):
    """Returns fp32 ``x`` as what is rounded. ``exponent`` is that of the row of each number."""
    finite = exponent < 255
    factor = (tl.where(finite, 254 - exponent, 0) << 23).to(tl.float32, bitcast=True)
    return tl.where(finite, x, 0.0) * factor


@triton.jit
def quantised(x, exponent):
    """Returns fp32 ``x`` as uint8. ``exponent`` is that of the row of each number."""
    return encoded(scaled_down(x, exponent))


@triton.jit
def encoded(scaled):
    """Returns fp32 ``scaled``, whose sizes are at most 448, as uint8."""
    bits = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # Both round to the nearest, ties to even: the second by adding 1.5 * 2 ** 23.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (bits.to(tl.float32, bitcast=True) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(bits < 1015021568, small, normal)
    return (code | ((scaled.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def input_scales(largest):
    """Returns the fp32 scales of inputs and what they are multiplied by, for the largest of their ``largest_bits``.

    See ``reference.rounded_inputs``. Where a number is not finite, inputs are multiplied by 0.
    """
    finite = largest < 0x7F800000
    # 2 ** -95, and 448.
    some = tl.where(finite, tl.maximum(largest, 0x10000000), 0x43E00000).to(tl.float32, bitcast=True)
    end = tl.full(some.shape, 448.0, tl.float32)
    sizes = tl.where(finite, tl.div_rn(some, end), float("inf"))
    return sizes, tl.where(finite, tl.div_rn(end, some), 0.0)


@triton.jit
def unscaled(numbers):
    """Returns ``numbers``, uint8 or int32, as fp32, without their scale. bf16 and fp16 have each of them, too."""
    code = numbers.to(tl.int32)
    # Sign, exponent and fraction stand where fp16 has them, whose exponents are 8 lower.
    half = ((code & 128) << 8 | (code & 127) << 7).to(tl.uint16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def scale_of(exponent):
    """Returns what numbers with this ``exponent``, uint8, are multiplied by. It is infinite if one was not finite."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
