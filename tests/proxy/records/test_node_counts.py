"""Tests the counts by node: labels are few, go when their nodes are long gone, and never fall meanwhile."""

from __future__ import annotations

from collections import Counter

from pdserve.wire.discovery import NodeInfo, Role
from pdserve_proxy.records.node_counts import FORGOTTEN_AFTER_S, MAX_LABELLED, OTHER_NODES, NodeCounts, NodeFailure
from tests.proxy.cluster import node_info


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def node(name: str) -> NodeInfo:
    return node_info(name, Role.DECODE)


def shown(counts: NodeCounts, under_way: dict[str, int], name: str) -> dict[tuple[str, ...], float]:
    """Returns the values of a metric's samples by their labels' values."""
    families = {family.name: family for family in counts.collect(under_way)}
    samples = families[f"pdserve_proxy_node_{name}"].samples
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def test_a_registered_node_is_shown_before_its_first_request() -> None:
    counts = NodeCounts()
    assert shown(counts, {"a": 0}, "requests") == {("a",): 0}
    failures = {("a", kind.value): 0 for kind in NodeFailure}
    assert shown(counts, {"a": 0}, "failures") == failures
    counts.began(node("a"))
    counts.failed(node("a"), NodeFailure.LOST)
    counts.resumed(node("b"))
    assert shown(counts, {"a": 3}, "requests") == {("a",): 1, ("b",): 0}
    assert shown(counts, {"a": 3}, "requests_in_flight") == {("a",): 3, ("b",): 0}
    assert shown(counts, {"a": 3}, "resumed") == {("a",): 0, ("b",): 1}
    assert shown(counts, {"a": 3}, "failures")["a", "lost"] == 1


def test_nodes_beyond_the_bound_share_a_label() -> None:
    counts = NodeCounts()
    names = [f"n{number}" for number in range(MAX_LABELLED + 3)]
    for name in names:
        counts.began(node(name))
    under_way = dict.fromkeys(names, 2)
    requests = shown(counts, under_way, "requests")
    assert requests == {**{(name,): 1 for name in names[:MAX_LABELLED]}, (OTHER_NODES,): 3}
    assert shown(counts, under_way, "requests_in_flight")[(OTHER_NODES,)] == 6
    assert len(shown(counts, under_way, "time_to_first_byte_seconds")) <= 12 * (MAX_LABELLED + 1)


def test_a_node_cannot_take_the_common_label() -> None:
    counts = NodeCounts()
    counts.began(node(OTHER_NODES))
    for number in range(MAX_LABELLED + 1):
        counts.began(node(f"n{number}"))
    assert shown(counts, {}, "requests")[(OTHER_NODES,)] == 2


def test_a_name_goes_when_no_node_has_had_it_for_long() -> None:
    clock = Clock()
    counts = NodeCounts(clock=clock)
    counts.began(node("gone"))
    counts.began(node("stays"))
    both = {"gone": 0, "stays": 0}
    clock.now_s += FORGOTTEN_AFTER_S + 1  # nobody asked meanwhile, and both are registered
    assert shown(counts, both, "requests") == {("gone",): 1, ("stays",): 1}
    clock.now_s += FORGOTTEN_AFTER_S - 1
    assert shown(counts, {"stays": 0}, "requests") == {("gone",): 1, ("stays",): 1}
    clock.now_s += 2
    assert shown(counts, {"stays": 0}, "requests") == {("stays",): 1}
    # Its place is free for another one.
    for number in range(MAX_LABELLED - 1):
        counts.began(node(f"n{number}"))
    assert (OTHER_NODES,) not in shown(counts, Counter({"stays": 0}), "requests")
