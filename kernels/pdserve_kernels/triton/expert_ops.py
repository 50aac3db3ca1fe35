"""Sends rows to a few of many experts without asking the device how many each has, so that a graph may record it.

One launch routes the rows. Two sort what they are sent to by expert, and cut the rows of each expert into tiles: as
many as there can be are launched, and those without rows end at once. A tile is multiplied with the weights of its
expert, and activated; a second launch multiplies by the other weights, and the last one adds the results of each row in
the order of its choice. So nothing is added by atomic operations, and a step gives the same again.

Weights that come in blocks stay packed (``block_packing``), with those of all experts in one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pdserve_kernels.contract import BlockFormat, BlockWeight, ExpertsForm, ExpertWeights, UnreadWeight
from pdserve_kernels.feed_forward import (
    CLAMPED_AT,
    CLAMPED_SLOPE,
    LIMITED_AT,
    Activation,
    GroupScore,
    Routing,
    Scoring,
)
from pdserve_kernels.reference import with_identities
from pdserve_kernels.triton.block_ops import add_products, form_constants, tile_inputs, widened
from pdserve_kernels.triton.block_packing import PackedWeight, empty_packed, fill, packed
from pdserve_kernels.triton.fp8_products import GROUP, fp8_products, fp8_tensors, in_fp8, rounded_for
from pdserve_kernels.triton.paged_attention import launch_fitting
from pdserve_kernels.triton.token_ops import sigmoid

_SCORINGS = {
    Scoring.SOFTMAX: 0,
    Scoring.SOFTMAX_OF_CHOSEN: 1,
    Scoring.SIGMOID: 2,
    Scoring.SIGMOID_OF_CHOSEN: 3,
    Scoring.ROOT_SOFTPLUS: 4,
}
ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.GELU: 2,
    Activation.RELU: 3,
    Activation.RELU_SQUARED: 4,
    Activation.CLAMPED_SILU: 5,
    Activation.SILU_TO_7: 6,
    Activation.SILU_TO_16: 7,
    Activation.LIMITED_SILU: 8,
}
_SLOPE, _MOST, _LIMIT = tl.constexpr(CLAMPED_SLOPE), tl.constexpr(CLAMPED_AT), tl.constexpr(LIMITED_AT)

LOOKED_AT = 1024
"""The assignments that a program which sorts looks at together."""
COLUMNS, INPUTS, STAGES = 64, 64, 3
"""The outputs of a program, of gates and ups each, and the inputs that it multiplies together."""
ROWS = (16, 32, 64, 128)
"""The rows of a tile: the least that experts have on average."""
SUMMED = 1024


@triton.jit
def _softmax(values):
    raised = tl.exp(values - tl.max(values, 0))
    return raised / tl.sum(raised, 0)


@triton.jit
def _route_kernel(
    logits,
    correction,
    factors,
    weights,
    chosen,
    smallest_sum,
    scale,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALISED: tl.constexpr,
    TWO_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < COUNT
    never = float("-inf")
    scores = tl.load(logits + row * COUNT + expert, mask=inside, other=never).to(tl.float32)
    if SCORING == 0:
        scores = _softmax(scores)
    if SCORING == 2:
        scores = sigmoid(scores)
    if SCORING == 4:
        # The logarithm of 1 and a positive number of up to 1.
        scores = tl.sqrt(tl.where(scores > 0, scores, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(scores))))
    compared = scores
    if correction is not None:
        compared += tl.load(correction + expert, mask=inside, other=0.0)
    # What is not a number is chosen, so that it shows.
    compared = tl.where(compared == compared, compared, float("inf"))
    compared = tl.where(inside, compared, never)
    if GROUPS > 1:
        size = COUNT // GROUPS
        group = expert // size
        of_groups = tl.full((BLOCK,), never, tl.float32)
        for number in range(GROUPS):
            own = tl.where(group == number, compared, never)
            score = tl.max(own, 0)
            if TWO_BEST:
                score += tl.max(tl.where(expert == tl.argmax(own, 0), never, own), 0)
            of_groups = tl.where(group == number, score, of_groups)
        of_groups = tl.where(inside, of_groups, never)
        kept = tl.zeros((BLOCK,), tl.int32)
        for _ in range(CHOSEN_GROUPS):
            best = tl.argmax(tl.where(kept > 0, never, of_groups), 0) // size
            kept = tl.where(group == best, 1, kept)
        compared = tl.where(kept > 0, compared, never)
    place = tl.arange(0, BLOCK_CHOSEN)
    numbers = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    found = tl.full((BLOCK_CHOSEN,), never, tl.float32)
    for which in range(CHOSEN):
        at = tl.argmax(compared, 0)
        numbers = tl.where(place == which, at, numbers)
        found = tl.where(place == which, tl.sum(tl.where(expert == at, scores, 0.0), 0), found)
        compared = tl.where(expert == at, never, compared)
    real = place < CHOSEN
    if SCORING == 1:
        found = _softmax(found)
    if SCORING == 3:
        found = sigmoid(found)
    found = tl.where(real, found, 0.0)
    if NORMALISED:
        found = found / (tl.sum(found, 0) + smallest_sum)
    found *= scale
    if factors is not None:
        found *= tl.load(factors + numbers, mask=real, other=0.0)
    tl.store(weights + row * CHOSEN + place, found, mask=real)
    tl.store(chosen + row * CHOSEN + place, numbers, mask=real)


@triton.jit
def _count_kernel(chosen, counts, assigned, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, assigned, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        found += (tl.load(chosen + at, mask=at < assigned, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit
def _place_kernel(
    chosen, counts, order, tiles, assigned, most, COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    every, some = tl.arange(0, BLOCK_COUNT), tl.arange(0, BLOCK)
    before = tl.load(counts + every, mask=every < expert, other=0)
    start, first = tl.sum(before, 0), tl.sum((before + ROWS - 1) // ROWS, 0)
    own = tl.load(counts + expert)
    count = (own + ROWS - 1) // ROWS
    for begin in range(0, count, BLOCK):
        tile = begin + some
        to, valid = tiles + 3 * (first + tile), tile < count
        tl.store(to, tl.full((BLOCK,), 0, tl.int32) + expert, mask=valid)
        tl.store(to + 1, start + tile * ROWS, mask=valid)
        tl.store(to + 2, tl.full((BLOCK,), 0, tl.int32) + start + own, mask=valid)
    if expert == COUNT - 1:
        # The tiles that are left have no rows.
        for begin in range(first + count, most, BLOCK):
            tile = begin + some
            tl.store(tiles + 3 * tile, tl.full((BLOCK,), -1, tl.int32), mask=tile < most)
    for begin in range(0, assigned, BLOCK):
        at = begin + some
        mine = (tl.load(chosen + at, mask=at < assigned, other=-1) == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
        start += tl.sum(mine, 0)


@triton.jit
def _activated(values, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        values = values * sigmoid(values)
    elif ACTIVATION == 1:
        values = values * sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))
    elif ACTIVATION == 2:
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    elif ACTIVATION == 3:
        values = tl.where(values < 0.0, 0.0, values)
    else:
        above = tl.where(values < 0.0, 0.0, values)
        values = above * above
    return values


@triton.jit
def _within(values, BOUND: tl.constexpr):
    values = tl.where(values > BOUND, BOUND, values)
    return tl.where(values < -BOUND, -BOUND, values)


@triton.jit
def _bounded_silu(gate, up, BOUND: tl.constexpr):
    gate = gate * sigmoid(gate)
    return tl.where(gate > BOUND, BOUND, gate) * _within(up, BOUND)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    if ACTIVATION == 5:
        gate = tl.where(gate > _MOST, _MOST, gate)
        result = (_within(up, _MOST) + 1.0) * (gate * sigmoid(gate * _SLOPE))
    elif ACTIVATION == 6:
        result = _bounded_silu(gate, up, 7.0)
    elif ACTIVATION == 7:
        result = _bounded_silu(gate, up, 16.0)
    elif ACTIVATION == 8:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        result = gate * sigmoid(gate) * _within(up, _LIMIT)
    elif GATED:
        result = _activated(gate, ACTIVATION) * up
    else:
        result = _activated(up, ACTIVATION)
    return result


@triton.jit
def _inner_kernel(
    x,
    weight,
    bias,
    factors,
    order,
    tiles,
    out,
    HIDDEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(1)
    expert = tl.load(tile).to(tl.int64)
    if expert >= 0:
        place, end = tl.load(tile + 1) + tl.arange(0, ROWS), tl.load(tile + 2)
        there = place < end
        assigned = tl.load(order + place, mask=there, other=0)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        wanted = column < CHANNELS
        given = x + (assigned // CHOSEN).to(tl.int64)[:, None] * HIDDEN
        # Ups stand behind gates, if there are some.
        outputs = 2 * CHANNELS if GATED else CHANNELS
        gates = weight + (expert * outputs + column)[None, :] * HIDDEN
        ups = gates + CHANNELS * HIDDEN if GATED else gates
        gate, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        factor = tl.load(factors + assigned, mask=there, other=0.0)[:, None] if WEIGHED else 1.0
        for begin in range(0, HIDDEN, TILE):
            at = begin + tl.arange(0, TILE)
            inside = at < HIDDEN
            values = tl.load(given + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            if WEIGHED:
                values = (values.to(tl.float32) * factor).to(values.dtype)
            loaded = inside[:, None] & wanted[None, :]
            if GATED:
                part = tl.load(gates + at[:, None], mask=loaded, other=0.0)
                gate = tl.dot(values, part, gate, input_precision="ieee")
            part = tl.load(ups + at[:, None], mask=loaded, other=0.0)
            up = tl.dot(values, part, up, input_precision="ieee")
        if bias is not None:
            own = bias + expert * outputs + column
            if GATED:
                gate += tl.load(own, mask=wanted, other=0.0).to(tl.float32)[None, :]
                own += CHANNELS
            up += tl.load(own, mask=wanted, other=0.0).to(tl.float32)[None, :]
        result = _gated(gate, up, ACTIVATION, GATED)
        to = out + place.to(tl.int64)[:, None] * CHANNELS + column[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=there[:, None] & wanted[None, :])


@triton.jit
def _packed_inner_kernel(
    x, sizes, codes, upper, scales, offsets, wide, wide_offsets, bias, factors, order, tiles, out,
    apart, codes_each, upper_each, scales_each, wide_each, gates, inputs, channels, ups,
    IN_FP8: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr, WEIGHED: tl.constexpr, ACTIVATION: tl.constexpr,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As ``_inner_kernel``. ``gates`` outputs of an expert stand in front of its ``ups``.

    ``sizes``, which lie ``apart``, are those of ``fp8_products``.
    """
    tile = tiles + 3 * tl.program_id(1)
    expert = tl.load(tile).to(tl.int64)
    if expert >= 0:
        place, end = tl.load(tile + 1) + tl.arange(0, ROWS), tl.load(tile + 2)
        there = place < end
        assigned = tl.load(order + place, mask=there, other=0)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        wanted = column < channels
        outputs = gates + ups
        row = assigned // CHOSEN
        given = x + row.to(tl.int64) * inputs
        factor = tl.load(factors + assigned, mask=there, other=0.0)
        codes += expert * codes_each
        scales += expert * scales_each
        if upper is not None:
            upper += expert * upper_each
        if offsets is not None:
            offsets += expert * scales_each
        if wide is not None:
            wide += expert * wide_each
        if wide_offsets is not None:
            wide_offsets += expert * wide_each
        gate, up = tl.zeros((COLUMNS, ROWS), tl.float32), tl.zeros((COLUMNS, ROWS), tl.float32)
        if IN_FP8:
            if GATED:
                gate = fp8_products(
                    x, sizes, row, there, apart, 0, inputs, 0, column, wanted, inputs, outputs, codes, scales,
                    False, ROWS, COLUMNS,
                )  # fmt: skip
            up = fp8_products(
                x, sizes, row, there, apart, 0, inputs, 0, column + gates, wanted, inputs, outputs, codes, scales,
                False, ROWS, COLUMNS,
            )  # fmt: skip
            if WEIGHED:
                gate *= factor[None, :]
                up *= factor[None, :]
        else:
            if GATED:
                gate = add_products(
                    gate, given, there, factor, 0, inputs, inputs, column, wanted, outputs,
                    codes, upper, scales, offsets, wide, wide_offsets,
                    WEIGHED, BITS, NUMBERS, ZERO, GROUP, WIDE, TILE,
                )  # fmt: skip
            up = add_products(
                up, given, there, factor, 0, inputs, inputs, column + gates, wanted, outputs,
                codes, upper, scales, offsets, wide, wide_offsets,
                WEIGHED, BITS, NUMBERS, ZERO, GROUP, WIDE, TILE,
            )  # fmt: skip
        if bias is not None:
            own = bias + expert * outputs + column
            if GATED:
                gate += tl.load(own, mask=wanted, other=0.0).to(tl.float32)[:, None]
            up += tl.load(own + gates, mask=wanted, other=0.0).to(tl.float32)[:, None]
        result = _gated(gate, up, ACTIVATION, GATED)
        to = out + place.to(tl.int64)[None, :] * channels + column[:, None]
        tl.store(to, result.to(out.dtype.element_ty), mask=wanted[:, None] & there[None, :])


@triton.jit
def _packed_outer_kernel(
    middle, sizes, codes, upper, scales, offsets, wide, wide_offsets, bias, factors, order, tiles, out,
    apart, codes_each, upper_each, scales_each, wide_each, inputs, outputs,
    IN_FP8: tl.constexpr, WEIGHED: tl.constexpr,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tiles + 3 * tl.program_id(1)
    expert = tl.load(tile).to(tl.int64)
    if expert >= 0:
        place, end = tl.load(tile + 1) + tl.arange(0, ROWS), tl.load(tile + 2)
        there = place < end
        assigned = tl.load(order + place, mask=there, other=0)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        wanted = column < outputs
        codes += expert * codes_each
        scales += expert * scales_each
        if upper is not None:
            upper += expert * upper_each
        if offsets is not None:
            offsets += expert * scales_each
        if wide is not None:
            wide += expert * wide_each
        if wide_offsets is not None:
            wide_offsets += expert * wide_each
        if IN_FP8:
            # What is not there has the scales of the first row: scales are read of all.
            total = fp8_products(
                middle, sizes, tl.where(there, place, 0), there, apart, 0, inputs, 0, column, wanted, inputs, outputs,
                codes, scales, False, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            total = add_products(
                tl.zeros((COLUMNS, ROWS), tl.float32), middle + place.to(tl.int64) * inputs, there, 0.0, 0, inputs,
                inputs, column, wanted, outputs, codes, upper, scales, offsets, wide, wide_offsets,
                False, BITS, NUMBERS, ZERO, GROUP, WIDE, TILE,
            )  # fmt: skip
        if bias is not None:
            total += tl.load(bias + expert * outputs + column, mask=wanted, other=0.0).to(tl.float32)[:, None]
        if not WEIGHED:
            total *= tl.load(factors + assigned, mask=there, other=0.0)[None, :]
        to = out + assigned.to(tl.int64)[None, :] * outputs + column[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=wanted[:, None] & there[None, :])


@triton.jit
def _outer_kernel(
    middle,
    weight,
    bias,
    factors,
    order,
    tiles,
    out,
    HIDDEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    WEIGHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tiles + 3 * tl.program_id(1)
    expert = tl.load(tile).to(tl.int64)
    if expert >= 0:
        place, end = tl.load(tile + 1) + tl.arange(0, ROWS), tl.load(tile + 2)
        there = place < end
        assigned = tl.load(order + place, mask=there, other=0)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        wanted = column < HIDDEN
        given = middle + place.to(tl.int64)[:, None] * CHANNELS
        own = weight + (expert * HIDDEN + column)[None, :] * CHANNELS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, CHANNELS, TILE):
            at = begin + tl.arange(0, TILE)
            inside = at < CHANNELS
            values = tl.load(given + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            part = tl.load(own + at[:, None], mask=inside[:, None] & wanted[None, :], other=0.0)
            total = tl.dot(values, part, total, input_precision="ieee")
        if bias is not None:
            total += tl.load(bias + expert * HIDDEN + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
        if not WEIGHED:
            total *= tl.load(factors + assigned, mask=there, other=0.0)[:, None]
        to = out + assigned.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & wanted[None, :])


@triton.jit
def _sum_kernel(results, beside, out, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    if beside is not None:
        total += tl.load(beside + row * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    for which in range(CHOSEN):
        at = results + (row * CHOSEN + which) * HIDDEN + column
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)


def route(
    logits: torch.Tensor, rule: Routing, correction: torch.Tensor | None = None, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``reference.route``, with int32 numbers. ``correction`` and ``factors`` are fp32."""
    rows, count = logits.shape
    weights = torch.empty((rows, rule.chosen), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((rows, rule.chosen), dtype=torch.int32, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits.contiguous(),
            correction,
            factors,
            weights,
            chosen,
            rule.smallest_sum,
            rule.scale,
            count,
            rule.chosen,
            rule.groups,
            rule.chosen_groups,
            _SCORINGS[rule.scoring],
            rule.normalised,
            rule.group_score is GroupScore.TWO_BEST,
            triton.next_power_of_2(count),
            triton.next_power_of_2(rule.chosen),
        )
    return weights, chosen


@dataclass(frozen=True, slots=True)
class SortedRows:
    """What rows are sent to, sorted by expert."""

    order: torch.Tensor
    """The assignments, ``row * chosen + which``, of the first expert, of the second one, and so on."""
    tiles: torch.Tensor
    """``[most tiles, 3]``: the expert, or -1; the first place in ``order``; the end of the places of this expert."""
    rows: int
    """The most rows of a tile."""


def sort_rows(chosen: torch.Tensor, count: int) -> SortedRows:
    """Sorts the assignments of ``chosen``, int32 ``[rows, chosen]``, which is not empty."""
    assigned, device = chosen.numel(), chosen.device
    rows = next((rows for rows in ROWS if rows * count >= assigned), ROWS[-1])
    most = assigned // rows + min(assigned, count)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    order = torch.empty(assigned, dtype=torch.int32, device=device)
    tiles = torch.empty((most, 3), dtype=torch.int32, device=device)
    block = min(LOOKED_AT, triton.next_power_of_2(assigned))
    _count_kernel[(count,)](chosen, counts, assigned, block)
    _place_kernel[(count,)](
        chosen, counts, order, tiles, assigned, most, count, triton.next_power_of_2(count), block, rows
    )
    return SortedRows(order, tiles, rows)


class _Stack:
    """The weights ``[outputs, inputs]`` of all experts: packed if all of them come in blocks of one format."""

    def __init__(self, count: int, outputs: int, inputs: int) -> None:
        self._shape = (count, outputs, inputs)
        self._format: BlockFormat | None = None
        self.packed: PackedWeight | None = None
        self.dense = torch.empty(0)

    def add(self, number: int, weights: Sequence[UnreadWeight | BlockWeight], dtype: torch.dtype) -> None:
        """Reads the weights of the next expert, which are ``outputs`` together. Raises ValueError if they are not."""
        count, outputs, inputs = self._shape
        found = sum(len(each.blocks) if isinstance(each, BlockWeight) else each.shape[0] for each in weights)
        if found != outputs:
            raise ValueError(f"{outputs} outputs are wanted of an expert, and there are {found}")
        blocks = [each for each in weights if isinstance(each, BlockWeight)]
        formats = {each.format for each in blocks}
        if len(blocks) == len(weights) and len(formats) == 1 and (not number or formats == {self._format}):
            if self.packed is None:
                self._format = blocks[0].format
                self.packed = empty_packed(self._format, outputs, inputs, blocks[0].blocks.device, count)
            fill(self.packed.expert(number), blocks)
            return
        plain = [widened(packed(each), dtype) if isinstance(each, BlockWeight) else each.read() for each in weights]
        if self.packed is not None:
            # Not all experts come in the same form, so they become numbers.
            self.dense = plain[0].new_empty(self._shape)
            for before in range(number):
                self.dense[before] = widened(self.packed.expert(before), dtype)
            self.packed = self._format = None
        elif not number:
            self.dense = plain[0].new_empty(self._shape)
        torch.cat(plain, out=self.dense[number])


class TritonExperts:
    """Satisfies ``contract.Experts``. The weights of all experts lie behind each other."""

    def __init__(self, form: ExpertsForm, weights: Iterable[ExpertWeights], *, fp8: bool = False) -> None:
        """Reads the weights. ``fp8`` says that the GPU multiplies FP8.

        Raises ValueError if the rule cannot choose among them.
        """
        form.routing.check(form.count)
        self._form, self._fp8 = form, fp8
        self._correction, self._factors = (None if each is None else each.float() for each in _numbers(form))
        biases: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self._inner = _Stack(len(form.own), (2 if form.gated else 1) * form.channels, form.hidden)
        self._down = _Stack(len(form.own), form.hidden, form.channels)
        for number, each in enumerate(weights):
            self._inner.add(number, each.inner, form.dtype)
            self._down.add(number, [each.down], form.dtype)
            biases.append((each.inner_bias, each.down_bias))
        if len(biases) != len(form.own):
            raise ValueError(f"{len(form.own)} experts are wanted, and there are {len(biases)}")
        self._inner_bias, self._down_bias = (_stacked(found) for found in zip(*biases, strict=True))

    @property
    def rounds(self) -> bool:
        """Whether inputs of products are rounded to FP8."""
        found = [each.packed for each in (self._inner, self._down) if each.packed is not None]
        return self._fp8 and any(map(in_fp8, found))

    @property
    def nbytes(self) -> int:
        """The bytes of the weights in memory."""
        return sum(
            each.dense.nbytes if each.packed is None else each.packed.nbytes for each in (self._inner, self._down)
        )

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        form, rows = self._form, len(x)
        x, out = x.contiguous(), torch.empty_like(x)
        if not rows:
            return out
        count = form.routing.chosen
        factors, chosen = route(logits, form.routing, self._correction, self._factors)
        beside = with_identities(form, x, factors, chosen, beside)
        if form.some is not None:  # what belongs to other ranks has numbers that no expert has
            chosen -= form.own.start
        by_expert = sort_rows(chosen, len(form.own))
        middle = torch.empty((rows * count, form.channels), dtype=x.dtype, device=x.device)
        empty = torch.empty if form.some is None else torch.zeros
        results = empty((rows * count, form.hidden), dtype=x.dtype, device=x.device)
        self._multiply_inner(x, factors, by_expert, middle)
        self._multiply_down(middle, factors, by_expert, results)
        block = min(SUMMED, triton.next_power_of_2(form.hidden))
        beside = None if beside is None else beside.contiguous()
        _sum_kernel[rows, triton.cdiv(form.hidden, block)](results, beside, out, form.hidden, count, block)
        return out

    def _multiply_inner(
        self, x: torch.Tensor, factors: torch.Tensor, by_expert: SortedRows, middle: torch.Tensor
    ) -> None:
        form, stack = self._form, self._inner
        columns = min(COLUMNS, max(16, triton.next_power_of_2(form.channels)))
        grid = (triton.cdiv(form.channels, columns), len(by_expert.tiles))
        extra = (self._inner_bias, factors, by_expert.order, by_expert.tiles, middle)
        rule = (form.routing.chosen, form.gated, form.weighs_inputs, ACTIVATIONS[form.activation])
        if stack.packed is None:
            launch_fitting(
                _inner_kernel,
                grid,
                (x, stack.dense, *extra),
                (form.hidden, form.channels, *rule, by_expert.rows, columns, INPUTS),
                STAGES,
                _warps(by_expert.rows),
            )
            return
        given = self._given(x, stack.packed, by_expert.rows)
        gates = form.channels if form.gated else 0
        launch_fitting(
            _packed_inner_kernel,
            grid,
            (*given.tensors, *extra, *given.apart, gates, form.hidden, form.channels, form.channels),
            (given.in_fp8, *rule, *form_constants(stack.packed.form), by_expert.rows, columns, given.tile),
            STAGES,
            _warps(by_expert.rows),
            least=given.least,
        )

    def _multiply_down(
        self, middle: torch.Tensor, factors: torch.Tensor, by_expert: SortedRows, results: torch.Tensor
    ) -> None:
        form, stack = self._form, self._down
        columns = min(COLUMNS, max(16, triton.next_power_of_2(form.hidden)))
        grid = (triton.cdiv(form.hidden, columns), len(by_expert.tiles))
        extra = (self._down_bias, factors, by_expert.order, by_expert.tiles, results)
        if stack.packed is None:
            launch_fitting(
                _outer_kernel,
                grid,
                (middle, stack.dense, *extra),
                (form.hidden, form.channels, form.weighs_inputs, by_expert.rows, columns, INPUTS),
                STAGES,
                _warps(by_expert.rows),
            )
            return
        given = self._given(middle, stack.packed, by_expert.rows)
        launch_fitting(
            _packed_outer_kernel,
            grid,
            (*given.tensors, *extra, *given.apart, form.channels, form.hidden),
            (
                given.in_fp8,
                form.weighs_inputs,
                *form_constants(stack.packed.form),
                by_expert.rows,
                columns,
                given.tile,
            ),
            STAGES,
            _warps(by_expert.rows),
            least=given.least,
        )

    def _given(self, x: torch.Tensor, weight: PackedWeight, tall: int) -> _Given:
        """Returns rows as tiles of ``tall`` rows take them, and the weight with which they are multiplied."""
        if not (self._fp8 and in_fp8(weight)):
            tile = tile_inputs(weight.form, tall)
            return _Given((x, None, *weight.tensors), (0, *_apart(weight)), False, tile, weight.form.tile)
        numbers, sizes = rounded_for(x, tall)
        codes, scales = fp8_tensors(weight)
        tensors = (numbers, sizes, codes, None, scales, None, None, None)
        apart = 0 if sizes is None else sizes.stride(0)
        return _Given(tensors, (apart, *_apart(weight)), True, GROUP, GROUP)


@dataclass(frozen=True, slots=True)
class _Given:
    """What kernels for packed weights are given."""

    tensors: tuple[torch.Tensor | None, ...]
    """The rows, their scales, and those of the weight."""
    apart: tuple[int, ...]
    """How far the scales of rows, and the tensors of an expert, lie behind those before."""
    in_fp8: bool
    tile: int
    """The inputs that a program takes in each turn, and the least that it can take."""
    least: int


def _warps(rows: int) -> int:
    return 4 if rows <= 64 else 8


def _apart(weight: PackedWeight) -> tuple[int, int, int, int]:
    """Returns how far the codes, upper bits, scales and wide scales of an expert lie behind those before."""
    found = (weight.codes, weight.upper, weight.scales, weight.wide)
    codes, upper, scales, wide = (0 if each is None else each.stride(0) for each in found)
    return codes, upper, scales, wide


def _numbers(form: ExpertsForm) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return form.correction, form.factors


def _stacked(biases: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    found = [bias for bias in biases if bias is not None]
    return torch.stack(found) if found else None
