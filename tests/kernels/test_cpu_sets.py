"""Tests both CPU kernel sets against the definition of each op: random shapes, both dtypes, edge cases."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels import reference
from pdserve_kernels.contract import AttentionRow, HeadNorms, Kernels
from pdserve_kernels.cpu import torch_kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels, CompiledLinear
from pdserve_kernels.feed_forward import ALWAYS_GATED, Activation
from pdserve_kernels.kv_layout import KvLayout
from tests.examples import examples
from tests.kernels.shared_tables import check_shared_table, every_number, random_cache, spoil

CPU = torch.device("cpu")
NUM_BLOCKS = 40
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.sampled_from([1, 2, 15, 16, 17, 48, 60, 130])
EPS = 1e-5
many = settings(max_examples=examples(60))


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Checks that two results are close. In bf16 they may differ by several roundings."""
    assert got.shape == wanted.shape
    assert got.dtype == dtype
    rtol, atol = (3e-2, 3e-2) if dtype is torch.bfloat16 else (1e-4, 2e-5)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=rtol, atol=atol * scale)


@many
@given(st.integers(1, 9), WIDTHS, DTYPES, SEEDS)
def test_norms(kernels: Kernels, rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, residual, weight = (torch.randn(*shape) for shape in ((rows, width), (rows, width), (width,)))
    x, residual, weight = x.to(dtype), residual.to(dtype), weight.to(dtype)
    close(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), dtype)
    before = x.clone(), residual.clone()
    got, total = kernels.add_rms_norm(x, residual, weight, EPS)
    wanted, wanted_total = reference.add_rms_norm(x, residual, weight, EPS)
    close(got, wanted, dtype)
    assert torch.equal(total, wanted_total)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@many
@given(st.integers(1, 9), WIDTHS, DTYPES, st.sampled_from([0.1, 3.0, 40.0]), SEEDS)
def test_activations(kernels: Kernels, rows: int, width: int, dtype: torch.dtype, spread: float, seed: int) -> None:
    torch.manual_seed(seed)
    gate_up = (torch.randn(rows, 2 * width) * spread).to(dtype)
    for activation in Activation:
        for gated in (True, False):
            if activation is not Activation.XIELU and (gated or activation not in ALWAYS_GATED):
                wanted = reference.activated(gate_up.float(), activation, gated=gated)
                close(kernels.activated(gate_up, activation, gated=gated), wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(kernels: Kernels, dtype: torch.dtype, value: float) -> None:
    x, weight = torch.randn(3, 34).to(dtype), torch.randn(34).to(dtype)
    x[1, 5] = value
    spoilt = [
        kernels.rms_norm(x, weight, EPS),
        kernels.add_rms_norm(x, torch.zeros_like(x), weight, EPS)[0],
        kernels.activated(x, Activation.SILU, gated=True),
        kernels.linear(torch.randn(7, 34).to(dtype))(x),
    ]
    for out in spoilt:
        assert out[[0, 2]].isfinite().all()
    assert not spoilt[3][1].isfinite().any()
    if value != value:
        assert all(not out[1].isfinite().all() for out in spoilt)


@many
@given(
    st.integers(1, 40), st.sampled_from([1, 2, 31, 64, 70]), st.sampled_from([1, 31, 32, 33, 70]), DTYPES,
    st.booleans(), SEEDS,
)  # fmt: skip
def test_linear(
    kernels: Kernels, rows: int, inner: int, outer: int, dtype: torch.dtype, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    bias = torch.randn(outer).to(dtype) if biased else None
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(kernels.linear(weight, bias)(x), wanted, dtype, scale=1 + inner**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(2, 1), (60, 192), (98, 17), (576, 960), (1536, 70)])
def test_a_row_of_a_compiled_linear_layer_depends_neither_on_other_rows_nor_on_threads(
    each_compiled: CompiledKernels, inner: int, outer: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(inner)
    linear = each_compiled.linear(torch.randn(outer, inner).to(dtype), torch.randn(outer).to(dtype))
    if not isinstance(linear, CompiledLinear):
        pytest.skip("this CPU has no AVX2")
    x = torch.randn(64, inner).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([linear(row[None]) for row in x])
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in range(1, 65):
                assert torch.equal(linear(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("biased", [False, True])
def test_a_compiled_linear_layer_in_bf16_rounds_a_sum_once(each_compiled: CompiledKernels, biased: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(13, 520).bfloat16(), torch.randn(1201, 520).bfloat16()
    bias = torch.randn(1201).bfloat16() if biased else None
    linear = each_compiled.linear(weight, bias)
    if not isinstance(linear, CompiledLinear):
        pytest.skip("this CPU has no AVX2")
    wanted = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # A sum in fp32 that is rounded once is off by half a step of bf16 at most, and a little.
    torch.testing.assert_close(linear(x).double(), wanted, rtol=2**-8, atol=1e-3)


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    return KvLayout(
        kv_heads=draw(st.integers(1, 3)),
        num_layers=draw(st.integers(1, 2)),
        block_size=draw(st.sampled_from([1, 4, 16, 32])),
        head_dim=draw(st.sampled_from([2, 10, 32, 64, 80, 128])),
        dtype=draw(DTYPES),
        fp8=draw(st.booleans()),
    )


@st.composite
def steps(draw: st.DrawFn, block_size: int) -> list[AttentionRow]:
    """Draws rows of requests that share no block. Some contexts are longer than one part of the decode kernel."""
    free = draw(st.permutations(range(NUM_BLOCKS)))
    contexts = draw(st.lists(st.integers(1, 40) | st.integers(1, 600), min_size=1, max_size=4))
    rows: list[AttentionRow] = []
    for context in contexts:
        blocks = -(-context // block_size)
        if blocks > len(free):
            continue
        new = draw(st.sampled_from([1, 1, 2, 13, 40, context]))
        rows.append(AttentionRow(min(new, context), context, free[:blocks]))
        free = free[blocks:]
    if not rows:
        rows.append(AttentionRow(1, 1, free[:1]))
    return sorted(rows, key=lambda row: row.new_tokens > 1)


@settings(max_examples=examples(50))
@given(
    layouts(), st.data(), st.sampled_from([1, 2, 3, 4, 7]), st.sampled_from([0.3, 1.0]),
    st.none() | st.integers(1, 300), st.booleans(), st.sampled_from([None, None, 0.7, 30.0]), st.booleans(),
    st.booleans(), SEEDS,
)  # fmt: skip
def test_attention_of_a_step(
    kernels: Kernels,
    layout: KvLayout,
    data: st.DataObject,
    group: int,
    scale: float,
    window: int | None,
    chunked: bool,
    cap: float | None,
    normed: bool,
    sunk: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    rows, heads, dtype = data.draw(steps(layout.block_size)), layout.kv_heads * group, layout.dtype
    cache = random_cache(layout, NUM_BLOCKS)
    expected = cache.clone()
    # Blocks that no request holds are NaN, so that reading one spoils the result. Those before a window are given back.
    held = [left_out(row, layout.block_size, window) for row in rows]
    owned = {block for row in held for block in row.blocks}
    poison = [block for block in range(NUM_BLOCKS) if block not in owned]
    spoil(layout, cache, poison)
    spoilt = cache[poison].clone()
    tokens = sum(row.new_tokens for row in rows)
    scale *= layout.head_dim**-0.5
    half = layout.head_dim // 2
    qkv = torch.randn(tokens, heads + 2 * layout.kv_heads, layout.head_dim).to(dtype)
    angle = torch.randn(tokens, half)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = None
    if normed:
        norms = HeadNorms(torch.randn(layout.head_dim).to(dtype), torch.randn(layout.head_dim).to(dtype), EPS)
    plain = None if norms is None else HeadNorms(norms.query.float(), norms.key.float(), EPS)
    query, key_value = reference.projected(qkv.float(), layout.kv_heads, cos.float(), sin.float(), plain)
    query, key_value = query.to(dtype), key_value.to(dtype)
    sinks = torch.randn(heads) * 4 if sunk else None
    attention = kernels.plan_attention(layout, cache, held, heads, scale, cap)
    for layer in range(layout.num_layers):
        slots = torch.tensor(
            [
                row.blocks[at // layout.block_size] * layout.block_size + at % layout.block_size
                for row in rows
                for at in range(row.context_len - row.new_tokens, row.context_len)
            ]
        )
        reference.kv_write(expected, layout, layer, slots, key_value[0], key_value[1])
        got = attention.from_projection(layer, qkv, cos, sin, norms, window, chunked=chunked, sinks=sinks)
        if layout.fp8:
            # A key that is rounded to the next number of bf16 may be rounded to the next one of e4m3.
            seen, known = (reference.stored(blocks[list(owned)], layout) for blocks in (cache, expected))
            torch.testing.assert_close(seen, known, rtol=2**-3, atol=2**-6)
            expected[list(owned)] = cache[list(owned)]
        close(reference.stored(cache, layout)[list(owned)], reference.stored(expected, layout)[list(owned)], dtype, 2)
        wanted = plain_attention(layout, expected, rows, query, layer, scale, window, cap, chunked, sinks)
        close(got, wanted, dtype, scale=3)
        again = attention(layer, query, key_value, window, chunked=chunked, sinks=sinks)
        reference.kv_write(expected, layout, layer, slots, key_value[0], key_value[1])
        assert torch.equal(cache[list(owned)], expected[list(owned)])
        wanted = plain_attention(layout, expected, rows, query, layer, scale, window, cap, chunked, sinks)
        close(again, wanted, dtype, scale=2)
        # What is stored already need not be given again.
        assert torch.equal(attention(layer, query, None, window, chunked=chunked, sinks=sinks), again)
    assert torch.equal(cache[poison].view(torch.uint8), spoilt.view(torch.uint8))


@st.composite
def latent_layouts(draw: st.DrawFn) -> KvLayout:
    """Draws layouts whose keys have the values in them, DeepSeek's shape among them."""
    rank, rest = draw(st.sampled_from([(2, 2), (20, 4), (64, 16), (512, 64), (512, 64)]))
    block_size = draw(st.sampled_from([1, 4, 16, 32]))
    return KvLayout(1, draw(st.integers(1, 2)), block_size, rank + rest, draw(DTYPES), rank, draw(st.booleans()))


@settings(max_examples=examples(30))
@given(latent_layouts(), st.data(), st.sampled_from([1, 2, 5, 16, 20]), st.none() | st.integers(1, 300), SEEDS)
def test_attention_to_keys_that_have_the_values_in_them(
    kernels: Kernels, layout: KvLayout, data: st.DataObject, heads: int, window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    rows, dtype, scale = data.draw(steps(layout.block_size)), layout.dtype, layout.head_dim**-0.5
    cache = random_cache(layout, NUM_BLOCKS)
    expected = cache.clone()
    held = [left_out(row, layout.block_size, window) for row in rows]
    owned = {block for row in held for block in row.blocks}
    poison = [block for block in range(NUM_BLOCKS) if block not in owned]
    spoil(layout, cache, poison)
    spoilt = cache[poison].clone()
    tokens = sum(row.new_tokens for row in rows)
    query, key = torch.randn(tokens, heads, layout.head_dim).to(dtype), torch.randn(1, tokens, 1, layout.head_dim)
    key = key.to(dtype)
    slots = torch.tensor(
        [
            row.blocks[at // layout.block_size] * layout.block_size + at % layout.block_size
            for row in rows
            for at in range(row.context_len - row.new_tokens, row.context_len)
        ]
    )
    attention = kernels.plan_attention(layout, cache, held, heads, scale)
    for layer in range(layout.num_layers):
        reference.kv_write(expected, layout, layer, slots, key[0], key[0])
        got = attention(layer, query, key, window)
        assert torch.equal(cache[list(owned)], expected[list(owned)])
        close(got, plain_attention(layout, expected, rows, query, layer, scale, window, None, False, None), dtype, 3)
        assert torch.equal(attention(layer, query, None, window), got)
    assert torch.equal(cache[poison].view(torch.uint8), spoilt.view(torch.uint8))


@many
@given(st.integers(1, 20), st.integers(1, 5), st.sampled_from([2, 6, 64]), st.sampled_from([3, 33, 64]), DTYPES, SEEDS)
def test_each_head_is_multiplied_by_its_own_weight(
    kernels: Kernels, tokens: int, heads: int, inner: int, outer: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(tokens, heads, inner).to(dtype), torch.randn(heads, outer, inner).to(dtype)
    linear = kernels.head_linear(weight)
    got = linear(x)
    close(got, torch.einsum("thi,hoi->tho", x.double(), weight.double()), dtype, scale=1 + inner**0.5)
    if isinstance(kernels, CompiledKernels) and isinstance(kernels.linear(weight[0]), CompiledLinear):
        assert torch.equal(torch.cat([linear(row[None]) for row in x]), got)


@many
@given(
    layouts() | latent_layouts(),
    st.sampled_from([1, 2, 3, 4, 7]), st.integers(0, 40) | st.integers(0, 600), st.integers(1, 20),
    st.none() | st.integers(1, 300), SEEDS,
)  # fmt: skip
def test_rows_that_share_a_block_table(
    kernels: Kernels, layout: KvLayout, group: int, past: int, new: int, window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    # A few rows with long contexts are gathered in turns.
    with patch.object(torch_kernels, "GATHERED_TOKENS", 1000):
        difference = check_shared_table(kernels, layout, group, past, new, window)
    if isinstance(kernels, CompiledKernels):
        assert difference == 0, "a row depends on nothing else in its step"
    assert difference <= (5e-2 if layout.dtype is torch.bfloat16 else 1e-5)


def left_out(row: AttentionRow, block_size: int, window: int | None) -> AttentionRow:
    """Returns the row without the blocks that a window does not reach."""
    first = 0 if window is None else max(0, row.context_len - row.new_tokens - window + 1) // block_size
    return AttentionRow(row.new_tokens, row.context_len, row.blocks[first:], first)


def test_a_window_that_reaches_blocks_that_are_left_out_is_an_error(kernels: Kernels) -> None:
    layout = KvLayout(kv_heads=1, num_layers=1, block_size=4, head_dim=16, dtype=torch.float32)
    rows = [AttentionRow(2, 14, [5, 6], 2)]
    attention = kernels.plan_attention(layout, torch.randn_like(layout.allocate(8, CPU)), rows, 1, 1.0)
    query, key_value = torch.randn(2, 1, 16), torch.randn(2, 2, 1, 16)
    assert attention(0, query, key_value, 5).isfinite().all()
    for window in (6, None):
        with pytest.raises(IndexError, match="window of 5"):
            attention(0, query, key_value, window)


def plain_attention(
    layout: KvLayout,
    cache: torch.Tensor,
    rows: list[AttentionRow],
    query: torch.Tensor,
    layer: int,
    scale: float,
    window: int | None,
    cap: float | None,
    chunked: bool,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    out, first = [], 0
    for row in rows:
        q = query[first : first + row.new_tokens]
        blocks = list(row.blocks)
        out.append(
            reference.paged_attention(
                q, cache, layout, layer, blocks, row.context_len, scale, window, cap, chunked=chunked, sinks=sinks
            )
        )
        first += row.new_tokens
    return torch.cat(out)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 5])
def test_a_request_that_is_not_finite_spoils_itself_alone(
    kernels: Kernels, dtype: torch.dtype, new: int, fp8: bool
) -> None:
    layout = KvLayout(kv_heads=2, num_layers=1, block_size=4, head_dim=64, dtype=dtype, fp8=fp8)
    cache = random_cache(layout, 8)
    spoil(layout, cache, [2])
    rows = [AttentionRow(new, 7, [0, 1]), AttentionRow(new, 7, [2, 3]), AttentionRow(new, 6, [4, 5])]
    query, key_value = torch.randn(3 * new, 4, 64).to(dtype), torch.randn(2, 3 * new, 2, 64).to(dtype)
    out = kernels.plan_attention(layout, cache, rows, 4, 0.125)(0, query, key_value)
    finite = out.isfinite().view(3, -1)
    assert finite[0].all()
    assert not finite[1].any()
    assert finite[2].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_rounded_alike_in_fp8(kernels: Kernels, dtype: torch.dtype) -> None:
    key = every_number(dtype)
    layout = KvLayout(1, 1, 16, 64, dtype, fp8=True)
    count = -(-len(key) // 16)
    cache, expected = layout.allocate(count, CPU), layout.allocate(count, CPU)
    key_value = torch.stack((key, key.flip(0))).unsqueeze(2)
    rows = [AttentionRow(len(key), len(key), range(count))]
    kernels.plan_attention(layout, cache, rows, 1, 1.0)(0, torch.zeros(len(key), 1, 64, dtype=dtype), key_value, 1)
    reference.kv_write(expected, layout, 0, torch.arange(len(key)), key_value[0], key_value[1])
    assert torch.equal(cache, expected)
    read = reference.stored(cache, layout)[:, 0, 0, 0].reshape(-1, 64)[: len(key)].double()
    wanted, finite = key.double(), key.isfinite().all(-1)
    assert read[~finite].isnan().all()
    # Close to the end of fp32, e4m3 rounds to what fp32 has not.
    finite &= wanted.abs().amax(-1) < 1.9 * 2.0**127
    largest = wanted[finite].abs().amax(-1, keepdim=True)
    # Smaller numbers than the least exponent allows are lost: they are 2 ** -120 at most.
    off = (read[finite] - wanted[finite]).abs() - wanted[finite].abs() / 16
    assert (off <= (largest * 2.0**-17).clamp(min=2.0**-120)).all()


@settings(max_examples=examples(20))
@given(st.integers(1, 3), st.sampled_from([64, 80, 128]), st.integers(1, 8), st.integers(0, 300), DTYPES, SEEDS)
def test_attention_to_fp8_is_attention_to_the_numbers_that_it_stands_for(
    kernels: Kernels, new: int, head_dim: int, group: int, past: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    layout, plain = (KvLayout(2, 1, 16, head_dim, dtype, fp8=fp8) for fp8 in (True, False))
    cache = random_cache(layout, 30)
    context = past + new
    rows = [AttentionRow(new, context, torch.randperm(30)[: -(-context // 16)].tolist())]
    query = torch.randn(new, 2 * group, head_dim).to(dtype)
    got = kernels.plan_attention(layout, cache, rows, 2 * group, 0.1)(0, query, None)
    wanted = kernels.plan_attention(plain, reference.stored(cache, layout), rows, 2 * group, 0.1)(0, query, None)
    close(got, wanted, dtype)
    if new > 1:
        assert torch.equal(got, wanted)
