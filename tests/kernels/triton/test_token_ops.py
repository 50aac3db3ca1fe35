"""Tests the ops on single tokens against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels import reference
from pdserve_kernels.feed_forward import Activation
from pdserve_kernels.triton.token_ops import add_rms_norm, gelu_and_mul, rms_norm, rotary, silu_and_mul
from tests.kernels.triton.device import DEVICE, DTYPES, SEEDS, assert_near, examples

EPS = 1e-5
TOKENS = st.integers(0, 5)
WIDTHS = st.integers(1, 70) | st.sampled_from([576, 1025])


@settings(max_examples=examples(25), deadline=None)
@given(TOKENS, WIDTHS, DTYPES, SEEDS)
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(tokens, width).to(dtype), torch.randn(width).to(dtype)
    assert_near(rms_norm(x.to(DEVICE), weight.to(DEVICE), EPS), reference.rms_norm(x, weight, EPS), 2)


@settings(max_examples=examples(15), deadline=None)
@given(TOKENS, st.integers(1, 4), st.integers(0, 3), st.integers(1, 40), DTYPES, SEEDS)
def test_rms_norm_of_heads_inside_a_projection(
    tokens: int, heads: int, others: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    projection, weight = torch.randn(tokens, heads + others, head_dim).to(dtype), torch.randn(head_dim).to(dtype)
    x = projection.to(DEVICE)[:, others:]
    assert_near(rms_norm(x, weight.to(DEVICE), EPS), reference.rms_norm(projection[:, others:], weight, EPS), 2)


@settings(max_examples=examples(25), deadline=None)
@given(TOKENS, WIDTHS, DTYPES, SEEDS)
def test_add_rms_norm(tokens: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, residual = torch.randn(2, tokens, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    wanted, wanted_sum = reference.add_rms_norm(x, residual, weight, EPS)
    got, got_sum = add_rms_norm(x.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), EPS)
    # The interpreter truncates to bf16 where hardware rounds, so the results are not equal there.
    assert_near(got_sum, wanted_sum)
    assert_near(got, wanted, 2)


@settings(max_examples=examples(25), deadline=None)
@given(TOKENS, st.integers(1, 40), st.integers(0, 2), st.integers(1, 35), DTYPES, SEEDS)
def test_rotary(tokens: int, heads: int, others: int, half: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    projection = torch.randn(tokens, heads + others, 2 * half).to(dtype)
    angles = torch.rand(tokens, half) * 100
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    got = rotary(projection.to(DEVICE)[:, :heads], cos.to(DEVICE), sin.to(DEVICE))
    # The reference rounds each product, the kernel only the sum.
    assert_near(got, reference.rotary(projection[:, :heads], cos, sin), 3)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
@settings(max_examples=examples(20), deadline=None)
@given(tokens=TOKENS, width=WIDTHS, dtype=DTYPES, seed=SEEDS)
def test_gated_activation(activation: Activation, tokens: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = (torch.randn(tokens, 2 * width) * 3).to(dtype)
    fast = {Activation.SILU: silu_and_mul, Activation.GELU_TANH: gelu_and_mul}[activation]
    wanted = reference.activated(gate_up.float(), activation, gated=True).to(dtype)
    assert_near(fast(gate_up.to(DEVICE)), wanted, 2)


def test_gates_far_from_zero_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    for fast in (silu_and_mul, gelu_and_mul):
        assert fast(gate_up.to(DEVICE)).tolist() == [[0.0, 0.0, 200.0, 1e4]]
