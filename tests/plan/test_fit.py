"""Tests that the parts of steps are found in measured times, with and without noise."""

from __future__ import annotations

import random

import msgspec
import pytest

from pdserve.errors import PlanError
from pdserve.plan.profile import (
    Observed,
    decode_step,
    fit,
    fixed_part,
    lone_prompt,
    lone_prompt_s,
    mixed_step,
    spread_of,
)
from tests.plan.profiles import PARTS

TRUE = msgspec.structs.replace(PARTS, context_token=2e-6)
FRONT_S = 0.004


def observed(noise: float = 0.0) -> list[Observed]:
    """Returns what a battery sees of a machine of which everything is known."""
    source = random.Random(1)

    def seen(seconds: float) -> float:
        return seconds * (1 + source.uniform(-noise, noise))

    found = [
        lone_prompt(prompt, 256, seen(FRONT_S + lone_prompt_s(TRUE, prompt, 256)))
        for prompt in (16, 64, 160, 256, 512, 1024)
    ]
    found += [
        decode_step(rows, context, seen(TRUE.step_s(rows, context, 0)))
        for rows, context in ((1, 40), (2, 80), (4, 200), (8, 500), (16, 1200), (4, 2600))
    ]
    found += [
        mixed_step(rows, 50 * rows, prompt, seen(TRUE.step_s(rows, 50 * rows, prompt)))
        for rows, prompt in ((2, 32), (2, 200), (8, 64), (8, 200))
    ]
    return found


def test_without_noise_all_parts_are_found() -> None:
    parts, front_s = fit(observed())
    assert front_s == pytest.approx(FRONT_S, rel=0.02)
    for name in TRUE.__struct_fields__:
        assert getattr(parts, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name


def test_with_noise_the_times_of_steps_are_found() -> None:
    parts, _ = fit(observed(noise=0.05), FRONT_S)
    for rows, context, prompt in ((1, 100, 0), (12, 2000, 0), (0, 0, 256), (6, 600, 128)):
        assert parts.step_s(rows, context, prompt) == pytest.approx(TRUE.step_s(rows, context, prompt), rel=0.1)


def test_no_part_is_negative_however_times_contradict_each_other() -> None:
    times = [msgspec.structs.replace(TRUE, request=0.0).step_s(rows, 0, 0) / rows for rows in (1, 2, 4)]
    contradicting = [
        *observed(),
        *(decode_step(rows, 9, seconds) for rows, seconds in zip((1, 2, 4), times, strict=True)),
    ]
    parts, front_s = fit(contradicting)
    assert min(front_s, *msgspec.structs.astuple(parts)) >= 0


@pytest.mark.parametrize("pace", [0.6, 1.0, 1.7])
def test_what_times_have_besides_their_steps_is_found_at_the_pace_of_the_steps(pace: float) -> None:
    explained = [0.05, 0.1, 0.3, 0.9]
    assert fixed_part(explained, [pace * (steps_s + 0.02) for steps_s in explained]) == pytest.approx(0.02)
    assert fixed_part(explained, [pace * steps_s - 0.01 for steps_s in explained]) == 0.0
    assert fixed_part(explained, [0.5, 0.5, 0.5, 0.5]) == pytest.approx(0.5)


def test_what_was_not_measured_is_named() -> None:
    with pytest.raises(PlanError, match="chunk_beside"):
        fit([row for row in observed() if not row.parts[4]])
    with pytest.raises(PlanError, match="too noisy"):
        fit(observed(), front_s=1.0)


def test_a_spread_has_a_mean_of_one_and_is_in_order() -> None:
    spread = spread_of([[0.9, 1.0, 1.1, 1.0, 1.0, 3.0]])
    assert sum(spread) / len(spread) == pytest.approx(1.0)
    assert list(spread) == sorted(spread)
    assert spread_of([]) == (1.0,)
    # Of tokens that come at once because the client reads late, none takes no time.
    assert min(spread_of([[0.0, 0.0, 3.0]])) > 0


def test_each_batch_counts_as_much_in_a_spread_however_many_streams_it_has() -> None:
    spread = spread_of([[0.5, 1.5] * 10, [1.0] * 10_000])
    assert spread[0] == pytest.approx(0.5, abs=0.1) and spread[-1] == pytest.approx(1.5, abs=0.1)
    assert sum(times == pytest.approx(1.0) for times in spread) == len(spread) // 2
