"""Tests what a decode node knows of a prefill node, from orders and answers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.placement.prefill_node import MAX_PROBE_S, PROBE_S, PrefillNode
from pdserve.wire.transfer import UNKNOWN_LOAD, PrefillLoad

ALONE_S = 0.3


def order(node: PrefillNode, name: int, now: float, tokens: int = 500, expected_s: float = 0.5) -> None:
    node.ordered(name, tokens, 0, expected_s, ALONE_S, now)


def test_its_queue_is_what_was_ordered_and_what_it_says_of_others() -> None:
    node = PrefillNode("p")
    order(node, 1, 0.0)
    order(node, 2, 0.0, 300)
    assert node.queued_tokens(0.0) == 800
    node.answered(1, 0, PrefillLoad(1300, 1000), 1.0)
    assert node.queued_tokens(1.0) == 1300
    assert node.queued_tokens(1.5) == 800, "half a second's work less"
    assert node.queued_tokens(9.0) == 0
    order(node, 3, 9.0, 200)
    assert node.queued_tokens(9.0) == 200
    node.withdrawn(3)
    assert node.queued_tokens(9.0) == 0


def test_an_order_is_worked_off_in_its_turn() -> None:
    node = PrefillNode("p")
    node.heard(PrefillLoad(0, 1000), 0.0)
    order(node, 1, 0.0)
    order(node, 2, 0.1, 300)
    assert [node.queued_tokens(now) for now in (0.1, 0.5, 0.6, 0.9)] == pytest.approx([700, 300, 200, 0])
    node.answered(1, 0, PrefillLoad(300, 1000), 0.7)
    assert node.queued_tokens(0.7) == 300, "it has begun later than was expected"


def test_what_it_says_meanwhile_is_believed_like_what_it_says_with_an_answer() -> None:
    node = PrefillNode("p")
    order(node, 1, 0.0, 300)
    node.heard(PrefillLoad(1300, 1000), 0.5)
    assert (node.tokens_per_s, node.queued_tokens(0.5)) == (1000, 1300)
    assert node.queued_tokens(1.0) == 800, "half a second's work of others less"
    node.heard(PrefillLoad(200, 1000), 1.5)
    assert node.queued_tokens(1.5) == 200
    assert not node.idle and node.late_s(1.5) == 1.0, "it is no answer"


def test_silence_beyond_what_was_expected_counts() -> None:
    node = PrefillNode("p")
    order(node, 1, 0.0)
    order(node, 2, 1.0)
    assert node.late_s(0.5) == 0
    assert node.late_s(4.5) == 4.0
    node.answered(1, 0, UNKNOWN_LOAD, 4.5)
    assert node.late_s(4.5) == 3.0


def test_what_queue_and_rate_do_not_explain_is_overhead() -> None:
    node = PrefillNode("p")
    for i in range(40):
        order(node, i, 10.0 * i)
        node.answered(i, 0, PrefillLoad(0, 1000), 10.0 * i + 0.52)
    assert node.overhead_s == pytest.approx(0.02, rel=0.01)
    assert node.tokens_per_s == 1000


def test_blocks_that_come_after_the_token_give_the_bandwidth() -> None:
    node = PrefillNode("p")
    node.landed(0, 0.0)
    prior = node.bytes_per_s
    for _ in range(20):
        node.landed(1_000_000, 0.01)
    assert prior != pytest.approx(1e8)
    assert node.bytes_per_s == pytest.approx(1e8)


def test_it_is_probed_when_it_was_silent_and_less_and_less_while_it_is_no_good() -> None:
    node, now, pauses = PrefillNode("p"), 0.0, []
    assert node.due(now)
    for i in range(8):
        order(node, i, now)
        assert not node.due(now + 1000), "one order at a time"
        answered = now + 2 * ALONE_S
        node.answered(i, 0, UNKNOWN_LOAD, answered)
        now = next(t for k in range(1, 100) if node.due(t := answered + k * PROBE_S))
        pauses.append(now - answered)
    assert pauses == pytest.approx([PROBE_S * 2**i for i in range(1, 5)] + [MAX_PROBE_S] * 4)
    order(node, 9, now)
    node.answered(9, 0, UNKNOWN_LOAD, now + ALONE_S / 2)
    assert node.due(now + ALONE_S / 2 + PROBE_S)


def test_a_failure_keeps_prompts_away_until_a_probe_succeeds() -> None:
    node = PrefillNode("p")
    order(node, 1, 0.0)
    node.failed(1, 1.0)
    assert node.failing
    assert not node.due(1.0 + PROBE_S)
    assert node.due(1.0 + 2 * PROBE_S)
    order(node, 2, 30.0)
    node.answered(2, 0, UNKNOWN_LOAD, 30.1)
    assert not node.failing


def test_a_rate_that_is_no_number_is_not_believed() -> None:
    node = PrefillNode("p")
    for i, rate in enumerate((math.inf, math.nan, 0.0)):
        order(node, i, 0.0)
        node.answered(i, 0, PrefillLoad(0, rate), 1.0)
        assert node.tokens_per_s is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["order", "answer", "fail", "withdraw", "land"]),
            st.integers(0, 5),
            st.integers(0, 5000),
            st.floats(0, 10),
        ),
        max_size=60,
    )
)
def test_estimates_stay_sane_whatever_comes(events: list[tuple[str, int, int, float]]) -> None:
    node, now = PrefillNode("p"), 0.0
    for kind, name, tokens, passed in events:
        now += passed
        match kind:
            case "order":
                node.ordered(name, tokens, tokens // 2, 0.1, ALONE_S, now)
            case "answer":
                node.answered(name, tokens, PrefillLoad(tokens, float(tokens)), now)
            case "fail":
                node.failed(name, now)
            case "withdraw":
                node.withdrawn(name)
            case "land":
                node.landed(tokens, passed)
        remote = node.measures(now, 20_000.0, 1000.0)
        assert remote.tokens_per_s > 0 and remote.bytes_per_s > 0
        assert 0 <= remote.queued_tokens < 40_000 and 0 <= remote.late_s <= now and 0 <= remote.overhead_s <= 600
        assert 0 <= remote.cached_share <= 1


def test_what_its_cache_has_had_of_missing_tokens_is_expected_again() -> None:
    node = PrefillNode("p")
    assert node.measures(0.0, 1.0, 1000).held_share == 0
    for i in range(40):
        # Of 300 tokens, 100 were here; the prefill node had 250.
        node.ordered(i, 200, 100, 0.5, ALONE_S, 10.0 * i)
        node.answered(i, 250, PrefillLoad(0, 1000), 10.0 * i + 0.1)
    assert node.measures(400.0, 1.0, 1000).held_share == pytest.approx(0.75, rel=0.01)
    node.ordered(40, 200, 100, 0.5, ALONE_S, 400.0)
    node.answered(40, 60, PrefillLoad(0, 1000), 400.1)
    assert node.measures(401.0, 1.0, 1000).held_share == pytest.approx(0.75 * 0.75, rel=0.01)
