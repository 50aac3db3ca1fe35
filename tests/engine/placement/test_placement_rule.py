"""Tests what holds of the rule for all figures: a change moves prompts in one direction only."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.placement.latency_targets import TtftAim
from pdserve.engine.placement.placement_rule import (
    VERY_LATE,
    LocalMeasures,
    PlacementDecision,
    PromptSize,
    RemoteMeasures,
    estimate,
    place,
)
from pdserve.wire.engine import PrefillReason, PrefillSource
from tests.engine.placement.figures import HERES, PROMPTS, SECONDS, THERES, TOKENS

CHUNK = 256
TARGETS = st.floats(0.001, 100)
HERE = st.floats(0.001, 100) | st.just(math.inf)
AIMS = st.builds(TtftAim, TARGETS, HERE)
LEAST_QUEUED_S = 0.5
NEARNESS: dict[PrefillSource | None, int] = {PrefillSource.REMOTE: 0, None: 1, PrefillSource.LOCAL: 2}


def most_queued_s(ttft: TtftAim) -> float:
    return max(ttft.there_s, LEAST_QUEUED_S)


def decide(prompt: PromptSize, here: LocalMeasures, there: RemoteMeasures, ttft: TtftAim) -> PlacementDecision:
    return place(prompt, estimate(prompt, here, there, CHUNK), ttft, most_queued_s(ttft), there.streams)


def nearness(prompt: PromptSize, here: LocalMeasures, there: RemoteMeasures, ttft: TtftAim) -> int:
    """Returns 0 for a prompt that goes to the prefill node, 1 for one that waits, 2 for one that stays."""
    return NEARNESS[decide(prompt, here, there, ttft).source]


@given(PROMPTS, HERES, THERES, AIMS, st.floats(0, 1e6), SECONDS, SECONDS, st.integers(0, 100))
def test_a_busier_prefill_node_never_attracts_a_prompt(
    prompt: PromptSize,
    here: LocalMeasures,
    there: RemoteMeasures,
    ttft: TtftAim,
    tokens: float,
    late_s: float,
    overhead_s: float,
    streams: int,
) -> None:
    busier = replace(
        there,
        streams=there.streams + streams,
        queued_tokens=there.queued_tokens + tokens,
        late_s=there.late_s + late_s,
        overhead_s=there.overhead_s + overhead_s,
    )
    assert nearness(prompt, here, busier, ttft) >= nearness(prompt, here, there, ttft)


@given(PROMPTS, HERES, THERES, AIMS, st.floats(1, 100), st.floats(1, 100))
def test_a_faster_prefill_node_or_link_never_repels_a_prompt(
    prompt: PromptSize, here: LocalMeasures, there: RemoteMeasures, ttft: TtftAim, rate: float, link: float
) -> None:
    faster = replace(there, tokens_per_s=there.tokens_per_s * rate, bytes_per_s=there.bytes_per_s * link)
    assert nearness(prompt, here, faster, ttft) <= nearness(prompt, here, there, ttft)


@given(PROMPTS, HERES, THERES, AIMS, TOKENS, st.integers(0, 100), st.floats(1, 100), st.floats(0, 1))
def test_a_busier_or_slower_decode_node_never_keeps_a_prompt(
    prompt: PromptSize,
    here: LocalMeasures,
    there: RemoteMeasures,
    ttft: TtftAim,
    tokens: int,
    streams: int,
    slower: float,
    step_s: float,
) -> None:
    busier = replace(prompt, queued_tokens=prompt.queued_tokens + tokens, streams=prompt.streams + streams)
    slow = replace(here, tokens_per_s=here.tokens_per_s / slower, decode_step_s=here.decode_step_s + step_s)
    assert nearness(busier, slow, there, ttft) <= nearness(prompt, here, there, ttft)


@given(PROMPTS, HERES, THERES, TARGETS, st.floats(1, 100), SECONDS)
def test_where_chunks_keep_the_itl_target_a_looser_target_or_a_shorter_wait_never_keeps_a_prompt(
    prompt: PromptSize, here: LocalMeasures, there: RemoteMeasures, ttft_s: float, looser: float, waited_s: float
) -> None:
    later = replace(prompt, waited_s=prompt.waited_s + waited_s)
    assert nearness(prompt, here, there, TtftAim(ttft_s * looser)) <= nearness(later, here, there, TtftAim(ttft_s))


@given(PROMPTS, HERES, THERES, AIMS)
def test_the_reason_is_true(prompt: PromptSize, here: LocalMeasures, there: RemoteMeasures, ttft: TtftAim) -> None:
    times = estimate(prompt, here, there, CHUNK)
    decision = decide(prompt, here, there, ttft)
    if decision.reason is PrefillReason.TARGET:
        assert decision.remote and prompt.waited_s + times.remote_s <= ttft.there_s and prompt.streams > there.streams
        return
    late_here = prompt.waited_s + times.local_s > ttft.here_s
    very_late = prompt.waited_s + times.remote_s > VERY_LATE * ttft.here_s
    spares_streams = there.streams < prompt.streams
    if decision.source is PrefillSource.LOCAL:
        assert times.local_s <= times.remote_s and (very_late or not late_here or not spares_streams)
    else:
        late = decision.reason is PrefillReason.LATE
        if late:
            assert times.local_s <= times.remote_s and late_here and spares_streams and not very_late
        else:
            assert times.remote_s < times.local_s
        assert decision.waits == (prompt.may_wait and times.queue_s > most_queued_s(ttft))


@given(PROMPTS, HERES, THERES, AIMS)
def test_no_prompt_waits_where_no_step_follows(
    prompt: PromptSize, here: LocalMeasures, there: RemoteMeasures, ttft: TtftAim
) -> None:
    assert not decide(replace(prompt, may_wait=False), here, there, ttft).waits
