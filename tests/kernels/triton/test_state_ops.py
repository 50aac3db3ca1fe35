"""Tests the operations with states against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels import reference
from pdserve_kernels.contract import StateRuns
from pdserve_kernels.triton.state_ops import (
    TOKENS_AT_ONCE,
    VALUES_AT_ONCE,
    causal_conv,
    gated_delta_rule,
    mamba2_scan,
    mamba_scan,
)
from tests.kernels.triton.device import DEVICE, DTYPES, SEEDS, assert_near, examples

LENGTHS = st.lists(st.integers(1, 4) | st.just(TOKENS_AT_ONCE + 3), min_size=1, max_size=4) | st.just([1, 1, 1])
BLOCKS, LAYERS = 9, 2


def runs_of(lengths: list[int], keeps: bool = False) -> StateRuns:
    """Returns runs that begin with nothing, another state or the one that they leave; a fourth is padding.

    The states after some tokens before the last of a run stay if it ``keeps`` them.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    ends = zip([-1, 5, 2, -1], [0, 1, 2, -1], strict=True)
    sources, destinations = (torch.tensor(each[: len(lengths)]).int() for each in zip(*ends, strict=True))
    kept = torch.full((sum(lengths),), -1).int()
    inner = [at for first, n in zip(starts.tolist(), lengths[:3], strict=False) for at in range(first, first + n - 1)]
    for at, block in zip(inner[::-2], (3, 4, 6, 7, 8), strict=False):
        kept[at] = block
    return StateRuns(starts, sources, destinations, set(lengths) == {1}, kept if keeps else None)


def moved(runs: StateRuns) -> StateRuns:
    starts, sources, destinations = (each.to(DEVICE) for each in (runs.starts, runs.sources, runs.destinations))
    return StateRuns(starts, sources, destinations, runs.single, None if runs.kept is None else runs.kept.to(DEVICE))


def states(heads: int, *shape: int) -> torch.Tensor:
    """Returns the states of one of two layers, which are no dense tensor."""
    numbers = torch.Size(shape).numel()
    return torch.randn(BLOCKS, heads, LAYERS, numbers)[:, :, 1].view(BLOCKS, heads, *shape)


def on_device(state: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the strides of ``state``."""
    copied = torch.empty_strided(state.shape, state.stride(), dtype=state.dtype, device=DEVICE)
    return copied.copy_(state)


@pytest.mark.parametrize("silu", [True, False])
@settings(max_examples=examples(30), deadline=None)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 140), st.integers(2, 5), st.booleans(), DTYPES, SEEDS, st.booleans())
def test_causal_conv(
    silu: bool,
    lengths: list[int],
    heads: int,
    channels: int,
    width: int,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
    keeps: bool,
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(sum(lengths), heads, channels).to(dtype), torch.randn(width, heads, channels).to(dtype)
    bias = torch.randn(heads, channels).to(dtype) if biased else None
    state, runs = states(heads, width - 1, channels), runs_of(lengths, keeps)
    own = on_device(state)
    of_device = None if bias is None else bias.to(DEVICE)
    got = causal_conv(x.to(DEVICE), weight.to(DEVICE), of_device, own, moved(runs), silu=silu)
    assert_near(got, reference.causal_conv(x, weight, bias, state, runs, silu=silu), 2)
    assert torch.equal(own.cpu(), state)


@settings(max_examples=examples(40), deadline=None)
@given(
    LENGTHS,
    *(st.integers(1, 2), st.integers(1, 3), st.integers(2, 20), st.integers(1, 40)),
    *(st.booleans(), DTYPES, SEEDS, st.booleans()),
)
def test_gated_delta_rule(
    lengths: list[int],
    heads: int,
    group: int,
    keys: int,
    values: int,
    by_channel: bool,
    dtype: torch.dtype,
    seed: int,
    keeps: bool,
) -> None:
    torch.manual_seed(seed)
    tokens = sum(lengths)
    qkv = torch.randn(tokens, heads, 2 * keys + group * values).to(dtype)
    decays = (keys,) if by_channel else ()
    decay, beta = -torch.rand(tokens, heads, group, *decays), torch.rand(tokens, heads, group)
    state, runs = states(heads, group, keys, values), runs_of(lengths, keeps)
    own = on_device(state)
    got = gated_delta_rule(qkv.to(DEVICE), decay.to(DEVICE), beta.to(DEVICE), own, moved(runs))
    assert_near(got, reference.gated_delta_rule(qkv, decay, beta, state, runs), 4)
    torch.testing.assert_close(own.cpu(), state, rtol=1e-4, atol=1e-4)


def test_a_run_of_many_tokens_leaves_the_bits_of_single_ones() -> None:
    torch.manual_seed(0)
    tokens, heads, group, keys, values = 5, 2, 2, 8, VALUES_AT_ONCE + 4
    qkv = torch.randn(tokens, heads, 2 * keys + group * values, device=DEVICE)
    decay, beta = -torch.rand(tokens, heads, group, device=DEVICE), torch.rand(tokens, heads, group, device=DEVICE)
    at_once = on_device(states(heads, group, keys, values))
    one_by_one = on_device(at_once)
    together = gated_delta_rule(qkv, decay, beta, at_once, moved(runs_of([tokens])))
    alone = []
    for token in range(tokens):
        part = slice(token, token + 1)
        ends = torch.tensor([[-1] if token == 0 else [0], [0]], device=DEVICE).int()
        run = StateRuns(torch.tensor([0, 1], device=DEVICE).int(), ends[0], ends[1], single=True)
        alone.append(gated_delta_rule(qkv[part], decay[part], beta[part], one_by_one, run))
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(at_once, one_by_one)


@settings(max_examples=examples(40), deadline=None)
@given(
    LENGTHS, st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(1, 20), DTYPES, SEEDS, st.booleans()
)
def test_mamba2_scan(
    lengths: list[int], groups: int, heads: int, head_dim: int, size: int, dtype: torch.dtype, seed: int, keeps: bool
) -> None:
    torch.manual_seed(seed)
    tokens = sum(lengths)
    xbc = torch.randn(tokens, groups, heads * head_dim + 2 * size).to(dtype)
    steps, rate, skip = torch.rand(tokens, groups, heads), -torch.rand(groups, heads), torch.randn(groups, heads)
    state, runs = states(groups, heads, head_dim, size), runs_of(lengths, keeps)
    own = on_device(state)
    got = mamba2_scan(xbc.to(DEVICE), steps.to(DEVICE), rate.to(DEVICE), skip.to(DEVICE), own, moved(runs))
    assert_near(got, reference.mamba2_scan(xbc, steps, rate, skip, state, runs), 4)
    torch.testing.assert_close(own.cpu(), state, rtol=1e-4, atol=1e-4)


@settings(max_examples=examples(40), deadline=None)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 40), st.integers(1, 20), DTYPES, SEEDS, st.booleans())
def test_mamba_scan(
    lengths: list[int], heads: int, channels: int, size: int, dtype: torch.dtype, seed: int, keeps: bool
) -> None:
    torch.manual_seed(seed)
    tokens = sum(lengths)
    x, steps = torch.randn(tokens, heads, channels).to(dtype), torch.rand(tokens, heads, channels)
    write, read = torch.randn(2, tokens, size)
    rate, skip = -torch.rand(heads, channels, size), torch.randn(heads, channels)
    state, runs = states(heads, channels, size), runs_of(lengths, keeps)
    own = on_device(state)
    given, lengths_of, written, looked, rates, skipped = (
        each.to(DEVICE) for each in (x, steps, write, read, rate, skip)
    )
    got = mamba_scan(given, lengths_of, written, looked, rates, skipped, own, moved(runs))
    assert_near(got, reference.mamba_scan(x, steps, write, read, rate, skip, state, runs), 4)
    torch.testing.assert_close(own.cpu(), state, rtol=1e-4, atol=1e-4)
