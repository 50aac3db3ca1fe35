"""Tests products in FP8 against those of rounded rows with the numbers of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pdserve_kernels import reference
from pdserve_kernels.contract import BlockFormat, BlockWeight, ExpertsForm, ExpertWeights
from pdserve_kernels.feed_forward import Activation, Routing
from pdserve_kernels.triton.expert_ops import TritonExperts
from pdserve_kernels.triton.fp8_products import GROUP, TritonFp8Linear, rounded_rows
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.kernels.random_blocks import dequantised, random_blocks
from tests.kernels.triton.device import DEVICE, NEEDS_FP8, assert_near

pytestmark = NEEDS_FP8
PROCESSORS = 4
FORMAT_ERROR = 0.03
"""A number in e4m3 is off by 2.6 % (RMS), and so is a product with others that are exact."""


def usual(outputs: int, inputs: int, seed: int) -> tuple[BlockWeight, torch.Tensor]:
    """Returns a weight in FP8 whose scales are about as large as others', and its numbers."""
    made = random_blocks(BlockFormat.FP8, outputs, inputs, seed)
    scales = torch.rand(outputs, inputs // GROUP, 1, generator=torch.Generator().manual_seed(seed)) / 2**10
    made.blocks.view(outputs, -1, BlockFormat.FP8.block_bytes)[..., :4] = scales.view(torch.uint8)
    return replace(made, blocks=made.blocks.to(DEVICE), dtype=torch.float32), dequantised(made)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Returns the numbers to which rows are rounded."""
    groups = x.view(len(x), x.shape[1] // GROUP, GROUP)
    numbers, sizes = reference.rounded_inputs(groups)
    return (numbers.to(x.dtype) * sizes.unsqueeze(-1)).view(x.shape)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu() - wanted).norm() / wanted.norm())


def test_the_largest_of_128_numbers_is_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 3 * GROUP) * 2.0 ** torch.randint(-40, 40, (37, 3 * GROUP))
    x[3, :GROUP] = 0.0
    x[5, 7], x[6, GROUP], x[7, 2 * GROUP + 1] = torch.inf, -torch.inf, torch.nan
    numbers, sizes = rounded_rows(x.to(DEVICE))
    wanted, scales = reference.rounded_inputs(x.view(37, 3, GROUP))
    assert torch.equal(numbers.view(torch.uint8).cpu(), wanted.view(torch.uint8).view(37, -1))
    assert torch.equal(sizes[:, :37].t().cpu(), scales)
    finite, largest = scales.isfinite(), x.view(37, 3, GROUP).abs().amax(-1)
    assert (~finite).sum() == 3
    read = (wanted.float() * scales.unsqueeze(-1)).abs().amax(-1)
    torch.testing.assert_close(read[finite], largest[finite], rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [0, 3, 17])
def test_products_are_those_of_rounded_rows(rows: int) -> None:
    torch.manual_seed(rows)
    (weight, numbers), x, bias = usual(70, 2 * GROUP, rows), torch.randn(rows, 2 * GROUP), torch.randn(70)
    got = TritonFp8Linear(weight, bias.to(DEVICE), PROCESSORS)(x.to(DEVICE))
    assert_near(got, torch.addmm(bias, rounded(x), numbers.t()), 20)
    if rows:
        assert 0 < error(got, torch.addmm(bias, x, numbers.t())) < FORMAT_ERROR


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # The interpreter's, of what is not a number.
def test_a_row_is_the_same_in_any_step() -> None:
    """Programs round, or find rows rounded; they share the inputs, or have them all. The bits are the same."""
    torch.manual_seed(1)
    linear, x = TritonFp8Linear(usual(40, 8 * GROUP, 1)[0], None, PROCESSORS), torch.randn(130, 8 * GROUP).to(DEVICE)
    every = linear(x)
    for rows in (1, 17, 64):
        assert torch.equal(linear(x[5 : 5 + rows]), every[5 : 5 + rows])
    x[4] = torch.nan
    alike = linear(x)
    assert alike[4].isnan().all()
    assert torch.equal(alike[5:], every[5:])


def test_only_whole_blocks_are_multiplied_in_fp8() -> None:
    """Others, and all weights on older GPUs, are multiplied with rows as they are. The name of the set says which."""
    torch.manual_seed(2)
    short, x = random_blocks(BlockFormat.FP8_SHORT, 20, 96, 2), torch.randn(3, 2 * GROUP)
    kernels, older = TritonKernels(PROCESSORS, fp8=True), TritonKernels(PROCESSORS)
    cut = kernels.block_linear(replace(short, blocks=short.blocks.to(DEVICE), dtype=torch.float32))
    assert not isinstance(cut, TritonFp8Linear)
    assert kernels.name == "triton"
    weight, numbers = usual(20, 2 * GROUP, 2)
    assert_near(older.block_linear(weight)(x.to(DEVICE)), x @ numbers.t(), 20)
    assert_near(kernels.block_linear(weight)(x.to(DEVICE)), rounded(x) @ numbers.t(), 20)
    assert (kernels.name, older.name) == ("triton fp8", "triton")


FORM = ExpertsForm(3, 2 * GROUP, GROUP, torch.float32, Routing(2, normalised=True), Activation.SILU, gated=True)


def plain_experts(
    x: torch.Tensor, logits: torch.Tensor, form: ExpertsForm, dense: Sequence[tuple[torch.Tensor, ...]]
) -> torch.Tensor:
    """Computes ``reference.experts`` with the inputs of both products rounded, row by row."""
    weights, chosen = reference.route(logits, form.routing)
    out = torch.zeros_like(x)
    for row, (factors, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for factor, expert in zip(factors, experts, strict=True):
            if expert not in form.own:
                continue
            inner, down, inner_bias, down_bias = dense[expert - form.own.start]
            given = rounded(x[row : row + 1]) @ inner.t() * (factor if form.weighs_inputs else 1.0) + inner_bias
            middle = reference.activated(given, form.activation, gated=form.gated)
            result = rounded(middle) @ down.t() + down_bias
            out[row] += result[0] * (1.0 if form.weighs_inputs else factor)
    return out


@pytest.mark.parametrize(
    "form",
    [
        FORM,
        replace(FORM, gated=False, activation=Activation.RELU_SQUARED, some=range(1, 3)),
        replace(FORM, weighs_inputs=True),
    ],
    ids=["gated", "without gates, some of them", "weighed inputs"],
)
def test_experts(form: ExpertsForm) -> None:
    torch.manual_seed(3)
    weights, dense = [], []
    for number in form.own:
        found = [usual(form.channels, form.hidden, 3 * number + part) for part in range(2 if form.gated else 1)]
        down, wide_down = usual(form.hidden, form.channels, 3 * number + 2)
        biases = torch.randn(len(found) * form.channels), torch.randn(form.hidden)
        weights.append(ExpertWeights(tuple(each for each, _ in found), down, *(bias.to(DEVICE) for bias in biases)))
        dense.append((torch.cat([wide for _, wide in found]), wide_down, *biases))
    experts = TritonExperts(form, weights, fp8=True)
    assert experts.rounds
    x, logits = torch.randn(26, form.hidden), torch.randn(26, form.count)
    got = experts(x.to(DEVICE), logits.to(DEVICE))
    # A number that lies between two may be rounded to the other one.
    assert error(got, plain_experts(x, logits, form, dense)) < FORMAT_ERROR / 10
    exact = reference.experts(x, logits, form, dense, None)
    assert FORMAT_ERROR / 10 < error(got, exact) < 2 * FORMAT_ERROR
    assert torch.equal(experts(x[7:10].to(DEVICE), logits[7:10].to(DEVICE)), got[7:10])


def test_experts_of_other_forms_are_not_rounded() -> None:
    kinds = [random_blocks(BlockFormat.Q8_0, *shape, 1) for shape in ((2 * GROUP, 2 * GROUP), (2 * GROUP, GROUP))]
    inner, down = (replace(each, blocks=each.blocks.to(DEVICE)) for each in kinds)
    assert not TritonExperts(FORM, [ExpertWeights((inner,), down)] * FORM.count, fp8=True).rounds
