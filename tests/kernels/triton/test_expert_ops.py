"""Tests experts against their definition: routing, the order of rows, and the sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels import reference
from pdserve_kernels.contract import BlockFormat, BlockWeight, ExpertsForm, ExpertWeights, UnreadWeight
from pdserve_kernels.feed_forward import ALWAYS_GATED, Activation, GroupScore, Routing, Scoring
from pdserve_kernels.triton.block_packing import PACKED_FORMS
from pdserve_kernels.triton.expert_ops import ACTIVATIONS, TritonExperts, route, sort_rows
from tests.kernels.random_blocks import HALVES, dequantised, random_blocks
from tests.kernels.triton.device import DEVICE, PRODUCT_DTYPES, SEEDS, assert_near, examples

FORM = ExpertsForm(6, 70, 50, torch.float32, Routing(3, normalised=True), Activation.SILU, gated=True)
"""No size is a whole number of tiles."""
RULES = [
    Routing(3),
    Routing(12, normalised=True, scale=0.5),
    Routing(5, Scoring.SOFTMAX_OF_CHOSEN, scale=2.0),
    Routing(3, Scoring.SIGMOID_OF_CHOSEN),
    Routing(3, Scoring.ROOT_SOFTPLUS, normalised=True, smallest_sum=1e-20, scale=1.5),
    Routing(4, Scoring.SIGMOID, normalised=True, smallest_sum=1e-20, scale=2.5, groups=4, chosen_groups=2),
    Routing(4, scale=16.0, groups=4, chosen_groups=3, group_score=GroupScore.BEST),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("corrected", [False, True])
def test_routing(rule: Routing, corrected: bool) -> None:
    random = torch.Generator().manual_seed(3)
    values = torch.linspace(-4, 5.3, 12)
    logits = torch.stack([values[torch.randperm(12, generator=random)] for _ in range(6)])
    correction = torch.rand(12, generator=random) * 3 - 1.5 if corrected else None
    factors = torch.rand(12, generator=random) if corrected else None
    extra = [None if each is None else each.to(DEVICE) for each in (correction, factors)]
    weights, chosen = route(logits.to(DEVICE), rule, *extra)
    wanted, expected = reference.route(logits, rule, correction, factors)

    def dense(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.full((6, 12), -1.0).scatter_(1, experts.cpu().long(), weights.cpu())

    torch.testing.assert_close(dense(weights, chosen), dense(wanted, expected), rtol=1e-5, atol=1e-6)


def test_a_logit_that_is_not_a_number_shows_in_its_row() -> None:
    logits = torch.linspace(-1, 1, 24).view(2, 12)
    logits[1, 4] = float("nan")
    for rule in RULES:
        weights, chosen = route(logits.to(DEVICE), rule)
        assert weights[0].isfinite().all()
        assert weights[1].isnan().any()
        assert ((chosen >= 0) & (chosen < 12)).all()


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 9), SEEDS)
def test_rows_are_sorted_by_expert(rows: int, each: int, more: int, seed: int) -> None:
    random, count = torch.Generator().manual_seed(seed), each + more
    # The last experts have no rows, or the first ones.
    chosen = torch.stack([torch.randperm(count - 1, generator=random)[:each] for _ in range(rows)]).int() + seed % 2
    found = sort_rows(chosen.to(DEVICE), count)
    assert found.order.tolist() == chosen.flatten().argsort(stable=True).tolist()
    seen = []
    for expert, first, end in found.tiles.tolist():
        if expert >= 0:
            own = found.order[first : min(end, first + found.rows)].cpu().long()
            assert (chosen.flatten()[own] == expert).all()
            assert len(own) > 0
            seen += own.tolist()
    assert seen == found.order.tolist()


def weights_of(form: ExpertsForm, *, biased: bool) -> list[reference.Dense]:
    inner = (2 if form.gated else 1) * form.channels
    return [
        (
            (torch.randn(inner, form.hidden) * form.hidden**-0.5).to(form.dtype),
            (torch.randn(form.hidden, form.channels) * form.channels**-0.5).to(form.dtype),
            torch.randn(inner).to(form.dtype) if biased else None,
            torch.randn(form.hidden).to(form.dtype) if biased else None,
        )
        for _ in form.own
    ]


def unread(weight: torch.Tensor) -> UnreadWeight:
    moved = weight.to(DEVICE)
    return UnreadWeight("", (weight.shape[0], weight.shape[1]), weight.dtype, lambda: moved)


def on_device(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(DEVICE)


def check(form: ExpertsForm, rows: int, *, biased: bool, beside: bool, apart: bool = False) -> None:
    dense = weights_of(form, biased=biased)
    x, logits = torch.randn(rows, form.hidden).to(form.dtype), torch.randn(rows, form.count)
    other = torch.randn(rows, form.hidden).to(form.dtype) if beside else None
    weights = [
        ExpertWeights(
            tuple(map(unread, inner.chunk(2))) if apart else (unread(inner),), unread(down), *map(on_device, biases)
        )
        for inner, down, *biases in dense
    ]
    got = TritonExperts(form, weights)(x.to(DEVICE), logits.to(DEVICE), on_device(other))
    assert_near(got, reference.experts(x, logits, form, dense, other), 8)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 40), PRODUCT_DTYPES, st.booleans(), st.booleans(), st.booleans(), SEEDS)
def test_the_sum(rows: int, dtype: torch.dtype, biased: bool, beside: bool, apart: bool, seed: int) -> None:
    torch.manual_seed(seed)
    check(replace(FORM, dtype=dtype), rows, biased=biased, beside=beside, apart=apart)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_each_activation(activation: Activation, gated: bool) -> None:
    if activation in ALWAYS_GATED and not gated:
        pytest.skip("it is always gated")
    torch.manual_seed(1)
    check(replace(FORM, activation=activation, gated=gated), 5, biased=True, beside=False)


def test_inputs_are_weighed() -> None:
    torch.manual_seed(2)
    form = replace(FORM, routing=Routing(2, Scoring.SIGMOID_OF_CHOSEN), weighs_inputs=True)
    check(form, 9, biased=True, beside=True)


@pytest.mark.parametrize("some", [range(2), range(2, FORM.count)])
def test_a_rank_has_some_of_the_experts(some: range) -> None:
    torch.manual_seed(3)
    check(replace(FORM, some=some), 9, biased=True, beside=True)


@pytest.mark.parametrize("beside", [True, False])
def test_some_experts_give_what_they_are_given(beside: bool) -> None:
    torch.manual_seed(5)
    check(replace(FORM, some=range(4), identities=2), 9, biased=True, beside=beside)


@pytest.mark.parametrize("rows", [1, 90])
def test_tiles_of_other_sizes(rows: int) -> None:
    torch.manual_seed(4)
    check(replace(FORM, count=2, hidden=130, channels=66, routing=Routing(2)), rows, biased=False, beside=False)


def in_blocks(kind: BlockFormat, outputs: int, inputs: int, seed: int) -> tuple[BlockWeight, torch.Tensor]:
    """Returns a weight in blocks whose numbers are about as large as others', and these numbers."""
    made = random_blocks(kind, outputs, inputs, seed)
    blocks = made.blocks.view(outputs, -1, kind.block_bytes)
    for at in HALVES[kind]:
        blocks[..., at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if kind is BlockFormat.MXFP4:
        blocks[..., 0] = 124
    numbers = dequantised(made)
    return replace(made, blocks=made.blocks.to(DEVICE)), numbers


MIXED = [(BlockFormat.Q4_1,) * 3, (BlockFormat.MXFP4,) * 3, (BlockFormat.Q8_0, BlockFormat.Q8_0, BlockFormat.Q5_0)]


@pytest.mark.parametrize("last", [None, BlockFormat.Q4_0, "numbers"], ids=["alike", "other blocks", "numbers"])
@pytest.mark.parametrize("kinds", MIXED, ids=["offsets", "exponents", "other for down"])
def test_weights_that_stay_packed(kinds: tuple[BlockFormat, ...], last: BlockFormat | str | None) -> None:
    """If the last expert's weights come in another form, those of all become numbers."""
    torch.manual_seed(5)
    form = replace(FORM, count=4, hidden=96, channels=64, routing=Routing(2), weighs_inputs=kinds[0].name == "Q4_1")
    weights, dense = [], []
    for number in range(form.count):
        shapes = ((form.channels, form.hidden),) * 2 + ((form.hidden, form.channels),)
        found, wide = [], []
        for place, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
            own = last if last is not None and number == form.count - 1 else kind
            blocks, numbers = in_blocks(own if isinstance(own, BlockFormat) else kind, *shape, 3 * number + place)
            found.append(unread(numbers) if own == "numbers" else blocks)
            wide.append(numbers)
        biases = torch.randn(2 * form.channels), torch.randn(form.hidden)
        weights.append(ExpertWeights((found[0], found[1]), found[2], *map(on_device, biases)))
        dense.append((torch.cat(wide[:2]), wide[2], *biases))
    experts = TritonExperts(form, weights)
    sizes = [outer * inner for outer, inner in shapes]
    packed_bytes = sum(PACKED_FORMS[kind].nbytes(*shape) for kind, shape in zip(kinds, shapes, strict=True))
    assert experts.nbytes == form.count * (packed_bytes if last is None else 4 * sum(sizes))
    for rows in (3, 40) if last is None else (3,):
        x, logits = torch.randn(rows, form.hidden), torch.randn(rows, form.count)
        wanted = reference.experts(x, logits, form, dense, None)
        assert_near(experts(x.to(DEVICE), logits.to(DEVICE)) / 10, wanted / 10, 20)
