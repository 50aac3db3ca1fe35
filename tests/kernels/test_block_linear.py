"""Tests products with weights in blocks against the product with the dequantised weight, which defines them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels.contract import BLOCK_FORMATS, BlockFormat, BlockWeight
from pdserve_kernels.cpu.compiled_kernels import CompiledBlockLinear, CompiledKernels
from tests.kernels.random_blocks import dequantised, random_blocks

FORMATS = st.sampled_from(sorted(BLOCK_FORMATS))
SEEDS = st.integers(0, 2**32 - 1)
SPAN = 32
"""So many inputs are rounded to bytes with one scale."""


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs as the product takes them: bytes times a scale for each ``SPAN`` of a row, in fp64.

    The second result is by how much each may differ, because it lies between two bytes within fp32's precision.
    """
    spans = x.double().view(x.shape[0], -1, SPAN)
    scales = spans.abs().amax(-1, keepdim=True) / 127
    steps = torch.where(scales > 0, spans / scales, 0)
    undecided = (steps - steps.floor() - 0.5).abs() < 1e-4
    return (steps.round() * scales).view(x.shape), (undecided * scales).view(x.shape)


@settings(max_examples=80, deadline=None)
@given(FORMATS, st.integers(1, 20), st.integers(1, 5), st.sampled_from([1, 15, 16, 17, 50]), st.booleans(), SEEDS)
def test_the_product(
    each_compiled: CompiledKernels, kind: BlockFormat, rows: int, blocks: int, outer: int, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = random_blocks(kind, outer, blocks * kind.elements, seed)
    x = torch.randn(rows, weight.inputs) * 10.0 ** torch.randint(-3, 3, (rows, 1))
    x[torch.rand(x.shape) < 0.01] *= 30
    x[:, : SPAN // 2] = 0
    x = x.bfloat16()
    bias = torch.randn(outer).bfloat16() if biased else None
    got = each_compiled.block_linear(weight, bias)(x)
    assert got.shape == (rows, outer)
    assert got.dtype is torch.bfloat16
    plain = dequantised(weight).double()
    offset = torch.zeros(outer).double() if bias is None else bias.double()
    # The result is rounded to bf16.
    bytes_of_x, undecided = rounded(x)
    wanted = bytes_of_x @ plain.T + offset
    size = x.double().abs() @ plain.abs().T + offset.abs()
    either = undecided @ plain.abs().T
    assert bool(((got - wanted).abs() <= (wanted.abs() + either) * 2**-8 + size * 1e-6 + either).all())
    # Against the product with unrounded inputs, each is at most half a step of its span away.
    step = x.double().abs().view(rows, -1, SPAN).amax(-1, keepdim=True).expand(-1, -1, SPAN).reshape(x.shape) / 254
    exact = x.double() @ plain.T + offset
    assert bool(((got - exact).abs() <= exact.abs() * 2**-8 + (step @ plain.abs().T) * 1.01 + size * 1e-6).all())


@pytest.mark.parametrize("kind", sorted(BLOCK_FORMATS))
def test_a_row_does_not_depend_on_the_other_rows(each_compiled: CompiledKernels, kind: BlockFormat) -> None:
    linear = each_compiled.block_linear(random_blocks(kind, 70, 512, 1), torch.randn(70).bfloat16())
    x = torch.randn(27, 512).bfloat16()
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in range(2, 28):
        assert torch.equal(linear(x[:rows]), alone[:rows])


def test_nor_on_the_number_of_threads(each_compiled: CompiledKernels) -> None:
    linear = each_compiled.block_linear(random_blocks(BlockFormat.Q8_0, 200, 512, 2))
    x = torch.randn(9, 512).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = linear(x)
        torch.set_num_threads(3)
        assert torch.equal(linear(x), wanted)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(FORMATS, st.sampled_from([1, 16, 45]), st.integers(0, 30), SEEDS)
def test_rows_are_looked_up(
    each_compiled: CompiledKernels, kind: BlockFormat, outer: int, count: int, seed: int
) -> None:
    weight = random_blocks(kind, outer, 512, seed)
    ids = torch.randint(0, outer, (count,), generator=torch.Generator().manual_seed(seed))
    table = each_compiled.block_linear(weight)
    wanted = dequantised(weight)[ids].bfloat16()
    torch.testing.assert_close(table.rows(ids), wanted, rtol=2**-8, atol=1e-7)
    assert torch.equal(table.rows(ids.int()), table.rows(ids))


@pytest.mark.parametrize("wrong", [-1, 45])
def test_a_row_that_is_not_there(each_compiled: CompiledKernels, wrong: int) -> None:
    table = each_compiled.block_linear(random_blocks(BlockFormat.Q8_0, 45, 64, 3))
    with pytest.raises(IndexError, match="45 rows"):
        table.rows(torch.tensor([3, wrong]))


@pytest.mark.parametrize("kind", sorted(BLOCK_FORMATS))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_spoil_their_row(
    each_compiled: CompiledKernels, kind: BlockFormat, value: float
) -> None:
    x = torch.randn(3, 512).bfloat16()
    x[1, 77] = value
    out = each_compiled.block_linear(random_blocks(kind, 20, 512, 4))(x)
    assert out[[0, 2]].isfinite().all()
    assert not out[1].isfinite().any()


@pytest.mark.parametrize("bits", [0x7C00, 0x7E00, 0xFC00], ids=["infinity", "nan", "minus infinity"])
def test_scales_that_are_not_finite_are_seen(each_compiled: CompiledKernels, bits: int) -> None:
    weight = random_blocks(BlockFormat.Q8_0, 20, 64, 5)
    weight.blocks[7, :2] = torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8)
    out = each_compiled.block_linear(weight)(torch.randn(2, 64).bfloat16())
    assert not out[:, 7].isfinite().any()
    assert out[:, :7].isfinite().all()


def test_other_inputs_are_refused(each_compiled: CompiledKernels) -> None:
    linear = each_compiled.block_linear(random_blocks(BlockFormat.Q8_0, 20, 64, 6))
    for wrong in (torch.zeros(1, 64), torch.zeros(1, 96).bfloat16(), torch.zeros(64).bfloat16()):
        with pytest.raises(ValueError, match="64 bf16 inputs"):
            linear(wrong)
    empty = linear(torch.zeros(0, 64).bfloat16())
    assert empty.shape == (0, 20)


@pytest.mark.parametrize("kind", sorted(BLOCK_FORMATS))
def test_memory_is_that_of_the_blocks(each_compiled: CompiledKernels, kind: BlockFormat) -> None:
    weight = BlockWeight(kind, torch.zeros(256, 4 * kind.block_bytes, dtype=torch.uint8))
    linear = each_compiled.block_linear(weight)
    assert isinstance(linear, CompiledBlockLinear)
    padding = 64 * (256 // 16 + 1)
    assert linear.nbytes <= weight.blocks.nbytes * (1.03 if kind.elements == 256 else 1) + padding
