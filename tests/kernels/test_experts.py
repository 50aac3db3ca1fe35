"""Experts: each CPU set computes what ``reference`` says, and a row's result has the same bits in any step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_kernels import reference
from pdserve_kernels.contract import (
    BLOCK_FORMATS,
    BlockFormat,
    BlockWeight,
    Experts,
    ExpertsForm,
    ExpertWeights,
    Kernels,
    UnreadWeight,
)
from pdserve_kernels.cpu.compiled_experts import CompiledExperts, CompiledRouter
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.feed_forward import ALWAYS_GATED, Activation, GroupScore, Routing, Scoring
from tests.examples import examples
from tests.kernels.random_blocks import dequantised, random_blocks

SEEDS = st.integers(0, 2**32 - 1)
RULE = Routing(3, normalised=True)
FORM = ExpertsForm(8, 70, 50, torch.float32, RULE, Activation.SILU, gated=True)
"""No size is a whole number of vectors."""


def unread(weight: torch.Tensor) -> UnreadWeight:
    outer, inner = weight.shape
    return UnreadWeight("", (outer, inner), weight.dtype, lambda: weight)


def random_experts(form: ExpertsForm, *, biased: bool) -> list[reference.Dense]:
    inner = (2 if form.gated else 1) * form.channels

    def draw(*shape: int) -> torch.Tensor:
        scale: float = shape[-1] ** -0.5
        return (torch.randn(*shape) * scale).to(form.dtype)

    def drawn_bias(size: int) -> torch.Tensor | None:
        return torch.randn(size).to(form.dtype) if biased else None

    return [
        (draw(inner, form.hidden), draw(form.hidden, form.channels), drawn_bias(inner), drawn_bias(form.hidden))
        for _ in range(form.count)
    ]


def weights_of(dense: Sequence[reference.Dense], *, apart: bool = False) -> list[ExpertWeights]:
    return [
        ExpertWeights(tuple(map(unread, inner.chunk(2))) if apart else (unread(inner),), unread(down), *biases)
        for inner, down, *biases in dense
    ]


def made(kernels: Kernels, form: ExpertsForm, weights: Sequence[ExpertWeights]) -> Experts:
    found: Experts = kernels.experts(form, iter(weights))
    if isinstance(kernels, CompiledKernels) and kernels.packs_linear:
        assert isinstance(found, CompiledExperts)
    return found


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype is wanted.dtype
    tolerance = 3e-2 if wanted.dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@settings(max_examples=examples(50))
@given(
    st.integers(0, 30), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([(70, 50), (64, 96), (33, 1)]), SEEDS,
)  # fmt: skip
def test_the_sum(
    kernels: Kernels, rows: int, dtype: torch.dtype, biased: bool, apart: bool, beside: bool, sizes: tuple[int, int],
    seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    form = replace(FORM, dtype=dtype, hidden=sizes[0], channels=sizes[1])
    dense = random_experts(form, biased=biased)
    x, logits = torch.randn(rows, form.hidden).to(dtype), torch.randn(rows, form.count)
    other = torch.randn(rows, form.hidden).to(dtype) if beside else None
    got = made(kernels, form, weights_of(dense, apart=apart))(x, logits, other)
    close(got, reference.experts(x, logits, form, dense, other))


ACTIVATIONS = [(each, True) for each in Activation if each is not Activation.XIELU]
ACTIVATIONS += [(each, False) for each, _ in ACTIVATIONS if each not in ALWAYS_GATED]


@pytest.mark.parametrize(("activation", "gated"), ACTIVATIONS)
def test_each_activation(kernels: Kernels, activation: Activation, gated: bool) -> None:
    torch.manual_seed(1)
    form = replace(FORM, activation=activation, gated=gated)
    dense = random_experts(form, biased=True)
    # Some gates and ups are beyond where they are clamped.
    x, logits = torch.randn(9, form.hidden) * 10, torch.randn(9, form.count)
    got = made(kernels, form, weights_of(dense))(x, logits)
    wanted = reference.experts(x, logits, form, dense)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_inputs_are_weighed(kernels: Kernels) -> None:
    torch.manual_seed(2)
    form = replace(FORM, routing=Routing(2, Scoring.SIGMOID_OF_CHOSEN), weighs_inputs=True)
    dense = random_experts(form, biased=True)
    x, logits = torch.randn(9, form.hidden), torch.randn(9, form.count)
    close(made(kernels, form, weights_of(dense))(x, logits), reference.experts(x, logits, form, dense))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_have_some_of_the_experts_add_up(kernels: Kernels, dtype: torch.dtype) -> None:
    """One of them has no expert that a row is sent to."""
    torch.manual_seed(4)
    form = replace(FORM, dtype=dtype)
    dense = random_experts(form, biased=True)
    x, logits = torch.randn(40, form.hidden).to(dtype), torch.randn(40, form.count)
    logits[:, 6:] = -100.0
    parts: list[torch.Tensor] = []
    for some in (range(3), range(3, 6), range(6, 8)):
        own = replace(form, some=some)
        parts.append(made(kernels, own, weights_of(dense[some.start : some.stop]))(x, logits))
        close(parts[-1], reference.experts(x, logits, own, dense[some.start : some.stop]))
    assert not parts[2].any()
    close(sum(parts[1:], parts[0]), reference.experts(x, logits, form, dense))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_experts_give_what_they_are_given(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    form = replace(FORM, dtype=dtype, some=range(6), identities=2)
    dense = random_experts(form, biased=True)[:6]
    x, logits, other = torch.randn(9, form.hidden).to(dtype), torch.randn(9, form.count), torch.randn(9, form.hidden)
    weights, chosen = reference.route(logits, form.routing)
    assert (chosen >= 6).any()
    assert (chosen < 6).any()
    given = sum(((chosen == number) * weights).sum(1, keepdim=True) * x.float() for number in (6, 7))
    wanted = reference.experts(x, logits, replace(form, identities=0), dense, other.to(dtype)).float() + given
    close(made(kernels, form, weights_of(dense))(x, logits, other.to(dtype)), wanted.to(dtype))


RULES = [
    Routing(3),
    Routing(12, normalised=True, scale=0.5),
    Routing(1, Scoring.SOFTMAX_OF_CHOSEN),
    Routing(5, Scoring.SOFTMAX_OF_CHOSEN, scale=2.0),
    Routing(3, Scoring.SIGMOID, normalised=True, smallest_sum=1e-6),
    Routing(3, Scoring.SIGMOID_OF_CHOSEN),
    Routing(3, Scoring.ROOT_SOFTPLUS, normalised=True, smallest_sum=1e-20, scale=1.5),
    Routing(4, Scoring.SIGMOID, normalised=True, smallest_sum=1e-20, scale=2.5, groups=4, chosen_groups=2),
    Routing(4, scale=16.0, groups=4, chosen_groups=3, group_score=GroupScore.BEST),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("corrected", [False, True])
def test_routing(each_compiled: CompiledKernels, rule: Routing, dtype: torch.dtype, corrected: bool) -> None:
    random = torch.Generator().manual_seed(3)
    # No two of a row's are equal in bf16, and no two sums of two scores.
    values = torch.linspace(-4, 5.3, 12)
    logits = torch.stack([values[torch.randperm(12, generator=random)] for _ in range(900)]).to(dtype)
    correction = torch.rand(12, generator=random) * 3 - 1.5 if corrected else None
    factors = torch.rand(12, generator=random) if corrected else None
    weights, chosen = CompiledRouter(each_compiled._library, rule, 12, correction, factors)(logits)
    wanted, expected = reference.route(logits, rule, correction, factors)

    def dense(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.full((900, 12), -1.0).scatter_(1, experts.long(), weights)

    torch.testing.assert_close(dense(weights, chosen), dense(wanted, expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [Routing(5, groups=4, chosen_groups=2), Routing(0), Routing(9), Routing(1, groups=3)])
def test_a_rule_that_cannot_choose_is_refused(kernels: Kernels, rule: Routing) -> None:
    form = replace(FORM, routing=rule)
    with pytest.raises(ValueError, match="experts"):
        kernels.experts(form, weights_of(random_experts(form, biased=False)))


def blocks_of(form: ExpertsForm, kinds: Sequence[BlockFormat], seed: int) -> list[ExpertWeights]:
    """Returns experts in blocks: of gates, of ups and of the others, or of both inner weights in one."""
    shapes = [(form.channels, form.hidden)] * 2 if len(kinds) == 3 else [(2 * form.channels, form.hidden)]
    shapes.append((form.hidden, form.channels))
    found = []
    for number in range(form.count):
        made = [
            BlockWeight(kind, random_blocks(kind, outer, inner, seed + 10 * number + place).blocks)
            for place, (kind, (outer, inner)) in enumerate(zip(kinds, shapes, strict=True))
        ]
        found.append(ExpertWeights(tuple(made[:-1]), made[-1]))
    return found


def tame(weights: Sequence[ExpertWeights]) -> list[reference.Dense]:
    """Returns the numbers of weights in blocks."""
    return [
        (torch.cat([dequantised(part) for part in each.inner if isinstance(part, BlockWeight)]),
         dequantised(each.down) if isinstance(each.down, BlockWeight) else each.down.read(), None, None)
        for each in weights
    ]  # fmt: skip


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns that of most rows.

    Inputs of both products are rounded to bytes, those of the second one to bf16 before that, and random scales are far
    from each other.
    """
    return float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).median())


BLOCKS = replace(FORM, hidden=256, channels=256, dtype=torch.bfloat16, activation=Activation.RELU)
MIXED = (BlockFormat.Q4_K, BlockFormat.Q8_0, BlockFormat.Q6_K)


@pytest.mark.parametrize("kinds", [(kind, kind) for kind in sorted(BLOCK_FORMATS)] + [MIXED], ids=str)
def test_weights_in_blocks(each_compiled: CompiledKernels, kinds: tuple[BlockFormat, ...]) -> None:
    """Beside the products with the dequantised weights, of inputs that are bytes."""
    torch.manual_seed(4)
    weights = blocks_of(BLOCKS, kinds, 5)
    x, logits = torch.randn(21, BLOCKS.hidden).bfloat16(), torch.randn(21, BLOCKS.count)
    got = made(each_compiled, BLOCKS, weights)(x, logits).float()
    wanted = reference.experts(x.float(), logits, BLOCKS, tame(weights))
    assert relative_error(got, wanted) < 0.02


def test_a_layer_may_have_both_forms(each_compiled: CompiledKernels) -> None:
    torch.manual_seed(5)
    blocks = blocks_of(BLOCKS, (BlockFormat.Q8_0, BlockFormat.Q8_0), 6)
    weights = [
        replace(each, down=unread(down.bfloat16())) for each, (_, down, *_) in zip(blocks, tame(blocks), strict=True)
    ]
    x, logits = torch.randn(9, BLOCKS.hidden).bfloat16(), torch.randn(9, BLOCKS.count)
    got = made(each_compiled, BLOCKS, weights)(x, logits).float()
    wanted = reference.experts(x.float(), logits, BLOCKS, tame(weights))
    assert relative_error(got, wanted) < 0.02


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


FORMS = [
    (FORM, None),
    (replace(FORM, dtype=torch.bfloat16, hidden=200, channels=130), None),
    (BLOCKS, (BlockFormat.Q4_K, BlockFormat.Q4_K)),
    (BLOCKS, MIXED),
]


@pytest.mark.parametrize(("form", "kinds"), FORMS, ids=["fp32", "bf16", "blocks", "three formats"])
def test_a_row_depends_neither_on_other_rows_nor_on_threads(
    each_compiled: CompiledKernels, form: ExpertsForm, kinds: tuple[BlockFormat, ...] | None
) -> None:
    torch.manual_seed(6)
    weights = weights_of(random_experts(form, biased=True)) if kinds is None else blocks_of(form, kinds, 7)
    experts = made(each_compiled, form, weights)
    x, logits = torch.randn(150, form.hidden).to(form.dtype), torch.randn(150, form.count)
    logits[:, 2] += 2  # One expert has more rows than are computed together.
    beside = torch.randn(150, form.hidden).to(form.dtype)
    with threads(1):
        alone = torch.cat([experts(x[i : i + 1], logits[i : i + 1], beside[i : i + 1]) for i in range(150)])
    for count in (1, 3):
        with threads(count):
            for rows in (2, 3, 7, 13, 50, 149, 150):
                assert torch.equal(experts(x[-rows:], logits[-rows:], beside[-rows:]), alone[-rows:])


def test_a_long_step_is_computed_in_parts(each_compiled: CompiledKernels) -> None:
    torch.manual_seed(7)
    dense = random_experts(FORM, biased=False)
    experts = made(each_compiled, FORM, weights_of(dense))
    x, logits = torch.randn(3000, FORM.hidden), torch.randn(3000, FORM.count)
    got = experts(x, logits)
    close(got, reference.experts(x, logits, FORM, dense))
    assert torch.equal(experts(x[-1:], logits[-1:]), got[-1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(kernels: Kernels, value: float) -> None:
    torch.manual_seed(8)
    experts = made(kernels, FORM, weights_of(random_experts(FORM, biased=False)))
    x, logits = torch.randn(3, FORM.hidden), torch.randn(3, FORM.count)
    x[1, 5] = value
    out = experts(x, logits)
    assert out[[0, 2]].isfinite().all()
    assert not out[1].isfinite().any()
    x[1, 5], logits[1, 3] = 0.0, float("nan")
    out = experts(x, logits)
    assert out[[0, 2]].isfinite().all()
    assert out[1].isnan().all()


def test_other_inputs_are_refused(each_compiled: CompiledKernels) -> None:
    experts = made(each_compiled, FORM, weights_of(random_experts(FORM, biased=False)))
    x, logits = torch.zeros(2, FORM.hidden), torch.zeros(2, FORM.count)
    for wrong in ((x.bfloat16(), logits), (x[:1], logits), (x, logits, x[:, :5]), (x, logits[:, :5])):
        with pytest.raises(ValueError, match="given"):
            experts(*wrong)


def test_memory_is_that_of_the_weights(each_compiled: CompiledKernels) -> None:
    form = replace(FORM, hidden=256, channels=128, dtype=torch.bfloat16)
    experts = made(each_compiled, form, weights_of(random_experts(form, biased=False)))
    assert isinstance(experts, CompiledExperts)
    assert experts.nbytes == form.count * 3 * 256 * 128 * 2
