"""Tests attention to chosen tokens in both CPU kernel sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels import reference
from pdserve_kernels.contract import AttentionRow, IndexQueries, Kernels, SparseForm
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.kv_layout import KvLayout
from tests.examples import examples
from tests.kernels.chosen_tokens import CPU, defined, random_step
from tests.kernels.shared_tables import spoil

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scores", "places"),
    [
        ([1.0, 3.0, 2.0], [1, 2]),
        ([2.0, 1.0, 2.0, 2.0], [0, 2]),
        ([0.0, -0.0, 0.0], [0, 1]),
        ([-INF, -INF], [0, 1]),
        ([5.0, NAN, INF, 1.0], [1, 2]),
        ([4.0], [0]),
    ],
)
def test_the_first_of_equal_scores_are_chosen(scores: list[float], places: list[int]) -> None:
    assert reference.chosen(torch.tensor(scores), 2).tolist() == places


@settings(max_examples=examples(20))
@given(st.data(), st.integers(1, 3), st.sampled_from([1, 4, 16]), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_each_token_attends_to_its_own_choice(
    kernels: Kernels, data: st.DataObject, layers: int, block_size: int, count: int, seed: int
) -> None:
    torch.manual_seed(seed)
    rank, turned, channels = data.draw(st.sampled_from([(20, 4, 6), (64, 16, 16), (512, 64, 128)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    layout = KvLayout(1, layers, block_size, rank + turned + channels, dtype, rank, data.draw(st.booleans()))
    blocks, rows = iter(torch.randperm(60).tolist()), []
    for _ in range(data.draw(st.integers(1, 3))):
        context = data.draw(st.integers(1, min(300, 20 * block_size)))
        own = [next(blocks) for _ in range(-(-context // block_size))]
        rows.append(AttentionRow(data.draw(st.integers(1, min(context, 9))), context, own))
    heads, sinks = data.draw(st.sampled_from([1, 5])), data.draw(st.booleans())
    pool = 1 if layout.fp8 else data.draw(st.sampled_from([1, 1, 3, 8]))
    step = random_step(layout, rows, heads, count, 60, channels, sinks=sinks, pool=pool)
    owned = {block for row in rows for block in row.blocks}
    cache = step.cache.clone()
    poison = [block for block in range(60) if block not in owned]
    spoil(layout, cache, poison)
    spoilt = cache[poison].view(torch.uint8).clone()
    got = step.attended(kernels, cache)
    wanted, stored = defined(step)
    assert torch.equal(cache[list(owned)], stored[list(owned)])
    assert torch.equal(cache[poison].view(torch.uint8), spoilt)
    tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.float(), wanted, rtol=tolerance, atol=tolerance)
    if isinstance(kernels, CompiledKernels):
        order = torch.randperm(got.shape[1]).tolist()
        for some in (order[:1], order[1:]):
            assert not some or torch.equal(step.of(some).attended(kernels, cache), got[:, some])


@pytest.mark.parametrize("fp8", [False, True])
def test_a_score_that_is_no_number_is_chosen(kernels: Kernels, fp8: bool) -> None:
    """So the token's result shows it, and no token has too few."""
    layout = KvLayout(1, 1, 4, 14, torch.float32, 4, fp8)
    step = random_step(layout, [AttentionRow(2, 30, range(8))], 2, 3, 8, 6)
    spoil(layout, step.cache, [2])
    assert step.attended(kernels, step.cache).isnan().all()


def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    layout, row = KvLayout(1, 2, 4, 14, torch.float32, 4), AttentionRow(1, 5, [0, 1])
    step = random_step(layout, [row], 2, 3, 8, 6)
    attend = kernels.plan_sparse(layout, step.cache, [row], 2, 1.0, step.form)
    with pytest.raises(ValueError, match="no layer before this one has chosen tokens"):
        attend(0, step.query, step.key, None)
    plain = KvLayout(1, 2, 4, 14, torch.float32)
    with pytest.raises(ValueError, match="tokens are chosen where keys have the values in them"):
        kernels.plan_sparse(plain, plain.allocate(2, CPU), [row], 2, 1.0, step.form)


def test_the_compiled_set_refuses_other_queries(compiled: CompiledKernels) -> None:
    layout, row = KvLayout(1, 2, 4, 14, torch.float32, 4), AttentionRow(1, 5, [0, 1])
    step = random_step(layout, [row], 2, 3, 8, 6)
    index, attend = step.index, compiled.plan_sparse(layout, step.cache, [row], 2, 1.0, SparseForm(3, 8))
    others = [
        IndexQueries(index.query[..., :5], index.weights),
        IndexQueries(index.query, index.weights[:, 1:]),
        IndexQueries(index.query.double(), index.weights),
        IndexQueries(index.query, index.weights.double()),
        IndexQueries(index.query.repeat(2, 1, 1), index.weights.repeat(2, 1)),
    ]
    for other in others:
        with pytest.raises(ValueError, match=r"do not fit|fp32"):
            attend(0, step.query, step.key, other)
    beyond = compiled.plan_sparse(layout, step.cache, [AttentionRow(1, 5, [0, 8])], 2, 1.0, SparseForm(3, 8))
    with pytest.raises(IndexError):
        beyond(0, step.query, step.key, index)
