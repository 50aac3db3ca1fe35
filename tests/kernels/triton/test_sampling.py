"""The sampling kernel against its plain meaning and against the engine's sampler."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.random_choice import draw, uniform
from pdserve.engine.sampler import GREEDY_BELOW
from pdserve.wire.sampling import SamplingParams
from pdserve_kernels import reference
from pdserve_kernels.triton.sampling import sample
from tests.kernels.triton.device import DEVICE, SEEDS


def both(
    logits: torch.Tensor, temperatures: list[float], min_ps: list[float], uniforms: list[float]
) -> tuple[list[int], list[int]]:
    choice = (torch.tensor(temperatures), torch.tensor(min_ps), torch.tensor(uniforms, dtype=torch.float64))
    moved = [part.to(DEVICE) for part in choice]
    got = sample(logits.to(DEVICE), moved[0], moved[1], moved[2], GREEDY_BELOW)
    return got.tolist(), reference.sample(logits, *choice, GREEDY_BELOW).tolist()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 5.0]), st.sampled_from([0.0, 0.1, 1.0]), st.floats(0, 1, exclude_max=True)
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([2, 17, 512, 5000]),
    SEEDS,
)
def test_sample(rows: list[tuple[float, float, float]], vocab: int, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(rows), vocab) * 4
    got, wanted = both(logits, *(list(column) for column in zip(*rows, strict=True)))
    for row, (mine, right) in enumerate(zip(got, wanted, strict=True)):
        if mine != right:
            # Exponentials differ in their last bit, so a number that falls on a border may fall to its other side.
            assert rows[row][0] >= GREEDY_BELOW
            assert _border_distance(logits[row], *rows[row]) < 1e-6


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([0.3, 1.0, 3.0]), st.sampled_from([0.0, 0.1]), SEEDS)
def test_the_engine_draws_the_same_token(temperature: float, min_p: float, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(3, 700) * 4
    uniforms = [uniform(seed, position) for position in range(3)]
    got, _ = both(logits, [temperature] * 3, [min_p] * 3, uniforms)
    params = SamplingParams(max_tokens=1, seed=seed, temperature=temperature, min_p=min_p)
    wanted = draw(logits.clone(), [params] * 3, uniforms)
    for row, (mine, right) in enumerate(zip(got, wanted, strict=True)):
        assert mine == right or _border_distance(logits[row], temperature, min_p, uniforms[row]) < 1e-6


def _border_distance(logits: torch.Tensor, temperature: float, min_p: float, uniform: float) -> float:
    weights = ((logits.double() - logits.max()) / temperature).exp()
    cumulative = weights.where(weights >= min_p, 0).cumsum(-1)
    return float((cumulative / cumulative[-1] - uniform).abs().min())


def test_rows_without_an_answer_and_edges_of_the_distribution() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[0.0, nan, 1.0], [0.0, inf, 1.0], [-inf, -inf, -inf], [-inf, 2.0, -inf], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    )
    last = 1 - 2.0**-53
    got, wanted = both(logits, [1.0, 1.0, 0.0, 1.0, 1.0, 0.0], [0.0] * 6, [0.5, 0.5, 0.5, last, last, 0.0])
    assert got == wanted == [-1, -1, -1, 1, 2, 1]
