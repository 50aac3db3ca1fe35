"""How many bodies may be on their way, and what all of them may take: nobody's share is anybody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import TooManyRequests, Unavailable
from pdserve_proxy.held_bodies import CLIENTS, BodyLimits, HeldBodies, HeldBody, client_of

EVENTS = st.lists(
    st.tuples(st.sampled_from(["arrive", "whole"]), st.sampled_from("abcdef"))
    | st.tuples(st.just("add"), st.integers(0, 400))
    | st.tuples(st.sampled_from(["arrived", "close"]), st.integers(0, 30)),
    max_size=80,
)


@given(EVENTS, st.integers(1, 9), st.integers(0, 1000), st.integers(1, 200))
def test_limits_hold_and_nothing_is_left(
    events: list[tuple[str, str | int]], uploads: int, memory: int, body_bytes: int
) -> None:
    bodies = HeldBodies(BodyLimits(uploads, memory, body_bytes))
    all_bytes = max(memory, 2 * body_bytes)
    open_bodies: list[HeldBody] = []
    sizes: dict[HeldBody, int] = {}
    client: dict[HeldBody, str] = {}
    for number, (event, which) in enumerate(events):
        if event in ("arrive", "whole"):
            body = bodies.hold().__enter__()
            if event == "arrive":
                mine = list(client.values()).count(str(which))
                try:
                    body.arrive(str(which))
                except TooManyRequests:
                    assert mine == -(-uploads // CLIENTS)
                    continue
                except Unavailable:
                    assert len(client) == uploads
                    continue
                client[body] = str(which)
            open_bodies.append(body)
            sizes[body] = 0
        elif open_bodies:
            body = open_bodies[number % len(open_bodies)]
            if event == "add":
                try:
                    body.add(int(which))
                except (TooManyRequests, Unavailable):
                    assert sum(sizes.values()) + int(which) > all_bytes // 2 // CLIENTS
                else:
                    sizes[body] += int(which)
            else:
                body.arrived()
                client.pop(body, None)
                if event == "close":
                    body.__exit__(None, None, None)
                    open_bodies.remove(body)
                    del sizes[body]
        assert bodies.arriving == len(client) <= uploads
        assert bodies.held_bytes == sum(sizes.values()) <= all_bytes
        assert sum(sizes[body] for body in client) <= all_bytes // 2
        for name in set(client.values()):
            mine = sum(sizes[body] for body, of in client.items() if of == name)
            assert mine <= max(all_bytes // 2 // CLIENTS, body_bytes)
    for body in open_bodies:
        body.__exit__(None, None, None)
    assert (bodies.arriving, bodies.held_bytes) == (0, 0)
    assert not bodies._clients


def test_the_largest_body_can_always_arrive_beside_as_many_bytes_of_whole_ones() -> None:
    bodies = HeldBodies(BodyLimits(uploads=1, memory_bytes=1, body_bytes=100))
    with bodies.hold() as whole, bodies.hold() as body:
        whole.add(100)
        body.arrive("a")
        body.add(100)
        with pytest.raises(Unavailable):
            whole.add(1)


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
