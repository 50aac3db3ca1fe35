"""Rates and gaps come from what nodes have counted between two looks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.wire.discovery import GapCounts, NodeInfo, NodeLoad, Role
from pdserve_proxy.registry.snapshot import Reachability, RegisteredNode
from pdserve_proxy.status.report import percentiles
from pdserve_proxy.status.throughput import Percentiles, Throughput, TokenRates
from tests.examples import examples
from tests.proxy.cluster import node_info

DECODE = node_info("d", Role.DECODE)
PREFILL = node_info("p", Role.PREFILL)


def said(info: NodeInfo, at_s: float, prompt: int, generated: int, gaps: GapCounts = GapCounts()) -> RegisteredNode:  # noqa: B008  # frozen
    load = NodeLoad(running=1, prompt_tokens=prompt, generated_tokens=generated, gaps=gaps)
    return RegisteredNode(info, load, Reachability.SERVING, at_s)


def test_a_rate_is_over_the_last_seconds() -> None:
    throughput = Throughput(10.0, 60.0)
    throughput.note([said(DECODE, 100.0, 0, 0)])
    assert throughput.rates_of(DECODE.boot_id) == throughput.total() == TokenRates()
    for second in range(1, 41):
        throughput.note([said(DECODE, 100.0 + second, 10 * second, 1000 if second > 20 else 0)])
    assert throughput.rates_of(DECODE.boot_id) == TokenRates(10.0, 0.0)  # the burst was 20 s ago
    throughput.note([said(DECODE, 141.0, 400, 1100)])
    rates = throughput.rates_of(DECODE.boot_id)
    assert rates.generated == pytest.approx(10.0, rel=0.2)


def test_a_restarted_node_counts_anew_and_one_that_left_is_forgotten() -> None:
    throughput = Throughput(10.0, 60.0)
    throughput.note([said(DECODE, 1.0, 0, 0)])
    throughput.note([said(DECODE, 3.0, 200, 100)])
    assert throughput.total() == TokenRates(100.0, 50.0)
    throughput.note([said(node_info("d", Role.DECODE), 4.0, 7, 7)])
    assert throughput.total() == TokenRates()
    assert throughput.rates_of(DECODE.boot_id) == TokenRates()


def test_tokens_that_prefill_nodes_give_themselves_count() -> None:
    throughput = Throughput(10.0, 60.0)
    throughput.note([said(DECODE, 1.0, 0, 0), said(PREFILL, 1.0, 0, 0)])
    throughput.note([said(DECODE, 2.0, 10, 20), said(PREFILL, 2.0, 50, 30)])
    assert throughput.rates_of(PREFILL.boot_id) == TokenRates(50.0, 30.0)
    assert throughput.total() == TokenRates(60.0, 50.0)


def test_accepted_drafts_have_a_rate_beside_all_tokens() -> None:
    throughput = Throughput(10.0, 60.0)
    for at_s, generated, accepted in ((1.0, 40, 10), (3.0, 100, 40)):
        load = NodeLoad(running=1, generated_tokens=generated, accepted_drafts=accepted)
        throughput.note([RegisteredNode(DECODE, load, Reachability.SERVING, at_s)])
    assert throughput.rates_of(DECODE.boot_id) == TokenRates(0.0, 30.0, 15.0)


def test_gaps_are_those_since_the_first_look_of_all_nodes() -> None:
    throughput = Throughput(10.0, 60.0)
    other = node_info("e", Role.DECODE)
    bounds = (0.01, 0.02, 0.04)
    first = GapCounts(bounds, (1000, 0, 0, 0))
    throughput.note([said(DECODE, 1.0, 0, 0, first), said(other, 1.0, 0, 0, GapCounts((0.1,), (0, 0)))])
    later = GapCounts(bounds, (1000, 98, 0, 1))
    throughput.note([said(DECODE, 2.0, 0, 0, later), said(other, 2.0, 0, 0, GapCounts((0.1,), (0, 1)))])
    gaps = throughput.gaps()
    assert gaps.p50 is not None and 0.01 < gaps.p50 < 0.02
    assert gaps.p99 == 0.04  # nothing says how far above the last bound it was


@pytest.mark.parametrize("odd", [GapCounts((), (1,)), GapCounts((0.1,), (1, 2, 3)), GapCounts((), ())])
def test_odd_counts_of_a_node_break_nothing(odd: GapCounts) -> None:
    throughput = Throughput(10.0, 60.0)
    throughput.note([said(DECODE, 1.0, 0, 0, odd)])
    throughput.note([said(DECODE, 2.0, 0, 0, GapCounts((0.1,), (1, 1)))])
    throughput.note([said(DECODE, 3.0, 0, 0, odd)])
    throughput.gaps()


@settings(max_examples=examples(50))
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_values_in_order(values: list[float]) -> None:
    found = percentiles(values)
    assert found.p50 is not None and found.p95 is not None and found.p99 is not None
    assert found.p50 <= found.p95 <= found.p99 <= max(values)
    assert {found.p50, found.p95, found.p99} <= set(values)
    assert sum(value <= found.p95 for value in values) >= 0.95 * len(values)


def test_no_values_have_no_percentiles() -> None:
    assert percentiles([]) == Percentiles()
