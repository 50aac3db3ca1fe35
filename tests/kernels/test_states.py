"""Operations with states: each set computes what ``reference`` says, however tokens are cut into runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from pdserve.settings import cache_folder
from pdserve_kernels import reference
from pdserve_kernels.contract import StateRuns
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels

HEADS, GROUP, KEYS, VALUES, WIDTH, LAYERS = 3, 2, 8, 84, 4, 2
"""A matrix has more columns than are updated together, and a part of them is left."""
CONV = 5
SIZE = 13
LONG = 19
"""More tokens than are prepared together."""
BLOCKS = 6
BY_CHANNEL = "_by_channel"
"""With a decay for each channel of a key."""

Operation = Callable[[slice, torch.Tensor, StateRuns], torch.Tensor]


@pytest.fixture(scope="module")
def compiled() -> CompiledKernels:
    return CompiledKernels(cache_folder(os.environ))


def runs_of(lengths: Sequence[int], sources: Sequence[int], destinations: Sequence[int]) -> StateRuns:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    begin, leave = (torch.tensor(each, dtype=torch.int32) for each in (sources, destinations))
    return StateRuns(starts, begin, leave, single=set(lengths) == {1})


def states(numbers: int, *shape: int) -> torch.Tensor:
    """Returns the states of one of two layers, which are no dense tensor."""
    whole = torch.randn(BLOCKS, HEADS, LAYERS, numbers, generator=torch.Generator().manual_seed(7))
    return whole[:, :, 1].view(BLOCKS, HEADS, *shape)


def operation(name: str, kernels: object, dtype: torch.dtype, tokens: int) -> tuple[Operation, torch.Tensor]:
    """Returns an operation on some of ``tokens`` tokens, and its states."""
    random = torch.Generator().manual_seed(3)
    draw = partial(torch.randn, generator=random)
    compute: Callable[..., torch.Tensor] = getattr(kernels, name.removesuffix(BY_CHANNEL))
    if name == "causal_conv":
        x = draw(tokens, HEADS, CONV).to(dtype)
        weight, bias = draw(WIDTH, HEADS, CONV).to(dtype), draw(HEADS, CONV).to(dtype)

        def conv(part: slice, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
            return compute(x[part], weight, bias, state, runs, silu=True)

        return conv, states((WIDTH - 1) * CONV, WIDTH - 1, CONV)
    if name == "mamba2_scan":
        xbc, steps = draw(tokens, HEADS, GROUP * VALUES + 2 * KEYS).to(dtype), draw(tokens, HEADS, GROUP).abs()
        rate, skip = -draw(HEADS, GROUP).abs(), draw(HEADS, GROUP)

        def scan(part: slice, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
            return compute(xbc[part], steps[part], rate, skip, state, runs)

        return scan, states(GROUP * KEYS * VALUES, GROUP, VALUES, KEYS)
    if name == "mamba_scan":
        x, steps = draw(tokens, HEADS, VALUES).to(dtype), draw(tokens, HEADS, VALUES).abs()
        write, read = draw(tokens, SIZE), draw(tokens, SIZE)
        rate, skip = -draw(HEADS, VALUES, SIZE).abs(), draw(HEADS, VALUES)

        def scan_channels(part: slice, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
            return compute(x[part], steps[part], write[part], read[part], rate, skip, state, runs)

        return scan_channels, states(VALUES * SIZE, VALUES, SIZE)
    qkv = draw(tokens, HEADS, 2 * KEYS + GROUP * VALUES).to(dtype)
    decays = (KEYS,) if name.endswith(BY_CHANNEL) else ()
    decay, beta = -draw(tokens, HEADS, GROUP, *decays).abs(), draw(tokens, HEADS, GROUP).sigmoid()

    def delta(part: slice, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        return compute(qkv[part], decay[part], beta[part], state, runs)

    return delta, states(GROUP * KEYS * VALUES, GROUP, KEYS, VALUES)


OPERATIONS = ("causal_conv", "gated_delta_rule", f"gated_delta_rule{BY_CHANNEL}", "mamba2_scan", "mamba_scan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_compiled_set_computes_what_the_reference_says(
    name: str, dtype: torch.dtype, compiled: CompiledKernels
) -> None:
    """Runs begin with nothing, another state or the one that they leave, and one of them is padding."""
    runs = runs_of([5, 1, 2, 1], [-1, 2, 3, -1], [0, 1, 3, -1])
    wanted, expected_states = operation(name, reference, dtype, 9)
    found, found_states = operation(name, compiled, dtype, 9)
    expected, computed = wanted(slice(9), expected_states, runs), found(slice(9), found_states, runs)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(computed, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found_states, expected_states, rtol=1e-5, atol=1e-5)
    assert not computed[8].any()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_run_of_many_tokens_gives_the_bits_of_single_ones(name: str, compiled: CompiledKernels) -> None:
    compute, at_once = operation(name, compiled, torch.float32, LONG)
    _, one_by_one = operation(name, compiled, torch.float32, LONG)
    together = compute(slice(LONG), at_once, runs_of([LONG], [4], [0]))
    source, alone = 4, []
    for token in range(LONG):
        destination = (0, 1)[token % 2]
        alone.append(compute(slice(token, token + 1), one_by_one, runs_of([1], [source], [destination])))
        source = destination
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(at_once[0], one_by_one[source])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["reference", "compiled"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_states_after_tokens_within_a_run_stay_where_they_are_wanted(
    name: str, kernels: str, dtype: torch.dtype, compiled: CompiledKernels
) -> None:
    """They are those that runs of one token each leave, and the outputs those without them."""
    used = reference if kernels == "reference" else compiled
    compute, keeping = operation(name, used, dtype, LONG)
    _, one_by_one = operation(name, used, dtype, LONG)
    places = {0: 1, 3: 2, 15: 3, 16: 5}
    kept = torch.tensor([places.get(token, -1) for token in range(LONG)], dtype=torch.int32)
    together = compute(slice(LONG), keeping, replace(runs_of([LONG], [4], [0]), kept=kept))
    # An operation of torch may round a number otherwise at another place in a tensor.
    tolerance = 0.0 if used is compiled else 1e-6
    source = 4
    for token in range(LONG):
        alone = compute(slice(token, token + 1), one_by_one, runs_of([1], [source], [0]))
        torch.testing.assert_close(together[token : token + 1], alone, rtol=tolerance, atol=tolerance)
        if token in places:
            torch.testing.assert_close(keeping[places[token]], one_by_one[0], rtol=tolerance, atol=tolerance)
        source = 0
    torch.testing.assert_close(keeping[0], one_by_one[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(keeping[4], one_by_one[4])


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_a_run_gives_does_not_depend_on_the_others(name: str, compiled: CompiledKernels) -> None:
    compute, together = operation(name, compiled, torch.bfloat16, 9)
    _, apart = operation(name, compiled, torch.bfloat16, 9)
    all_runs = compute(slice(9), together, runs_of([3, 4, 2], [-1, 4, 5], [0, 1, 2]))
    parts = [(slice(3), -1, 0), (slice(3, 7), 4, 1), (slice(7, 9), 5, 2)]
    each = [compute(part, apart, runs_of([part.stop - (part.start or 0)], [a], [b])) for part, a, b in parts]
    assert torch.equal(all_runs, torch.cat(each))
    assert torch.equal(together, apart)
