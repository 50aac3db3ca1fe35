"""Sends rows to a few of many experts without asking the device how many each has, so that a graph may record it.

One launch routes the rows. Two sort what they are sent to by expert, and cut the rows of each expert into tiles: as
many as there can be are launched, and those without rows end at once. A tile is multiplied with the weights of its
expert, and activated; a second launch multiplies by the other weights, and the last one adds the results of each row in
the order of its choice. So nothing is added by atomic operations, and a step gives the same again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pdserve_kernels.contract import BlockWeight, ExpertsForm, ExpertWeights, UnreadWeight
from pdserve_kernels.feed_forward import CLAMPED_AT, CLAMPED_SLOPE, Activation, GroupScore, Routing, Scoring
from pdserve_kernels.triton.paged_attention import launch_fitting
from pdserve_kernels.triton.token_ops import sigmoid

_SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SOFTMAX_OF_CHOSEN: 1, Scoring.SIGMOID: 2, Scoring.SIGMOID_OF_CHOSEN: 3}
_ACTIVATIONS = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.GELU: 2,
    Activation.RELU: 3,
    Activation.RELU_SQUARED: 4,
    Activation.CLAMPED_SILU: 5,
}
_SLOPE, _MOST = tl.constexpr(CLAMPED_SLOPE), tl.constexpr(CLAMPED_AT)

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
        if ACTIVATION == 5:
            gate = tl.where(gate > _MOST, _MOST, gate)
            up = tl.where(up > _MOST, _MOST, up)
            up = tl.where(up < -_MOST, -_MOST, up)
            result = (up + 1.0) * (gate * sigmoid(gate * _SLOPE))
        elif GATED:
            result = _activated(gate, ACTIVATION) * up
        else:
            result = _activated(up, ACTIVATION)
        to = out + place.to(tl.int64)[:, None] * CHANNELS + column[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=there[:, None] & wanted[None, :])


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


class TritonExperts:
    """Satisfies ``contract.Experts``. The weights of all experts lie behind each other."""

    def __init__(self, form: ExpertsForm, weights: Iterable[ExpertWeights]) -> None:
        """Reads the weights. Raises ValueError if the rule cannot choose among them."""
        form.routing.check(form.count)
        self._form = form
        self._correction, self._factors = (None if each is None else each.float() for each in _numbers(form))
        self._inner, self._down = torch.empty(0), torch.empty(0)
        biases: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        outputs = (2 if form.gated else 1) * form.channels
        for number, each in enumerate(weights):
            inner = [_read(weight) for weight in each.inner]
            down = _read(each.down)
            if not number:
                self._inner = down.new_empty((len(form.own), outputs, form.hidden))
                self._down = down.new_empty((len(form.own), form.hidden, form.channels))
            if sum(map(len, inner)) != outputs:
                raise ValueError(f"{outputs} outputs are wanted of an expert, and there are {sum(map(len, inner))}")
            torch.cat(inner, out=self._inner[number])
            self._down[number].copy_(down)
            biases.append((each.inner_bias, each.down_bias))
        if len(biases) != len(form.own):
            raise ValueError(f"{len(form.own)} experts are wanted, and there are {len(biases)}")
        self._inner_bias, self._down_bias = (_stacked(found) for found in zip(*biases, strict=True))

    def __call__(self, x: torch.Tensor, logits: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        form, rows = self._form, len(x)
        x, out = x.contiguous(), torch.empty_like(x)
        if not rows:
            return out
        count = form.routing.chosen
        factors, chosen = route(logits, form.routing, self._correction, self._factors)
        if form.some is not None:  # what belongs to other ranks has numbers that no expert has
            chosen -= form.own.start
        by_expert = sort_rows(chosen, len(form.own))
        places = (by_expert.order, by_expert.tiles)
        middle = torch.empty((rows * count, form.channels), dtype=x.dtype, device=x.device)
        empty = torch.empty if form.some is None else torch.zeros
        results = empty((rows * count, form.hidden), dtype=x.dtype, device=x.device)
        columns = min(COLUMNS, max(16, triton.next_power_of_2(form.channels)))
        warps = 4 if by_expert.rows <= 64 else 8
        launch_fitting(
            _inner_kernel,
            (triton.cdiv(form.channels, columns), len(by_expert.tiles)),
            (x, self._inner, self._inner_bias, factors, *places, middle),
            (
                form.hidden,
                form.channels,
                count,
                form.gated,
                form.weighs_inputs,
                _ACTIVATIONS[form.activation],
                by_expert.rows,
                columns,
                INPUTS,
            ),
            STAGES,
            warps,
        )
        columns = min(COLUMNS, max(16, triton.next_power_of_2(form.hidden)))
        launch_fitting(
            _outer_kernel,
            (triton.cdiv(form.hidden, columns), len(by_expert.tiles)),
            (middle, self._down, self._down_bias, factors, *places, results),
            (form.hidden, form.channels, form.weighs_inputs, by_expert.rows, columns, INPUTS),
            STAGES,
            warps,
        )
        block = min(SUMMED, triton.next_power_of_2(form.hidden))
        beside = None if beside is None else beside.contiguous()
        _sum_kernel[rows, triton.cdiv(form.hidden, block)](results, beside, out, form.hidden, count, block)
        return out


def _numbers(form: ExpertsForm) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return form.correction, form.factors


def _read(weight: UnreadWeight | BlockWeight) -> torch.Tensor:
    if isinstance(weight, BlockWeight):
        raise TypeError("the Triton kernels do not multiply from blocks")
    return weight.read()


def _stacked(biases: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    found = [bias for bias in biases if bias is not None]
    return torch.stack(found) if found else None
