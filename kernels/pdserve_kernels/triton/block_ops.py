"""Multiplies by weights that stay packed (``block_packing``): a program takes their numbers out of the codes it reads.

Weights are the left side of the products, so that few rows fill a tensor core as well as many: a tile is 64 outputs or
more by the rows that there are. With few rows, the inputs are cut into parts, because outputs alone would not give
every processor something to read; a second launch adds the parts in their order. Many rows are multiplied by the
vendor's library: the numbers of some outputs at a time are written down first, which takes little beside so many
products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pdserve_kernels.contract import BlockWeight
from pdserve_kernels.triton.block_packing import PackedForm, PackedWeight, packed
from pdserve_kernels.triton.fp8 import unscaled
from pdserve_kernels.triton.paged_attention import launch_fitting

ROWS = (16, 32, 64, 128)
"""The rows of a tile: the least that has all rows."""
COLUMNS, STAGES = 64, 4
"""The outputs of a tile, twice as many if it has the most rows, and how far a program reads ahead."""
FEW_ROWS = 64
"""Up to so many rows, the inputs may be cut into parts. A row's result then does not depend on how many they are."""
MOST_PARTS = 16
FROM_LIBRARY = 256
"""More rows than these are multiplied by the vendor's library."""
WIDENED = 2**25
"""The most numbers of a weight that are written down at once."""
READ_AT_ONCE = 128
"""The inputs of a turn with few rows. With many, their own part of the turn takes more memory than the weight's."""
SUMMED = 1024

# The table of IQ4_NL, four bytes in a word.
_IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
_WORDS = [
    int.from_bytes(bytes(each & 255 for each in _IQ4[at : at + 4]), "little", signed=True) for at in (0, 4, 8, 12)
]
_WORD_0, _WORD_1, _WORD_2, _WORD_3 = (tl.constexpr(word) for word in _WORDS)


@triton.jit
def _plain(codes, NUMBERS: tl.constexpr, ZERO: tl.constexpr):
    """Returns the fp32 numbers of int32 codes."""
    if NUMBERS == 1:
        # Sign, exponent and lowest bit stand where fp16 has them, whose exponents are 14 lower.
        half = ((codes & 8) << 12 | (codes & 7) << 9).to(tl.uint16).to(tl.float16, bitcast=True)
        values = half.to(tl.float32) * 16384.0
    elif NUMBERS == 3:
        values = unscaled(codes)
    elif NUMBERS == 2:
        low = tl.where((codes & 4) > 0, _WORD_1, _WORD_0)
        high = tl.where((codes & 4) > 0, _WORD_3, _WORD_2)
        word = tl.where((codes & 8) > 0, high, low)
        values = ((word << (24 - 8 * (codes & 3))) >> 24).to(tl.float32)
    else:
        # With this exponent, the last bits of a number count ones. Converting integers takes several times as long.
        values = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    return values


@triton.jit
def _factor(stored, wide, at, column, outputs, wanted, inputs, GROUP: tl.constexpr, WIDE: tl.constexpr):
    """Returns the scales, or the offsets, of outputs for the inputs from ``at`` on."""
    inside = wanted & (at + 0 * column < inputs)
    found = tl.load(stored + (at // GROUP).to(tl.int64) * outputs + column, mask=inside, other=0)
    if stored.dtype.element_ty == tl.uint8 and WIDE == 0:
        # The exponent of 0 is that of half the least normal number.
        bits = tl.where(found == 0, 0x00400000, found.to(tl.int32) << 23)
        value = bits.to(tl.float32, bitcast=True)
    elif stored.dtype.element_ty == tl.uint8 and GROUP == 16:
        value = unscaled(found.to(tl.int32))
    else:
        value = found.to(tl.float32)
    if WIDE > 0:
        times = tl.load(wide + (at // WIDE).to(tl.int64) * outputs + column, mask=inside, other=0.0)
        value *= times.to(tl.float32)
    return value


@triton.jit
def _piece(
    stored, above, at, column, outputs, wanted, inputs, scales, offsets, wide, wide_offsets,
    HALF: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Returns the weights, fp32 ``[outputs, 32]``, of the 32 inputs from ``at`` on.

    ``stored`` and ``above`` are their bytes of codes and of upper bits, in which they have these places.
    """
    codes = stored if BITS == 8 else (stored >> 4 * HALF) & 15
    if BITS == 5:
        codes |= (above >> PLACE & 1) << 4
    if BITS == 6:
        codes |= (above >> 2 * PLACE & 3) << 4
    values = _plain(codes, NUMBERS, ZERO)
    scale = _factor(scales, wide, at, column, outputs, wanted, inputs, GROUP, WIDE)[:, None]
    if GROUP == 16:
        second = _factor(scales, wide, at + 16, column, outputs, wanted, inputs, GROUP, WIDE)[:, None]
        scale = tl.where(tl.arange(0, 32)[None, :] < 16, scale, second)
    values *= scale
    if offsets is not None:
        values += _factor(offsets, wide_offsets, at, column, outputs, wanted, inputs, GROUP, WIDE)[:, None]
    return values


@triton.jit
def add_products(
    total, given, there, factor, begin, end, inputs, column, wanted, outputs,
    codes, upper, scales, offsets, wide, wide_offsets,
    WEIGHED: tl.constexpr, BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns ``total``, fp32 ``[outputs, rows]``, with the products of the inputs from ``begin`` to ``end`` added.

    ``given`` points to the first inputs of the rows that are ``there``, which are multiplied by ``factor`` if they are
    weighed. ``column`` are the numbers of the outputs, of which there are as many as are ``wanted``.
    """
    lane = tl.arange(0, 32)
    HALVES: tl.constexpr = 1 if BITS == 8 else 2
    # The rows of codes that have their upper bits in the same bytes.
    SHARING: tl.constexpr = 4 if BITS == 5 else 2
    for first in range(begin, end, TILE):
        for turn in tl.static_range(TILE // (32 * HALVES)):
            start = first + turn * 32 * HALVES
            row = (start // (32 * HALVES)).to(tl.int64) * outputs
            loaded = (wanted & (start + 0 * column < end))[:, None]
            stored = tl.load(codes + row * 32 + column[:, None] * 32 + lane[None, :], mask=loaded, other=0)
            stored = stored.to(tl.int32)
            if upper is not None:
                if turn % SHARING == 0:
                    row = (start // (64 * SHARING)).to(tl.int64) * outputs
                    above = tl.load(upper + row * 32 + column[:, None] * 32 + lane[None, :], mask=loaded, other=0)
                    above = above.to(tl.int32)
            else:
                above = stored
            for half in tl.static_range(HALVES):
                at = start + 32 * half
                weights = _piece(
                    stored, above, at, column, outputs, wanted, inputs, scales, offsets, wide, wide_offsets,
                    half, turn % SHARING * 2 + half, BITS, NUMBERS, ZERO, GROUP, WIDE,
                )  # fmt: skip
                inside = there[None, :] & ((at + lane)[:, None] < tl.minimum(inputs, end))
                values = tl.load(given[None, :] + (at + lane)[:, None], mask=inside, other=0.0)
                if WEIGHED:
                    values = (values.to(tl.float32) * factor[None, :]).to(values.dtype)
                total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
    return total


@triton.jit
def _block_product_kernel(
    x, codes, upper, scales, offsets, wide, wide_offsets, bias, out, rows, inputs, outputs, each,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    IN_PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    wanted, there = column < outputs, row < rows
    part = tl.program_id(2)
    begin = part * each
    total = add_products(
        tl.zeros((COLUMNS, ROWS), tl.float32), x + row * inputs, there, 0.0, begin, tl.minimum(begin + each, inputs),
        inputs, column, wanted, outputs, codes, upper, scales, offsets, wide, wide_offsets,
        False, BITS, NUMBERS, ZERO, GROUP, WIDE, TILE,
    )  # fmt: skip
    to = row * outputs
    if IN_PARTS:
        to += part.to(tl.int64) * rows * outputs
    elif bias is not None:
        total += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + to[None, :] + column[:, None], total.to(out.dtype.element_ty), mask=wanted[:, None] & there[None, :]
    )  # fmt: skip


@triton.jit
def _sum_parts_kernel(parts, bias, out, numbers, outputs, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in range(1, PARTS):
        total += tl.load(parts + part * numbers + at, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _widen_kernel(
    ids, codes, upper, scales, offsets, wide, wide_offsets, out, first, count, inputs, outputs,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wanted = row < count
    column = (first + row).to(tl.int64)
    if ids is not None:
        column = tl.load(ids + row, mask=wanted, other=0).to(tl.int64)
    lane = tl.arange(0, 32)
    HALVES: tl.constexpr = 1 if BITS == 8 else 2
    SHARING: tl.constexpr = 4 if BITS == 5 else 2
    for turn in tl.static_range(TILE // (32 * HALVES)):
        start = tl.program_id(1) * TILE + turn * 32 * HALVES
        place = (start // (32 * HALVES)).to(tl.int64) * outputs
        loaded = (wanted & (start + 0 * column < inputs))[:, None]
        stored = tl.load(codes + (place + column)[:, None] * 32 + lane[None, :], mask=loaded, other=0).to(tl.int32)
        above = stored
        if upper is not None:
            place = (start // (64 * SHARING)).to(tl.int64) * outputs
            above = tl.load(upper + (place + column)[:, None] * 32 + lane[None, :], mask=loaded, other=0).to(tl.int32)
        for half in tl.static_range(HALVES):
            at = start + 32 * half
            weights = _piece(
                stored, above, at, column, outputs, wanted, inputs, scales, offsets, wide, wide_offsets,
                half, turn % SHARING * 2 + half, BITS, NUMBERS, ZERO, GROUP, WIDE,
            )  # fmt: skip
            to = out + row.to(tl.int64)[:, None] * inputs + (at + lane)[None, :]
            tl.store(to, weights.to(out.dtype.element_ty), mask=wanted[:, None] & ((at + lane)[None, :] < inputs))


def form_constants(form: PackedForm) -> tuple[int, ...]:
    """Returns what kernels are compiled for by the form of a weight."""
    return (form.bits, int(form.numbers), form.zero, form.group, form.wide)


def tile_inputs(form: PackedForm, rows: int) -> int:
    """Returns the inputs that a program with so many rows takes in each turn of its loop."""
    return max(form.tile, READ_AT_ONCE if rows < ROWS[-1] else READ_AT_ONCE // 2)


def widened(
    weight: PackedWeight, dtype: torch.dtype, first: int = 0, count: int | None = None, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the numbers of some outputs, ``[count, inputs]``: those of ``ids``, or ``count`` from ``first`` on."""
    count = len(ids) if ids is not None else weight.outputs if count is None else count
    out = torch.empty((count, weight.inputs), dtype=dtype, device=weight.codes.device)
    if count:
        tile = max(weight.form.tile, READ_AT_ONCE)
        rows = 16 if count <= 16 else 32
        _widen_kernel[triton.cdiv(count, rows), triton.cdiv(weight.inputs, tile)](
            ids, *weight.tensors, out, first, count, weight.inputs, weight.outputs,
            *form_constants(weight.form), rows, tile,
        )  # fmt: skip
    return out


def add_parts(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Writes the sum of parts, fp32 ``[parts, rows, outputs]``, in their order, and of the bias, if there is one."""
    grid = (triton.cdiv(out.numel(), SUMMED),)
    _sum_parts_kernel[grid](parts, bias, out, out.numel(), out.shape[1], len(parts), SUMMED)


class TritonBlockLinear:
    """Satisfies ``contract.BlockLinear``. Nothing waits for the device, so a graph may record it."""

    def __init__(self, weight: BlockWeight, bias: torch.Tensor | None, processors: int) -> None:
        """Packs the weight for a GPU with so many processors."""
        self._weight, self._dtype, self._processors = packed(weight), weight.dtype, processors
        self._bias = None if bias is None else bias.contiguous()

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x, weight, rows = self.checked(x), self._weight, len(x)
        if rows > FROM_LIBRARY:
            return self._by_library(x)
        out = torch.empty((rows, weight.outputs), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        tall = next((each for each in ROWS if each >= rows), ROWS[-1])
        columns = COLUMNS if tall < ROWS[-1] else 2 * COLUMNS
        tile = tile_inputs(weight.form, tall)
        parts, each = (1, weight.inputs)
        if rows <= FEW_ROWS:
            parts, each = self._parts(triton.cdiv(weight.outputs, columns), tile)
        to: Any = out
        if parts > 1:
            to = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
        launch_fitting(
            _block_product_kernel,
            (triton.cdiv(weight.outputs, columns), triton.cdiv(rows, tall), parts),
            (x, *weight.tensors, self._bias, to, rows, weight.inputs, weight.outputs, each),
            (*form_constants(weight.form), parts > 1, tall, columns, tile),
            STAGES,
            4 if tall < ROWS[-1] else 8,
            least=weight.form.tile,
        )
        if parts > 1:
            add_parts(to, self._bias, out)
        return out

    def checked(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rows, contiguous. Raises ValueError if they are not those of this weight."""
        if x.dim() != 2 or x.shape[1] != self._weight.inputs:
            raise ValueError(f"a linear layer of {self._weight.inputs} inputs was given {tuple(x.shape)}")
        return x.contiguous()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``contract.BlockLinear``. Nobody checks the numbers, because nobody waits for them."""
        return widened(self._weight, self._dtype, ids=ids.contiguous())

    def _parts(self, programs: int, tile: int) -> tuple[int, int]:
        """Returns into how many parts the inputs are cut, and how many inputs each has."""
        inputs, parts = self._weight.inputs, 1
        while parts < MOST_PARTS and programs * parts < 2 * self._processors and inputs >= 4 * tile * parts:
            parts *= 2
        # A part begins where a turn begins, so that it has whole bytes of codes.
        each = triton.cdiv(triton.cdiv(inputs, parts), tile) * tile
        return triton.cdiv(inputs, each), each

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        weight, each = self._weight, max(1, WIDENED // self._weight.inputs)
        if each >= weight.outputs:
            return F.linear(x, widened(weight, x.dtype), self._bias)
        out = torch.empty((len(x), weight.outputs), dtype=x.dtype, device=x.device)
        for first in range(0, weight.outputs, each):
            own = slice(first, min(first + each, weight.outputs))
            numbers = widened(weight, x.dtype, first, own.stop - first).t()
            if self._bias is None:
                torch.mm(x, numbers, out=out[:, own])
            else:
                torch.addmm(self._bias[own], x, numbers, out=out[:, own])
        return out
