"""Multiplies by weights in FP8 (``BlockFormat.FP8``) on the tensor cores that multiply FP8, as GPUs since sm_89 have.

Rows are rounded to FP8 so that the largest of 128 numbers is exact (``reference.rounded_inputs``). They have one scale,
as 128 numbers of a weight have. A tensor core adds 128 products; both scales apply to their sum, and fp32 has the sum
of these.

A row is rounded alone and always, whichever rows and however many are beside it: were only large steps rounded, a token
would get other keys when it is decoded than when it is read again. Sums are taken in the same order in every step, too:
inputs are cut into the same parts whether programs share them or one has them all. So a row's result depends on what
else a step computes at most as far as a tensor core adds in another order in a larger tile.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pdserve_kernels.contract import BlockFormat
from pdserve_kernels.triton.block_ops import COLUMNS, ROWS, TritonBlockLinear, add_parts
from pdserve_kernels.triton.block_packing import PACKED_FORMS, PackedWeight
from pdserve_kernels.triton.fp8 import encoded, input_scales, largest_bits
from pdserve_kernels.triton.paged_attention import launch_fitting

_LEAST_CAPABILITY = (8, 9)
"""The compute capability of the first GPUs of NVIDIA that multiply FP8."""
GROUP = BlockFormat.FP8.elements
FEW_ROWS = 16
"""Up to so many rows of a tile are rounded by each program that multiplies them: that takes less than a launch."""
TOGETHER = 8
"""The tiles of rows whose programs follow each other, so that they find the same weights in the cache of the GPU."""
STAGES = 4
ROUNDED_ROWS = 16
"""The rows of a program that rounds."""
_PIECE, _GROUP = tl.constexpr(32), tl.constexpr(GROUP)
# The interpreter rounds to FP8 by cutting bits off.
_BY_BITS = tl.constexpr(bool(triton.knobs.runtime.interpret))


def multiplies_fp8(device: torch.device) -> bool:
    """Returns whether a GPU multiplies FP8 as these kernels do it. AMD numbers its capabilities otherwise."""
    found = torch.cuda.get_device_properties(device)
    return torch.version.hip is None and (found.major, found.minor) >= _LEAST_CAPABILITY


@triton.jit
def rounded(values, factor):
    """Returns fp32 ``values`` times the ``factor`` of their row as float8e4nv."""
    scaled = tl.where(factor > 0, values, 0.0) * factor
    return encoded(scaled).to(tl.float8e4nv, bitcast=True) if _BY_BITS else scaled.to(tl.float8e4nv)


@triton.jit
def _round_kernel(x, numbers, sizes, rows, apart, inputs, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, group = row < rows, tl.program_id(1)
    at = row.to(tl.int64)[:, None] * inputs + group * _GROUP + tl.arange(0, _GROUP)[None, :]
    values = tl.load(x + at, mask=there[:, None], other=0.0).to(tl.float32)
    size, factor = input_scales(tl.max(largest_bits(values), 1))
    tl.store(numbers + at, rounded(values, factor[:, None]), mask=there[:, None])
    tl.store(sizes + group * apart + row, size)


@triton.jit
def fp8_products(
    x, sizes, row, there, apart, begin, end, each, column, wanted, inputs, outputs, codes, scales,
    IN_PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Returns the products of the inputs from ``begin`` to ``end``, fp32 ``[outputs, rows]``.

    ``row`` are the numbers of those rows that are ``there``. ``sizes``, of which those of the next 128 inputs lie
    ``apart`` from those before, are what the numbers of ``x`` are multiplied by, or None if they are not rounded yet.
    ``column`` are the numbers of the outputs that are ``wanted``. If they are ``IN_PARTS``, those of ``each`` inputs
    are added before they are added to others.
    """
    at = tl.arange(0, _GROUP)
    given = x + row.to(tl.int64)[None, :] * inputs + at[:, None]
    own = codes + (at // _PIECE * outputs)[None, :] * _PIECE + column[:, None] * _PIECE + (at % _PIECE)[None, :]
    total, part = tl.zeros((COLUMNS, ROWS), tl.float32), tl.zeros((COLUMNS, ROWS), tl.float32)
    for first in range(begin, end, _GROUP):
        weights = tl.load(own + tl.cast(first, tl.int64) * outputs, mask=wanted[:, None], other=0.0)
        scale = tl.load(scales + first // _GROUP * outputs + column, mask=wanted, other=0.0)
        values = tl.load(given + first, mask=there[None, :], other=0.0)
        if sizes is None:
            wide = values.to(tl.float32)
            size, factor = input_scales(tl.max(largest_bits(wide), 0))
            numbers = rounded(wide, factor[None, :])
        else:
            size = tl.load(sizes + first // _GROUP * apart + row)
            numbers = values
        part += tl.dot(weights, numbers) * scale[:, None] * size[None, :]
        if IN_PARTS:  # noqa: SIM102  # decided when it is compiled
            if (first + _GROUP) % each == 0:
                total += part
                part = tl.zeros((COLUMNS, ROWS), tl.float32)
    return total + part


@triton.jit
def _fp8_product_kernel(
    x, sizes, codes, scales, bias, out, rows, apart, inputs, outputs, each,
    SHARED: tl.constexpr, IN_PARTS: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Programs of the first dimension have a tile each; those of the second share its inputs if they are ``SHARED``."""
    tile, part = tl.program_id(0), tl.program_id(1)
    tall, broad = tl.cdiv(rows, ROWS), tl.cdiv(outputs, COLUMNS)
    above = tile // (TOGETHER * broad) * TOGETHER
    height = tl.minimum(tall - above, TOGETHER)
    within = tile % (TOGETHER * broad)
    row = (above + within % height) * ROWS + tl.arange(0, ROWS)
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)
    there, wanted = row < rows, column < outputs
    begin = part * each if SHARED else 0
    end = tl.minimum(begin + each, inputs) if SHARED else inputs
    total = fp8_products(
        x, sizes, row, there, apart, begin, end, each, column, wanted, inputs, outputs, codes, scales,
        IN_PARTS and not SHARED, ROWS, COLUMNS,
    )  # fmt: skip
    to = row.to(tl.int64) * outputs
    if SHARED:
        to += part.to(tl.int64) * rows * outputs
    elif bias is not None:
        total += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + to[None, :] + column[:, None], total.to(out.dtype.element_ty), mask=wanted[:, None] & there[None, :]
    )  # fmt: skip


def in_fp8(weight: PackedWeight) -> bool:
    """Returns whether rows are rounded to FP8 for a weight where the GPU can multiply FP8."""
    return weight.form == PACKED_FORMS[BlockFormat.FP8]


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the numbers of ``x``, ``[rows, inputs]`` in e4m3, and their scales, fp32 ``[groups, more rows]``.

    There are as many rows of scales as tiles have, so that all can be read.
    """
    rows, inputs = x.shape
    numbers = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    sizes = torch.empty((inputs // GROUP, triton.cdiv(rows, ROWS[-1]) * ROWS[-1]), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, ROUNDED_ROWS), inputs // GROUP)
    _round_kernel[grid](x, numbers, sizes, rows, sizes.shape[1], inputs, ROUNDED_ROWS)
    return numbers, sizes


def rounded_for(x: torch.Tensor, tall: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns ``rounded_rows``, or ``x`` and None if programs with ``tall`` rows round them."""
    return (x, None) if tall <= FEW_ROWS else rounded_rows(x)


def fp8_tensors(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the numbers and the scales of a weight."""
    return weight.codes.view(torch.float8_e4m3fn), weight.scales


class TritonFp8Linear(TritonBlockLinear):
    """The product of rows and weight in FP8. Looking rows up is not rounded."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, weight, rows = self.checked(x), self._weight, len(x)
        out = torch.empty((rows, weight.outputs), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        tall = next((each for each in ROWS if each >= rows), ROWS[-1])
        columns = COLUMNS if tall < ROWS[-1] else 2 * COLUMNS
        # They do not depend on how many rows there are.
        parts, each = self._parts(triton.cdiv(weight.outputs, COLUMNS), GROUP)
        shared = parts > 1 and tall < ROWS[-1]
        to: Any = out
        if shared:
            to = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
        numbers, sizes = rounded_for(x, tall)
        apart = 0 if sizes is None else sizes.stride(0)
        launch_fitting(
            _fp8_product_kernel,
            (triton.cdiv(rows, tall) * triton.cdiv(weight.outputs, columns), parts if shared else 1),
            (numbers, sizes, *fp8_tensors(weight), self._bias, to, rows, apart, weight.inputs, weight.outputs, each),
            (shared, parts > 1, TOGETHER, tall, columns, GROUP),
            STAGES,
            4 if tall < ROWS[-1] else 8,
            least=GROUP,
        )
        if shared:
            add_parts(to, self._bias, out)
        return out
