"""Tests the host's own addresses, and routes as the kernel gives them."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from pdserve.config import TransferConfig
from pdserve.doctor.finding import Verdict
from pdserve.doctor.network import (
    ListenFacts,
    RouteFacts,
    check_listening,
    check_routes,
    host_of,
    read_listening,
    read_route,
)

LOCAL = ListenFacts("127.0.0.1", 0, "", False, "127.0.0.1", ("127.0.0.1",), False)
RACK = ListenFacts("0.0.0.0", 8200, "", False, "node-7", ("10.0.0.7",), False)
ROUTE = RouteFacts("node-7", "10.0.0.7", "10.0.0.8", "eth0", 9000, 100_000)


def test_loopback_is_fine_on_one_machine() -> None:
    assert {found.verdict for found in check_listening(LOCAL, peers_beyond=False)} == {Verdict.OK}
    assert {found.verdict for found in check_listening(RACK, peers_beyond=True)} == {Verdict.OK}


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "advice"),
    [
        (LOCAL, "advertised address", Verdict.WARNING, "--transfer-host 0.0.0.0"),
        (replace(RACK, addresses=("0.0.0.0",)), "advertised address", Verdict.WARNING, "--transfer-advertise"),
        (replace(RACK, addresses=()), "advertised address", Verdict.PROBLEM, "--transfer-advertise"),
        (replace(RACK, bind_error="Address already in use", in_use=True), "transfer port", Verdict.WARNING, "another"),
        (replace(RACK, bind_error="cannot assign"), "transfer port", Verdict.PROBLEM, "--transfer-host"),
    ],
    ids=["loopback", "any", "unknown", "taken", "foreign"],
)
def test_what_peers_could_not_reach(facts: ListenFacts, check: str, verdict: Verdict, advice: str) -> None:
    (found,) = [found for found in check_listening(facts, peers_beyond=True) if found.check == check]
    assert found.verdict is verdict
    assert advice in found.advice


def test_a_decode_node_needs_no_address_of_its_own() -> None:
    facts = read_listening(TransferConfig())
    assert facts.unset and not read_listening(TransferConfig(advertise="localhost")).unset
    verdicts = [found.verdict for found in check_listening(facts, peers_beyond=True)]
    assert verdicts == [Verdict.OK, Verdict.NOT_APPLICABLE]


def test_a_taken_port_and_a_foreign_address_are_noticed() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert read_listening(TransferConfig(port=port)).in_use
    free = read_listening(TransferConfig(port=0))
    assert not free.in_use and not free.bind_error and free.addresses == ("127.0.0.1",)
    foreign = read_listening(TransferConfig(host="203.0.113.9"))
    assert foreign.bind_error and not foreign.in_use
    assert read_listening(TransferConfig(advertise="no-such-host.invalid")).addresses == ()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_route_to_this_machine(address: str) -> None:
    route = read_route(address)
    assert route.interface == "lo" and route.mtu > 1500
    assert check_routes([route])[0].verdict is Verdict.OK


@pytest.mark.parametrize(
    ("route", "verdict", "text"),
    [
        (ROUTE, Verdict.OK, "10.0.0.7 from 10.0.0.8 over eth0, MTU 9000, 100 Gbit/s"),
        (replace(ROUTE, mtu=1500), Verdict.WARNING, "MTU 1500"),
        (replace(ROUTE, mtu=1500, mbit_per_s=1000), Verdict.OK, "1 Gbit/s"),
        (replace(ROUTE, mbit_per_s=0, interface=""), Verdict.OK, "an unnamed device"),
        (replace(ROUTE, address=""), Verdict.PROBLEM, "none"),
    ],
)
def test_routes(route: RouteFacts, verdict: Verdict, text: str) -> None:
    (found,) = check_routes([route])
    assert found.verdict is verdict
    assert text in found.seen


def test_an_unknown_name_and_no_peer() -> None:
    assert check_routes([read_route("no-such-host.invalid")])[0].verdict is Verdict.PROBLEM
    assert check_routes([])[0].verdict is Verdict.NOT_APPLICABLE
    assert host_of("tcp://[::1]:8200") == "::1"
