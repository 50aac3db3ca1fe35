"""Candidates keep their orders while loads change; a choice among many nodes looks at hardly more than among few."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import RoutingPolicy
from pdserve.wire.discovery import Deregister, NodeHeartbeat, NodeInfo, NodeLoad, Register, Role
from pdserve_proxy.registry import registry as registry_module
from pdserve_proxy.registry import snapshot as snapshot_module
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.routing import candidates as candidates_module
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.routing.candidates import Candidates, HashRing, Turns
from pdserve_proxy.routing.router import RouteQuery, Router
from tests.proxy.cluster import node_info


def members(count: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(count)]


def infos(count: int) -> list[NodeInfo]:
    return [node_info(f"d{number}", Role.MIXED, boot_id=boot_id) for number, boot_id in enumerate(members(count))]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=40), st.integers(1, 6))
def test_the_order_by_share_is_that_of_the_loads_whatever_changes(changes: list[tuple[int, int]], count: int) -> None:
    loads: Counter[bytes] = Counter()
    nodes = infos(count)
    candidates = Candidates(nodes, loads.__getitem__)
    next(candidates.by_share())
    for number, load in changes:
        node = nodes[number % count]
        if load == 4:
            candidates.served(node)
        else:
            loads[node.boot_id] = load
            candidates.changed(node.boot_id)
        ordered = list(candidates.by_share())
        assert sorted(node.name for node in ordered) == sorted(node.name for node in nodes)
        assert [loads[node.boot_id] for node in ordered] == sorted(loads[node.boot_id] for node in nodes)
        assert candidates.total_load == sum(loads.values())


def test_equal_nodes_take_turns_by_share() -> None:
    candidates = Candidates(infos(3), lambda boot_id: 1)
    taken = []
    for _ in range(6):
        node = next(candidates.by_share())
        candidates.served(node)
        taken.append(node.name)
    assert taken == ["d0", "d1", "d2", "d0", "d1", "d2"]


def test_equal_nodes_take_turns_although_another_one_comes_and_goes() -> None:
    registry, attempts = Registry(1.0, 3), Attempts()
    router = Router(RoutingPolicy.LEAST_LOADED, attempts)
    *stay, flaps = infos(5)
    taken: Counter[str] = Counter()
    for node in stay:
        registry.handle(Register(node), 0.0)
    for _ in range(20):
        registry.handle(Register(flaps), 0.0)
        registry.serving()
        registry.handle(Deregister(flaps.boot_id), 0.0)
        taken[router.choose(registry.serving(), RouteQuery("m")).decode.name] += 1
    assert taken == {node.name: 5 for node in stay}


def test_the_turns_of_the_nodes_that_had_theirs_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates_module, "MAX_TURNS", 2)
    turns = Turns()
    for boot_id in (b"a", b"b", b"a", b"c"):
        turns.give(boot_id)
    assert [turns.last(boot_id) for boot_id in (b"a", b"b", b"c")] == [3, 0, 4]


@given(st.integers(2, 12), st.integers(0, 11))
def test_a_member_that_leaves_moves_only_the_keys_that_were_its_own(count: int, which: int) -> None:
    everybody = members(count)
    gone = everybody[which % count]
    left = [member for member in everybody if member != gone]
    whole, rest = HashRing(everybody), HashRing(left)
    for key in (b"%d" % number for number in range(50)):
        owner = whole.owner(key)
        assert owner is not None
        without = rest.owner(key)
        assert without is not None
        if everybody[owner] != gone:
            assert everybody[owner] == left[without]
        same = whole.owner(key, {gone})
        assert same is not None
        assert everybody[same] == left[without], "to leave a member out is as if it were not there"


def test_the_members_have_nearly_even_shares_of_the_keys() -> None:
    ring, keys = HashRing(members(50)), 20_000
    counts = Counter(ring.owner(b"%d" % key) for key in range(keys))
    assert len(counts) == 50
    assert max(counts.values()) < 1.4 * keys / 50


@pytest.mark.parametrize("count", [2, 8, 50])
def test_no_member_has_less_than_half_of_an_even_share_of_the_keys(count: int) -> None:
    for seed in range(12):
        chance = random.Random(seed)
        ring = HashRing([chance.randbytes(16) for _ in range(count)])
        counts = Counter(ring.owner(chance.randbytes(16)) for _ in range(200 * count))
        assert min(counts[place] for place in range(count)) >= 0.5 * 200, f"members drawn with seed {seed}"


def test_each_member_comes_once_behind_a_key() -> None:
    assert sorted(HashRing(members(20)).after(b"key")) == list(range(20))


def test_nobody_owns_a_key_if_all_are_left_out() -> None:
    assert HashRing([]).owner(b"key") is None
    assert HashRing(members(3)).owner(b"key", set(members(3))) is None


class Counted:
    """Counts how many nodes or entries the proxy looks at: comparisons of a bisection, and steps of a walk."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        patch.setattr(candidates_module, "bisect_left", self._bisect_left)
        patch.setattr(candidates_module, "insort", self._insort)
        for kind, name in ((Candidates, "by_share"), (HashRing, "_behind")):
            patch.setattr(kind, name, self._counted(getattr(kind, name)))
        for module in (registry_module, snapshot_module):
            patch.setattr(module, "take_serving", self._all(snapshot_module.take_serving))
        patch.setattr(registry_module, "take_snapshot", self._all(snapshot_module.take_snapshot))
        patch.setattr(Candidates, "__init__", self._made(Candidates.__init__))
        patch.setattr(registry_module, "OrderedDict", self._counted_dict())

    def _bisect_left(self, ordered: list[Any], item: Any) -> int:
        return next(index for index in self._bisection(ordered, item))

    def _bisection(self, ordered: list[Any], item: Any) -> Iterator[int]:
        low, high = 0, len(ordered)
        while low < high:
            self.looks += 1
            middle = (low + high) // 2
            low, high = (middle + 1, high) if ordered[middle] < item else (low, middle)
        yield low

    def _insort(self, ordered: list[Any], item: Any) -> None:
        ordered.insert(self._bisect_left(ordered, item), item)

    def _counted(self, walk: Any) -> Any:
        def counting(*args: Any) -> Iterator[Any]:
            for found in walk(*args):
                self.looks += 1
                yield found

        return counting

    def _counted_dict(self) -> type[OrderedDict[bytes, float]]:
        counted = self._counted

        class Heard(OrderedDict[bytes, float]):
            items = counted(OrderedDict.items)
            values = counted(OrderedDict.values)

        return Heard

    def _all(self, take: Any) -> Any:
        def counting(nodes: Any, *args: Any) -> Any:
            everyone = tuple(nodes)
            self.looks += len(everyone)
            return take(everyone, *args)

        return counting

    def _made(self, init: Any) -> Any:
        def counting(candidates: Any, nodes: Any, load: Any, *turns: Any) -> None:
            self.looks += len(nodes)
            init(candidates, nodes, load, *turns)

        return counting


def looks_at(count: int, policy: RoutingPolicy, counted: Counted) -> float:
    """Returns at how many nodes a request looks, beside heartbeats, in a cluster of ``count`` of them."""
    attempts = Attempts()
    registry = Registry(1.0, 3, watcher=attempts)
    router = Router(policy, attempts)
    chance = random.Random(count)
    for node in infos(count):
        registry.handle(Register(node), 0.0)
    router.choose(registry.serving(), RouteQuery("m"))  # makes the groups
    boot_ids = members(count)
    before = counted.looks
    requests = 200
    for number in range(requests):
        for boot_id in chance.choices(boot_ids, k=5):
            registry.handle(NodeHeartbeat(boot_id, NodeLoad(running=chance.randrange(8))), number * 0.001)
        registry.expire(number * 0.001)
        assert registry.next_expiry() is not None
        assert registry.live_proxies == 1
        route = router.choose(registry.serving(), RouteQuery("m", chance.randbytes(600)))
        attempts.begin((route.decode, 1)).end_everywhere()
    return (counted.looks - before) / requests


@pytest.mark.parametrize("policy", RoutingPolicy)
def test_a_request_and_heartbeats_cost_at_most_the_logarithm_of_the_nodes(
    policy: RoutingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    few, many, most = (looks_at(count, policy, counted) for count in (10, 100, 1000))
    # Each tenfold adds the same: log2(10) steps to each bisection, of which prefix affinity makes most.
    each = 16 * math.log2(10) * 4
    assert many - few <= each
    assert most - many <= each
    assert most < 1000, "not even one look at each node"


def test_heartbeats_do_not_make_the_nodes_to_route_to_anew() -> None:
    registry = Registry(1.0, 3)
    one, other = infos(2)
    for node in (one, other):
        registry.handle(Register(node), 0.0)
    serving = registry.serving()
    registry.handle(NodeHeartbeat(one.boot_id, NodeLoad(running=1)), 0.5)
    registry.handle(Register(other), 0.5)
    assert registry.serving() is serving
    registry.mark_unreachable(one.boot_id)
    assert [pair.decode for pair in registry.serving().pairings["m"]] == [other]
    registry.handle(NodeHeartbeat(one.boot_id, NodeLoad()), 0.6)
    assert [pair.decode for pair in registry.serving().pairings["m"]] == [one, other]
