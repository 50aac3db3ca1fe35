"""Every policy spreads requests fairly and chooses only pairs of nodes that fit."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import RoutingPolicy
from pdserve.errors import InvalidRequest, NotFound, Unavailable
from pdserve.wire.discovery import NodeInfo, NodeLoad, Role
from pdserve_proxy.registry.snapshot import Reachability, RegisteredNode, Serving, take_serving
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.routing.router import MAX_POLICIES, Route, RouteQuery, Router, requested_model
from tests.proxy.cluster import node_info


def serving_of(*infos: NodeInfo) -> Serving:
    return take_serving(RegisteredNode(info, NodeLoad(), Reachability.SERVING, 0.0) for info in infos)


class Turns:
    """A router before its first request."""

    def __init__(self, policy: RoutingPolicy = RoutingPolicy.ROUND_ROBIN) -> None:
        self._router = Router(policy, Attempts())

    def choose(
        self, serving: Serving, model: str, exclude: frozenset[bytes] = frozenset(), prompt_start: bytes = b""
    ) -> Route:
        return self._router.choose(serving, RouteQuery(model, prompt_start), exclude)


def several(role: Role, count: int, model: str = "m") -> list[NodeInfo]:
    return [node_info(f"{role.value}{i}", role, model=model) for i in range(count)]


@given(prefill=st.integers(1, 7), decode=st.integers(1, 7), rounds=st.integers(1, 5))
def test_over_whole_rounds_every_node_gets_the_same(prefill: int, decode: int, rounds: int) -> None:
    serving = serving_of(*several(Role.PREFILL, prefill), *several(Role.DECODE, decode))
    policy = Turns()
    routes = [policy.choose(serving, "m") for _ in range(rounds * prefill * decode)]
    assert set(Counter(route.decode.name for route in routes).values()) == {rounds * prefill}
    assert set(Counter(route.prefill[0].name for route in routes).values()) == {rounds * decode}
    assert all(len({info.name for info in route.prefill}) == min(2, prefill) for route in routes)


@given(picks=st.lists(st.sampled_from(["a", "b"]), max_size=60))
def test_models_do_not_take_each_others_turns(picks: list[str]) -> None:
    infos = [info for model in "ab" for role in Role for info in several(role, 2, model=model)]
    serving, policy = serving_of(*infos), Turns()
    chosen = [policy.choose(serving, model).decode for model in picks]
    assert [info.model for info in chosen] == picks
    for model in "ab":
        counts = Counter(info.name for info in chosen if info.model == model)
        each = [counts[name] for name in ("decode0", "decode1", "mixed0", "mixed1")]
        assert max(each) - min(each) <= 1


CONTROL = "tcp://host.invalid:2"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(Role),
            st.sampled_from(["m", "n"]),
            st.sampled_from(["f", "g"]),
            st.sampled_from(["", CONTROL]),
        ),
        max_size=12,
    ),
    st.integers(0, 20),
    st.sampled_from(RoutingPolicy),
)
def test_no_route_ever_joins_nodes_that_do_not_fit(
    kinds: list[tuple[Role, str, str, str]], turns: int, policy_name: RoutingPolicy
) -> None:
    infos = [
        node_info(f"n{i}", role, model=model, fingerprint=fingerprint, control=control)
        for i, (role, model, fingerprint, control) in enumerate(kinds)
    ]
    serving = serving_of(*infos)
    policy = Turns(policy_name)
    for turn in range(turns):
        try:
            route = policy.choose(serving, "m", prompt_start=b"prompt %d" % turn)
        except Unavailable:
            assert not any(info.role is Role.MIXED and info.model == "m" for info in infos)
            return
        decode = route.decode
        assert decode.model == "m"
        assert decode.role in (Role.DECODE, Role.MIXED)
        fitting = [
            info
            for info in infos
            if info.role in (Role.PREFILL, Role.MIXED)
            and (info.model, info.fingerprint) == ("m", decode.fingerprint)
            and info.control
            and info is not decode
            and (decode.control or decode.role is Role.DECODE)
        ]
        assert len({info.boot_id for info in route.prefill}) == len(route.prefill) == min(2, len(fitting))
        assert all(info in fitting for info in route.prefill)


def test_mixed_nodes_compute_prompts_for_each_other_and_for_decode_nodes() -> None:
    mixed = [node_info(f"mixed{i}", Role.MIXED, control=CONTROL) for i in range(3)]
    serving, policy = serving_of(*mixed, node_info("d", Role.DECODE)), Turns()
    routes = [policy.choose(serving, "m") for _ in range(60)]
    asked = {(route.decode.name, route.prefill[0].name) for route in routes}
    assert {decode for decode, _ in asked} == {"mixed0", "mixed1", "mixed2", "d"}
    assert {other for _, other in asked} == {"mixed0", "mixed1", "mixed2"}
    assert all(decode != other for decode, other in asked)


def test_prefill_alternates_and_names_the_next_as_its_alternative() -> None:
    serving = serving_of(*several(Role.PREFILL, 3), node_info("d", Role.DECODE))
    policy = Turns()
    pairs = [tuple(info.name for info in policy.choose(serving, "m").prefill) for _ in range(3)]
    assert pairs == [("prefill0", "prefill1"), ("prefill1", "prefill2"), ("prefill2", "prefill0")]


def test_a_decode_node_without_a_fitting_prefill_node_is_passed_over() -> None:
    misfit = node_info("misfit", Role.DECODE, fingerprint="g")
    serving = serving_of(misfit, node_info("p", Role.PREFILL), node_info("d", Role.DECODE))
    policy = Turns()
    assert {policy.choose(serving, "m").decode.name for _ in range(4)} == {"d"}


def test_without_any_pair_it_is_unavailable_and_says_when_to_retry() -> None:
    for infos in ([node_info("d", Role.DECODE)], [node_info("p", Role.PREFILL)]):
        with pytest.raises(Unavailable) as caught:
            Turns().choose(serving_of(*infos), "m")
        assert caught.value.retry_after_s is not None


def test_a_mixed_node_serves_alone() -> None:
    route = Turns().choose(serving_of(node_info("d", Role.DECODE), node_info("x", Role.MIXED)), "m")
    assert (route.decode.name, route.prefill) == ("x", ())


def test_excluded_nodes_are_avoided() -> None:
    first, second = several(Role.MIXED, 2)
    serving = serving_of(first, second)
    policy = Turns()
    assert {policy.choose(serving, "m", frozenset({first.boot_id})).decode.name for _ in range(3)} == {"mixed1"}
    with pytest.raises(Unavailable):
        policy.choose(serving, "m", frozenset({first.boot_id, second.boot_id}))


def test_nodes_that_come_and_go_between_picks_never_break_a_pick() -> None:
    policy = Turns()
    decode, prefill = several(Role.DECODE, 5), several(Role.PREFILL, 5)
    for count in (5, 1, 4, 2, 5, 1):
        serving = serving_of(*decode[:count], *prefill[:count])
        assert policy.choose(serving, "m").decode in decode[:count]


def test_which_model_a_request_means() -> None:
    one = serving_of(node_info("x", Role.MIXED))
    two = serving_of(node_info("x", Role.MIXED), node_info("y", Role.MIXED, model="n"))
    assert requested_model(one, "m") == requested_model(one, None) == "m"
    with pytest.raises(NotFound) as caught:
        requested_model(one, "gpt-9")
    assert caught.value.code == "model_not_found"
    with pytest.raises(InvalidRequest):
        requested_model(two, None)
    with pytest.raises(Unavailable):
        requested_model(serving_of(), "m")


def test_models_that_come_and_go_leave_a_bounded_memory() -> None:
    router = Router(RoutingPolicy.PREFIX_AFFINITY, Attempts())
    for number in range(2 * MAX_POLICIES):
        model = f"m{number}"
        serving = serving_of(*several(Role.PREFILL, 1, model), *several(Role.DECODE, 1, model))
        router.choose(serving, RouteQuery(model))
    assert len(router._decode_policies) == len(router._prefill_policies) == MAX_POLICIES
