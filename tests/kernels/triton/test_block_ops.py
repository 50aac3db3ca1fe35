"""Tests products with weights that stay packed against those with their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdserve_kernels.contract import BlockFormat, BlockWeight
from pdserve_kernels.triton import block_ops
from pdserve_kernels.triton.block_ops import TritonBlockLinear, widened
from pdserve_kernels.triton.block_packing import PACKED_FORMS, packed
from tests.kernels.random_blocks import dequantised, random_blocks
from tests.kernels.triton.device import DEVICE, assert_near

PROCESSORS = 4
FORMATS = sorted(PACKED_FORMS)


def weight_of(kind: BlockFormat, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> BlockWeight:
    made = random_blocks(kind, outputs, inputs, seed=outputs)
    return replace(made, blocks=made.blocks.to(DEVICE), dtype=dtype)


def numbers_of(weight: BlockWeight) -> torch.Tensor:
    return dequantised(replace(weight, blocks=weight.blocks.cpu()))


def inputs_of(kind: BlockFormat) -> int:
    """Returns a number of inputs that is no whole number of turns, if the format allows that."""
    return {256: 512, 128: 384, 32: 96}[kind.elements]


def scaled(weight: BlockWeight) -> float:
    """Returns the size of a weight's numbers, which may be anything."""
    return float(numbers_of(weight).abs().max())


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_numbers_and_products_are_those_of_the_format(kind: BlockFormat) -> None:
    torch.manual_seed(0)
    weight, inputs = weight_of(kind, 37, inputs_of(kind)), inputs_of(kind)
    wanted, size = numbers_of(weight), scaled(weight)
    own = packed(weight)
    assert own.nbytes == PACKED_FORMS[kind].nbytes(37, inputs)
    # A number with an offset may be rounded once or twice.
    torch.testing.assert_close(widened(own, torch.float32).cpu(), wanted, rtol=1e-6, atol=size * 1e-6)
    x, bias = torch.randn(3, inputs), torch.randn(37)
    linear = TritonBlockLinear(weight, bias.to(DEVICE) * size, PROCESSORS)
    ids = torch.tensor([3, 36, 3, 0], device=DEVICE)
    assert torch.equal(linear.rows(ids), widened(own, torch.float32)[ids])
    assert_near(linear(x.to(DEVICE)) / size, torch.addmm(bias * size, x, wanted.t()) / size, 20)


@pytest.mark.parametrize("rows", [0, 17, 70])
def test_tiles_of_other_sizes(rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = weight_of(BlockFormat.Q4_1, 130, 192), torch.randn(rows, 192)
    size = scaled(weight)
    got = TritonBlockLinear(weight, None, PROCESSORS)(x.to(DEVICE)) / size
    assert_near(got, x @ numbers_of(weight).t() / size, 20)


@pytest.mark.parametrize("kind", [BlockFormat.Q4_0, BlockFormat.Q6_K], ids=lambda kind: kind.name)
def test_a_row_is_the_same_in_any_step_of_few_rows(kind: BlockFormat) -> None:
    torch.manual_seed(2)
    linear, x = TritonBlockLinear(weight_of(kind, 20, 768), None, 16), torch.randn(4, 768, device=DEVICE)
    together, alone = linear(x), linear(x[2:3])
    if DEVICE.type == "cpu":  # The interpreter's products round alike, whatever the number of rows.
        torch.testing.assert_close(together[2:3], alone, rtol=1e-6, atol=1e-6)
    x[1] = float("nan")
    assert torch.equal(linear(x).isnan().all(1).cpu(), torch.tensor([False, True, False, False]))


@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_are_multiplied_by_the_library(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of some outputs are written down at a time, of which the last ones are fewer."""
    monkeypatch.setattr(block_ops, "WIDENED", 64 * 30)
    monkeypatch.setattr(block_ops, "FROM_LIBRARY", 4)
    torch.manual_seed(3)
    weight, x = weight_of(BlockFormat.Q8_0, 70, 64), torch.randn(5, 64)
    size, bias = scaled(weight), torch.randn(70)
    linear = TritonBlockLinear(weight, bias.to(DEVICE) * size if biased else None, PROCESSORS)
    wanted = x @ numbers_of(weight).t() / size
    assert_near(linear(x.to(DEVICE)) / size, wanted + bias if biased else wanted, 20)


def test_half_precision_rounds_each_number_once() -> None:
    torch.manual_seed(4)
    made = weight_of(BlockFormat.Q4_0, 37, 64, torch.float16)
    blocks = made.blocks.view(37, 2, 18).clone()
    blocks[..., :2] = (torch.rand(37, 2, device=DEVICE) + 0.5).half().unsqueeze(-1).view(torch.uint8)
    weight = replace(made, blocks=blocks.view(37, -1))
    x, wanted = torch.randn(5, 64).half(), numbers_of(weight).half()
    linear = TritonBlockLinear(weight, None, PROCESSORS)
    assert torch.equal(linear.rows(torch.arange(37, device=DEVICE)).cpu(), wanted)
    assert_near(linear(x.to(DEVICE)), (x.float() @ wanted.float().t()).half(), 8)


def test_inputs_of_another_number_are_refused() -> None:
    linear = TritonBlockLinear(weight_of(BlockFormat.Q4_0, 5, 64), None, PROCESSORS)
    with pytest.raises(ValueError, match=r"64 inputs was given \(2, 96\)"):
        linear(torch.zeros(2, 96, device=DEVICE))
