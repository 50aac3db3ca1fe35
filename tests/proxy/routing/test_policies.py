"""Simulations show what each policy is for: they count the requests at the busiest node, or the cache hits."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import RoutingPolicy
from pdserve.wire.discovery import NodeInfo, Role
from pdserve_proxy.routing.candidates import Candidates
from pdserve_proxy.routing.policies import (
    LOAD_FACTOR,
    STEP_BYTES,
    Policy,
    TwoChoices,
    hash_chain,
    make_policy,
)
from tests.proxy.cluster import node_info


def nodes_of(count: int) -> list[NodeInfo]:
    return [node_info(f"n{i}", Role.MIXED, boot_id=bytes([i]) * 16) for i in range(count)]


class Loaded:
    """Candidates whose loads a test decides."""

    def __init__(self, nodes: Sequence[NodeInfo]) -> None:
        self.here: Counter[bytes] = Counter()
        self.candidates = Candidates(nodes, self.here.__getitem__)

    def put(self, boot_id: bytes, load: int) -> None:
        self.here[boot_id] = load
        self.candidates.changed(boot_id)

    def add(self, node: NodeInfo) -> None:
        self.put(node.boot_id, self.here[node.boot_id] + 1)

    def take(self, boot_id: bytes) -> None:
        self.put(boot_id, self.here[boot_id] - 1)


def excess(policy: Policy, nodes: Sequence[NodeInfo], *, refresh: int, seed: int) -> int:
    """Returns how many requests more the busiest node ever had than an even spread would have given it at most.

    Loads are seen anew every ``refresh`` requests. They come one a tick; one in 16 is 200 times as long as the others,
    so turns alone do not make loads even.
    """
    chance = random.Random(seed)
    real: Counter[bytes] = Counter()
    seen = Loaded(nodes)

    ends: list[tuple[int, bytes]] = []
    peak = even = 0
    for tick in range(4000):
        while ends and ends[0][0] <= tick:
            real[heapq.heappop(ends)[1]] -= 1
        if tick % refresh == 0:
            for info in nodes:
                seen.put(info.boot_id, real[info.boot_id])
        node = policy.select(seen.candidates, b"")[0]
        real[node.boot_id] += 1
        peak = max(peak, real[node.boot_id])
        even = max(even, math.ceil(real.total() / len(nodes)))
        heapq.heappush(ends, (tick + (2000 if chance.random() < 1 / 16 else 10), node.boot_id))
    return peak - even


@pytest.mark.parametrize("seed", range(3))
def test_least_loaded_and_two_choices_are_far_more_even_than_turns_where_their_view_is_fresh(seed: int) -> None:
    nodes = nodes_of(16)
    turns = excess(make_policy(RoutingPolicy.ROUND_ROBIN), nodes, refresh=1, seed=seed)
    least = excess(make_policy(RoutingPolicy.LEAST_LOADED), nodes, refresh=1, seed=seed)
    two = excess(TwoChoices(random.Random(seed)), nodes, refresh=1, seed=seed)
    assert least <= 0.4 * turns
    assert least <= two <= 0.7 * turns


@pytest.mark.parametrize("seed", range(3))
def test_with_an_old_view_two_choices_do_not_all_run_to_one_node(seed: int) -> None:
    nodes = nodes_of(16)
    two = excess(TwoChoices(random.Random(seed)), nodes, refresh=100, seed=seed)
    least = excess(make_policy(RoutingPolicy.LEAST_LOADED), nodes, refresh=100, seed=seed)
    assert two <= 0.6 * least


def test_a_larger_node_takes_a_larger_part() -> None:
    small, large = nodes_of(2)
    large = node_info("large", Role.MIXED, boot_id=large.boot_id, max_running=12)
    for policy in (RoutingPolicy.LEAST_LOADED, RoutingPolicy.TWO_CHOICES, RoutingPolicy.PREFIX_AFFINITY):
        loaded, tried = Loaded([small, large]), make_policy(policy)
        for turn in range(64):
            loaded.add(tried.select(loaded.candidates, b"%d" % turn)[0])
        assert loaded.here[large.boot_id] >= 2 * loaded.here[small.boot_id], policy


def conversations(count: int, turns: int, system: bytes) -> list[list[bytes]]:
    """Each turn repeats the conversation so far, as chat requests do."""
    chance = random.Random(5)
    prompts = []
    for _ in range(count):
        prompt = system
        said = []
        for _ in range(turns):
            prompt += chance.randbytes(2 * STEP_BYTES)
            said.append(prompt)
        prompts.append(said)
    return prompts


def repeat_rate(policy: Policy, nodes: Sequence[NodeInfo], system: bytes) -> tuple[float, int]:
    """Returns the share of follow-up turns that went to the node of the turn before, and the busiest node's load.

    All conversations are under way at once, one request each.
    """
    place: dict[int, bytes] = {}
    loaded = Loaded(nodes)
    hits = follow_ups = peak = 0
    talks = conversations(64, 4, system)
    for turn in range(4):
        for which, talk in enumerate(talks):
            if which in place:
                loaded.take(place[which])
            node = policy.select(loaded.candidates, talk[turn])[0]
            loaded.add(node)
            peak = max(peak, loaded.here[node.boot_id])
            if which in place:
                follow_ups += 1
                hits += place[which] == node.boot_id
            place[which] = node.boot_id
    return hits / follow_ups, peak


@pytest.mark.parametrize(
    "system", [b"", b"you are helpful. " * 64], ids=["no system prompt", "one system prompt for all"]
)
def test_prefix_affinity_repeats_its_nodes_and_still_bounds_their_load(system: bytes) -> None:
    nodes = nodes_of(7)
    rate, peak = repeat_rate(make_policy(RoutingPolicy.PREFIX_AFFINITY), nodes, system)
    chance, _ = repeat_rate(TwoChoices(random.Random(3)), nodes, system)
    assert rate >= 0.75
    assert rate >= 3 * chance
    assert peak <= LOAD_FACTOR * 64 / 7 + 1


def test_one_prompt_for_all_does_not_drown_its_node() -> None:
    nodes = nodes_of(5)
    loaded, policy = Loaded(nodes), make_policy(RoutingPolicy.PREFIX_AFFINITY)
    for _ in range(100):
        loaded.add(policy.select(loaded.candidates, b"the same")[0])
    assert 100 / 5 < max(loaded.here.values()) <= LOAD_FACTOR * 100 / 5 + 1


@given(st.binary(max_size=6 * STEP_BYTES), st.binary(max_size=STEP_BYTES), st.binary(max_size=STEP_BYTES))
def test_prompts_share_as_many_hashes_as_whole_steps(shared: bytes, one: bytes, other: bytes) -> None:
    first, second = hash_chain(shared + b"a" + one), hash_chain(shared + b"b" + other)
    same = sum(a == b for a, b in zip(first, second, strict=False))
    assert same == len(shared) // STEP_BYTES


@given(st.lists(st.binary(max_size=3 * STEP_BYTES), max_size=20), st.permutations(range(6)))
def test_proxies_that_know_the_same_nodes_agree_on_a_prefix_whatever_they_saw_before(
    earlier: list[bytes], order: list[int]
) -> None:
    nodes = nodes_of(6)
    others = [nodes[index] for index in order]
    one, two = make_policy(RoutingPolicy.PREFIX_AFFINITY), make_policy(RoutingPolicy.PREFIX_AFFINITY)
    seen_by_one, seen_by_two = Loaded(nodes), Loaded(others)
    for prompt in earlier:
        two.select(seen_by_two.candidates, prompt)
    for index, node in enumerate(nodes):
        for seen in (seen_by_one, seen_by_two):
            seen.put(node.boot_id, len(earlier) % (index + 1))
    for prompt in (*earlier, b"", b"new"):
        assert one.select(seen_by_one.candidates, prompt) == two.select(seen_by_two.candidates, prompt)


@given(
    st.sampled_from(RoutingPolicy),
    st.lists(st.integers(0, 20), min_size=1, max_size=8),
    st.sets(st.integers(0, 7)),
    st.binary(max_size=3 * STEP_BYTES),
)
def test_every_policy_chooses_two_nodes_that_are_not_left_out_wherever_there_are_two(
    policy_name: RoutingPolicy, loads: list[int], left_out: set[int], prompt: bytes
) -> None:
    nodes, policy = nodes_of(len(loads)), make_policy(policy_name)
    loaded = Loaded(nodes)
    for node, load in zip(nodes, loads, strict=True):
        loaded.put(node.boot_id, load)
    exclude = frozenset(bytes([number]) * 16 for number in left_out)
    left = [node for node in nodes if node.boot_id not in exclude]
    for _ in range(3):
        chosen = policy.select(loaded.candidates, prompt, exclude)
        assert len(chosen) == len(set(map(id, chosen))) == min(2, len(left))
        assert all(node in left for node in chosen)
