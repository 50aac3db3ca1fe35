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
    attempt.prompt_computed()
    attempt.prompt_computed()
    assert (load(NODE), load(prefill)) == (6, 1)
    attempt.end_everywhere()
    attempt.end_everywhere()
    assert (load(NODE), load(prefill)) == (1, 1)
    other.end_everywhere()
    assert (load(NODE), load(prefill)) == (0, 0)


def test_prompts_are_those_that_a_node_is_still_to_compute() -> None:
    attempts = Attempts()
    prefill, decode = node_info("p", Role.PREFILL), node_info("d", Role.DECODE)
    computed, ended = attempts.begin((decode, 1), (prefill, 1)), attempts.begin((decode, 1), (prefill, 1))
    own = attempts.begin((prefill, 1))
    assert (attempts.prompts(prefill.boot_id), attempts.prompts(decode.boot_id)) == (3, 0)
    for attempt in (computed, own):
        attempt.prompt_computed()
        attempt.prompt_computed()
    assert attempts.prompts(prefill.boot_id) == 1
    # What it answers itself goes on after its prompt; what it only prefills does not.
    assert (attempts.load(prefill.boot_id), attempts.load(decode.boot_id)) == (2, 2)
    for attempt in (computed, ended, own):
        attempt.end_everywhere()
    assert (attempts.load(prefill.boot_id), attempts.load(decode.boot_id)) == (0, 0)
    assert attempts.prompts(prefill.boot_id) == 0
    assert not attempts._prompts


def test_prompts_that_a_nodes_heartbeats_have_to_show_by_now_are_not_counted() -> None:
    """A decode node computes some itself, and others wait there for a place."""
    attempts = Attempts()
    prefill, decode = node_info("p", Role.PREFILL), node_info("d", Role.DECODE)
    old = attempts.begin((decode, 1), (prefill, 1))
    for heartbeats, prompts in ((1, 1), (2, 0)):
        attempts.heard_from(prefill.boot_id, NodeLoad())
        assert attempts.prompts(prefill.boot_id) == prompts, heartbeats
    new = attempts.begin((decode, 1), (prefill, 1))
    old.end_everywhere()
    assert attempts.prompts(prefill.boot_id) == 1
    attempts.forget(prefill.boot_id)
    new.end_everywhere()
    assert not attempts._prompts


def test_a_node_has_a_share_of_heartbeats_with_prompts_and_a_new_one_has_none() -> None:
    attempts = Attempts()
    assert attempts.prompt_share(NODE.boot_id) == 0.0
    shares = []
    for queue_s in [0.5] * 40 + [0.0] * 40:
        attempts.heard_from(NODE.boot_id, NodeLoad(queue_s=queue_s))
        shares.append(attempts.prompt_share(NODE.boot_id))
    assert sorted(shares[:40]) == shares[:40] and 0.9 < shares[39] < 1.0
    assert sorted(shares[40:], reverse=True) == shares[40:] and 0.0 < shares[-1] < 0.1
    attempts.forget(NODE.boot_id)
    assert attempts.prompt_share(NODE.boot_id) == 0.0


def test_a_node_that_is_gone_leaves_nothing_behind() -> None:
    attempts = Attempts()
    registry = Registry(1.0, 3, watcher=attempts)
    registry.handle(Register(NODE), 0.0)
    attempt = attempts.begin((NODE, 1))
    registry.handle(NodeHeartbeat(NODE.boot_id, NodeLoad(running=1)), 0.0)
    registry.expire(100.0)
    attempt.end_everywhere()
    assert not attempts._under_way
    assert not attempts._prompts
    assert not attempts._reported
    assert not attempts._prompt_shares
    assert not attempts._said
