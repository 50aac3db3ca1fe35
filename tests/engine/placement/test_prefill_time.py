"""Tests what holds of the estimates for all figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.placement.placement_rule import LocalMeasures, PromptSize, RemoteMeasures, local_time, remote_time
from tests.engine.placement.figures import HERES, PROMPTS, THERES, TOKENS

CHUNK = 256


@given(PROMPTS, HERES, THERES)
def test_times_are_never_less_than_the_work(prompt: PromptSize, here: LocalMeasures, there: RemoteMeasures) -> None:
    assert local_time(prompt, here) >= prompt.missing_tokens / here.tokens_per_s
    nothing_held = replace(there, held_share=0.0)
    assert remote_time(prompt, nothing_held, CHUNK) >= prompt.missing_tokens / there.tokens_per_s


@given(PROMPTS, HERES, THERES, TOKENS)
def test_a_longer_prompt_takes_no_less(
    prompt: PromptSize, here: LocalMeasures, there: RemoteMeasures, more: int
) -> None:
    longer = replace(prompt, missing_tokens=prompt.missing_tokens + more)
    assert local_time(longer, here) >= local_time(prompt, here)
    assert remote_time(longer, there, CHUNK) >= remote_time(prompt, there, CHUNK)


def test_the_figures_of_one_prompt() -> None:
    prompt = PromptSize(missing_tokens=512, cached_tokens=128, queued_tokens=256, streams=3, leaving_tokens=500)
    here = LocalMeasures(tokens_per_s=1000, decode_step_s=0.02, chunk_tokens=64)
    # The prompt waits, and computes beside twelve decode steps.
    assert local_time(prompt, here) == pytest.approx(0.768 + 12 * 0.02)
    assert local_time(replace(prompt, streams=0), here) == pytest.approx(0.768)
    slow_alone = replace(here, chunk_s=0.05, token_s=0.0009)
    assert slow_alone.alone_s(11) == pytest.approx(0.05 + 10 * 0.0009)
    assert slow_alone.alone_s(1000) == pytest.approx(1), "long prompts have the measured rate"
    there = RemoteMeasures(2000, 1000, 0.1, 0.01, 0.75, 20_000, 1e9)
    # The sum is queue, lateness and overhead, the missing and a quarter of the cached tokens, the last chunk's blocks.
    assert there.queue_s(prompt) == pytest.approx(0.75 + 0.1)
    assert remote_time(prompt, there, 256) == pytest.approx(0.85 + 0.01 + 544 / 2000 + 256 * 20_000 / 1e9)
    slow_link = replace(there, bytes_per_s=1e7)
    assert remote_time(prompt, slow_link, 256) == pytest.approx(0.86 + 512 * 20_000 / 1e7)


@given(PROMPTS, THERES, st.floats(0, 1))
def test_what_the_prefill_node_holds_makes_no_prompt_later_and_still_has_to_move(
    prompt: PromptSize, there: RemoteMeasures, share: float
) -> None:
    time_s = remote_time(prompt, replace(there, held_share=share), CHUNK)
    assert time_s <= remote_time(prompt, replace(there, held_share=0.0), CHUNK)
    assert time_s >= prompt.missing_tokens * there.bytes_per_token / there.bytes_per_s
