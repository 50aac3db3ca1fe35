"""The bodies on their way and the memory of all bodies are bounded, for each client and in all."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import TooManyRequests, Unavailable
from pdserve_proxy.requests.held_bodies import SHARES, BodyLimits, HeldBodies, HeldBody, client_of

EVENTS = st.lists(
    st.tuples(st.sampled_from(["arrive", "whole"]), st.sampled_from("abcdef"))
    | st.tuples(st.just("add"), st.integers(0, 400))
    | st.tuples(st.sampled_from(["arrived", "close"]), st.just(0)),
    max_size=80,
)


@dataclass(eq=False)
class Model:
    """The state that the test expects of a body."""

    body: HeldBody
    client: str
    arriving: bool
    size: int = 0


@given(EVENTS, st.integers(1, 9), st.integers(0, 1000), st.integers(1, 200), st.integers(0, 100))
def test_limits_hold_and_nothing_is_left(
    events: list[tuple[str, str | int]], uploads: int, memory: int, body_bytes: int, small: int
) -> None:
    bodies = HeldBodies(BodyLimits(uploads, memory, body_bytes, small))
    memory = max(memory, 2 * body_bytes)
    there: list[Model] = []

    def large(client: str | None = None, *, arriving: bool = False) -> int:
        return sum(
            one.size
            for one in there
            if one.size > small and client in (None, one.client) and (one.arriving or not arriving)
        )

    for number, (event, which) in enumerate(events):
        one = there[number % len(there)] if there else None
        if event in ("arrive", "whole"):
            new = Model(bodies.hold(str(which), ""), str(which), event == "arrive")
            of_client = sum(other.arriving for other in there if other.client == which)
            try:
                if new.arriving:
                    new.body.arrive()
            except TooManyRequests:
                assert of_client == -(-uploads // SHARES)
            except Unavailable:
                assert sum(other.arriving for other in there) == uploads
            else:
                there.append(new)
        elif one is not None and event == "add":
            try:
                one.body.add(int(which))
            except (TooManyRequests, Unavailable):
                assert one.size + int(which) > small
                assert large(one.client) + one.size + int(which) > max(memory // 2 // SHARES, body_bytes)
                one.body.__exit__(None, None, None)  # A body that is refused is given up.
                there.remove(one)
            else:
                one.size += int(which)
        elif one is not None:
            one.body.arrived()
            one.arriving = False
            if event == "close":
                one.body.__exit__(None, None, None)
                there.remove(one)
        assert bodies.total.uploads == sum(other.arriving for other in there) <= uploads
        assert bodies.total.large_bytes == large() <= memory
        assert large(arriving=True) <= memory // 2
        for client in "abcdef":
            assert large(client) <= memory // 2
            assert large(client, arriving=True) <= max(memory // 2 // SHARES, body_bytes)
    for left in there:
        left.body.__exit__(None, None, None)
    assert (bodies.total.uploads, bodies.total.large_bytes) == (0, 0)
    assert not bodies._clients


def test_the_largest_body_can_always_arrive_beside_another_client_s_share() -> None:
    bodies = HeldBodies(BodyLimits(uploads=1, memory_bytes=1, body_bytes=100, small_bytes=10))
    with bodies.hold("a", "") as whole, bodies.hold("b", "") as body, bodies.hold("c", "") as small:
        whole.add(100)
        body.arrive()
        body.add(100)
        small.add(10)
        with pytest.raises(Unavailable):
            small.add(1)


def test_one_client_has_half_of_the_memory_and_small_bodies_are_never_refused() -> None:
    bodies = HeldBodies(BodyLimits(uploads=8, memory_bytes=1000, body_bytes=100, small_bytes=10))
    with ExitStack() as held:
        for _ in range(5):
            held.enter_context(bodies.hold("", "10.0.0.1")).add(100)
        with pytest.raises(TooManyRequests):
            held.enter_context(bodies.hold("", "10.0.0.1")).add(100)
        for address in ("10.0.0.1", "10.0.0.2"):
            held.enter_context(bodies.hold("", address)).add(10)
        held.enter_context(bodies.hold("", "10.0.0.2")).add(100)


def test_a_kept_response_above_a_client_s_share_can_be_read_on_an_idle_proxy() -> None:
    bodies = HeldBodies(BodyLimits(uploads=8, memory_bytes=1000, body_bytes=100, small_bytes=10))
    for _ in range(2):
        with bodies.hold("a", "") as whole, bodies.hold("a", "") as another, bodies.hold("b", "") as other:
            whole.add_stored(2000)
            another.add_stored(10)
            with pytest.raises(TooManyRequests, match="500 bytes of stored responses that it reads"):
                another.add_stored(11)
            with pytest.raises(Unavailable, match="stored responses that clients read"):
                other.add_stored(11)
        assert bodies.total.large_bytes == 0
    with bodies.hold("a", "") as body, bodies.hold("b", "") as other:
        body.add(400)
        other.add_stored(600)
        assert bodies.total.large_bytes == 1000
    assert not bodies._clients


@pytest.mark.parametrize(
    ("caller", "address", "client"),
    [
        ("alice", "10.0.0.1", "alice"),
        ("", "10.0.0.1", "10.0.0.1"),
        ("", "::ffff:10.0.0.1", "10.0.0.1"),
        ("", "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("", "fe80::1%eth0", "fe80::/64"),
        ("", "", ""),
    ],
)
def test_a_client_is_its_key_or_else_its_address_or_network(caller: str, address: str, client: str) -> None:
    assert client_of(caller, address) == client
