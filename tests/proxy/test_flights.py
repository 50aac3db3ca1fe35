"""What is known of a node's load: its heartbeat, and what went there and ended since."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.wire.discovery import Heartbeat, Load, Register, Role
from pdserve_proxy.flights import Flight, Flights
from pdserve_proxy.registry import Registry
from tests.proxy.cluster import node_info

NODE = node_info("x", Role.MIXED)


SEND = st.tuples(st.just("send"), st.integers(1, 1024))
OTHERS = st.tuples(st.sampled_from(["end", "heartbeat"]), st.just(0))


@given(st.lists(SEND | OTHERS, max_size=40), st.integers(0, 5))
def test_with_heartbeats_that_tell_the_truth_the_load_is_exact(events: list[tuple[str, int]], others: int) -> None:
    """``others`` requests came from elsewhere and stay."""
    flights = Flights()
    registry = Registry(1.0, 3, watcher=flights)
    registry.handle(Register(NODE), 0.0)
    under_way: list[tuple[Flight, int]] = []
    heard = False
    for event, answers in events:
        match event:
            case "send":
                under_way.append((flights.begin((NODE, answers)), answers))
            case "end" if under_way:
                under_way.pop(0)[0].land_all()
            case "heartbeat":
                heard = True
                load = Load(running=sum(count for _, count in under_way), waiting=others)
                registry.handle(Heartbeat(NODE.boot_id, load), 0.0)
        known = flights.loads(registry.snapshot())(NODE)
        assert known == sum(count for _, count in under_way) + (others if heard else 0)


def test_what_landed_once_does_not_land_again() -> None:
    flights = Flights()
    registry = Registry(1.0, 3, watcher=flights)
    prefill = node_info("p", Role.PREFILL)
    for info in (NODE, prefill):
        registry.handle(Register(info), 0.0)
    load = flights.loads(registry.snapshot())
    flight, other = flights.begin((NODE, 5), (prefill, 2)), flights.begin((NODE, 1), (prefill, 1))
    flight.land(prefill.boot_id)
    flight.land(prefill.boot_id)
    assert (load(NODE), load(prefill)) == (6, 1)
    flight.land_all()
    flight.land_all()
    assert (load(NODE), load(prefill)) == (1, 1)
    other.land_all()
    assert (load(NODE), load(prefill)) == (0, 0)


def test_a_node_that_is_gone_leaves_nothing_behind() -> None:
    flights = Flights()
    registry = Registry(1.0, 3, watcher=flights)
    registry.handle(Register(NODE), 0.0)
    flight = flights.begin((NODE, 1))
    registry.handle(Heartbeat(NODE.boot_id, Load(running=1)), 0.0)
    registry.expire(100.0)
    flight.land_all()
    assert not flights._here
    assert not flights._reported
