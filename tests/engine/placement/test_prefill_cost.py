"""Tests what holds of the estimates for all figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pdserve.engine.placement.prefill_cost import (
    LocalMeasures,
    PromptSize,
    RemoteMeasures,
    local_cost,
    remote_cost,
    remote_time,
)

CHUNK = 256
TOKENS = st.integers(0, 100_000)
RATES = st.floats(10, 1e6)
SECONDS = st.floats(0, 10)
WEIGHTS = st.floats(0, 100)
PROMPTS = st.builds(PromptSize, st.integers(1, 100_000), TOKENS, TOKENS, st.integers(0, 500))
HERES = st.builds(LocalMeasures, RATES, st.floats(0, 1), st.just(CHUNK))
THERES = st.builds(
    RemoteMeasures,
    RATES,
    st.floats(0, 1e6),
    SECONDS,
    SECONDS,
    st.floats(0, 1),
    st.floats(1, 1e6),
    st.floats(1e6, 1e11),
    streams=st.integers(0, 100),
)


def prefers_remote(prompt: PromptSize, local: LocalMeasures, remote: RemoteMeasures, weight: float) -> bool:
    return remote_cost(prompt, remote, CHUNK, weight) < local_cost(prompt, local, weight)


@given(PROMPTS, HERES, THERES, WEIGHTS, st.floats(0, 1e6), SECONDS, SECONDS, st.integers(0, 100))
def test_a_busier_prefill_node_never_attracts_a_prompt(
    prompt: PromptSize,
    local: LocalMeasures,
    remote: RemoteMeasures,
    weight: float,
    tokens: float,
    late_s: float,
    overhead_s: float,
    streams: int,
) -> None:
    busier = replace(
        remote,
        streams=remote.streams + streams,
        queued_tokens=remote.queued_tokens + tokens,
        late_s=remote.late_s + late_s,
        overhead_s=remote.overhead_s + overhead_s,
    )
    assert not prefers_remote(prompt, local, busier, weight) or prefers_remote(prompt, local, remote, weight)


@given(PROMPTS, HERES, THERES, WEIGHTS, TOKENS, st.integers(0, 100))
def test_a_busier_decode_node_never_keeps_a_prompt(
    prompt: PromptSize, local: LocalMeasures, remote: RemoteMeasures, weight: float, tokens: int, streams: int
) -> None:
    assume(prefers_remote(prompt, local, remote, weight))
    busier = replace(prompt, queued_tokens=prompt.queued_tokens + tokens, streams=prompt.streams + streams)
    assert prefers_remote(busier, local, remote, weight)


@given(PROMPTS, HERES, THERES, st.floats(1, 10), st.integers(1, 10_000))
def test_a_longer_prompt_stays_remote_where_remote_is_not_slower_by_the_token(
    prompt: PromptSize, local: LocalMeasures, remote: RemoteMeasures, weight: float, more: int
) -> None:
    """Where this node has a stream, a prefill node of the same speed is enough."""
    per_token = (1 + weight * remote.streams) / remote.tokens_per_s + remote.bytes_per_token / remote.bytes_per_s
    assume(per_token <= (1 + weight * prompt.streams) / local.tokens_per_s)
    assume(prefers_remote(prompt, local, remote, weight))
    longer = replace(prompt, missing_tokens=prompt.missing_tokens + more)
    assert remote_cost(longer, remote, CHUNK, weight) <= local_cost(longer, local, weight) * (1 + 1e-9)


@given(PROMPTS, HERES, THERES, st.floats(1, 100))
def test_costs_are_never_less_than_the_work(
    prompt: PromptSize, local: LocalMeasures, remote: RemoteMeasures, weight: float
) -> None:
    assert local_cost(prompt, local, weight) >= prompt.missing_tokens / local.tokens_per_s
    assert remote_cost(prompt, remote, CHUNK, weight) >= prompt.missing_tokens / remote.tokens_per_s


def test_the_figures_of_one_prompt() -> None:
    prompt = PromptSize(missing_tokens=512, cached_tokens=128, queued_tokens=256, streams=3)
    local = LocalMeasures(tokens_per_s=1000, decode_step_s=0.02, max_step_tokens=256)
    # The prompt waits, computes beside three decode steps, and lets three streams wait for half a second.
    assert local_cost(prompt, local, 2.0) == pytest.approx(0.768 + 3 * 0.02 + 2 * 3 * 0.512)
    remote = RemoteMeasures(2000, 1000, 0.1, 0.01, 0.75, 20_000, 1e9)
    # The sum is queue, lateness and overhead, the missing and a quarter of the cached tokens, the last chunk's blocks.
    assert remote_time(prompt, remote, 256) == pytest.approx(0.5 + 0.11 + 544 / 2000 + 256 * 20_000 / 1e9)
    slow_link = replace(remote, bytes_per_s=1e7)
    assert remote_time(prompt, slow_link, 256) == pytest.approx(0.61 + 512 * 20_000 / 1e7)
    # A mixed node's two streams lose the time that the prompt takes there.
    mixed = replace(remote, streams=2)
    assert remote_cost(prompt, mixed, 256, 2.0) == pytest.approx(remote_time(prompt, remote, 256) + 2 * 2 * 544 / 2000)


@given(PROMPTS, THERES, st.floats(0, 1))
def test_what_the_prefill_node_holds_makes_no_prompt_dearer_and_still_has_to_move(
    prompt: PromptSize, remote: RemoteMeasures, share: float
) -> None:
    cost = remote_cost(prompt, replace(remote, held_share=share), CHUNK, 2.0)
    assert cost <= remote_cost(prompt, remote, CHUNK, 2.0)
    assert cost >= prompt.missing_tokens * remote.bytes_per_token / remote.bytes_per_s
