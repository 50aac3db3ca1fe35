"""A node's load is that of its last heartbeat, with the requests that began and ended there since."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.wire.discovery import NodeHeartbeat, NodeInfo, NodeLoad, Register, Role
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.routing.attempts import Attempt, Attempts
from tests.proxy.cluster import node_info

NODE = node_info("x", Role.MIXED)


SEND = st.tuples(st.just("send"), st.integers(1, 1024))
OTHERS = st.tuples(st.sampled_from(["end", "heartbeat"]), st.just(0))


@given(st.lists(SEND | OTHERS, max_size=40), st.integers(0, 5))
def test_with_heartbeats_that_tell_the_truth_the_load_is_exact(events: list[tuple[str, int]], others: int) -> None:
    """Counts ``others`` requests that other proxies sent and that do not end."""
    attempts = Attempts()
    registry = Registry(1.0, 3, watcher=attempts)
    registry.handle(Register(NODE), 0.0)
    under_way: list[tuple[Attempt, int]] = []
    heard = False
    for event, answers in events:
        match event:
            case "send":
                under_way.append((attempts.begin((NODE, answers)), answers))
            case "end" if under_way:
                under_way.pop(0)[0].end_everywhere()
            case "heartbeat":
                heard = True
                load = NodeLoad(running=sum(count for _, count in under_way), waiting=others)
                registry.handle(NodeHeartbeat(NODE.boot_id, load), 0.0)
        known = attempts.load(NODE.boot_id)
        assert known == sum(count for _, count in under_way) + (others if heard else 0)


def test_what_landed_once_does_not_land_again() -> None:
    attempts = Attempts()
    registry = Registry(1.0, 3, watcher=attempts)
    prefill = node_info("p", Role.PREFILL)
    for info in (NODE, prefill):
        registry.handle(Register(info), 0.0)

    def load(node: NodeInfo) -> int:
        return attempts.load(node.boot_id)

    attempt, other = attempts.begin((NODE, 5), (prefill, 2)), attempts.begin((NODE, 1), (prefill, 1))
    attempt.end_at(prefill.boot_id)
    attempt.end_at(prefill.boot_id)
    assert (load(NODE), load(prefill)) == (6, 1)
    attempt.end_everywhere()
    attempt.end_everywhere()
    assert (load(NODE), load(prefill)) == (1, 1)
    other.end_everywhere()
    assert (load(NODE), load(prefill)) == (0, 0)


def test_a_node_that_is_gone_leaves_nothing_behind() -> None:
    attempts = Attempts()
    registry = Registry(1.0, 3, watcher=attempts)
    registry.handle(Register(NODE), 0.0)
    attempt = attempts.begin((NODE, 1))
    registry.handle(NodeHeartbeat(NODE.boot_id, NodeLoad(running=1)), 0.0)
    registry.expire(100.0)
    attempt.end_everywhere()
    assert not attempts._under_way
    assert not attempts._reported
    assert not attempts._said
