"""Tests the name server's answers, and which names Services make."""

from __future__ import annotations

import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from lab.deploy_containers.stand_in.made_manifests import a_service
from lab.deploy_containers.stand_in.names import answer
from lab.deploy_containers.stand_in.packet_rules import Balancer, Endpoint
from lab.deploy_containers.stand_in.services import Backend, balancers, records
from tests.examples import examples

NAME = "web.shop.svc.cluster.local"
READY = Backend(Endpoint("web-0", "10.0.0.1", "shop", {"app": "web"}, {"http": 8000}), ready=True)
NOT_READY = Backend(Endpoint("web-1", "10.0.0.2", "shop", {"app": "web"}, {"http": 8001}), ready=False)
OTHERS = [
    Backend(Endpoint("db-0", "10.0.0.3", "shop", {"app": "db"}), ready=True),
    Backend(Endpoint("web-2", "10.0.0.4", "elsewhere", {"app": "web"}, {"http": 8000}), ready=True),
]
BACKENDS = [READY, NOT_READY, *OTHERS]


def query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!HHHHHH", 77, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)


def status_and_addresses(response: bytes | None) -> tuple[int, list[str]]:
    assert response is not None and response[:2] == struct.pack("!H", 77)
    flags, _, count = struct.unpack_from("!HHH", response, 2)
    addresses = [".".join(map(str, response[len(response) - 16 * i - 4 :][:4])) for i in reversed(range(count))]
    return flags & 0xF, addresses


def test_a_name_has_all_its_addresses() -> None:
    found = {NAME: ["10.0.0.1", "10.0.0.2"]}
    assert status_and_addresses(answer(query(NAME.upper()), found)) == (0, ["10.0.0.1", "10.0.0.2"])


def test_a_name_without_an_address_of_that_kind_exists_and_an_unknown_one_does_not() -> None:
    found = {NAME: ["10.0.0.1"]}
    assert status_and_addresses(answer(query(NAME, kind=28), found)) == (0, [])
    assert status_and_addresses(answer(query(f"{NAME}.shop.svc.cluster.local"), found)) == (3, [])


@given(data=st.binary(max_size=64))
@settings(max_examples=examples(100))
def test_whatever_arrives_is_answered_or_dropped(data: bytes) -> None:
    response = answer(data, {NAME: ["10.0.0.1"]})
    assert response is None or response[:2] == data[:2]


def test_a_headless_service_gives_out_the_pods_that_are_ready_or_all() -> None:
    headless = a_service(clusterIP="None")
    assert records([headless], {}, BACKENDS) == {NAME: ["10.0.0.1"], f"web-0.{NAME}": ["10.0.0.1"]}
    every = a_service(clusterIP="None", publishNotReadyAddresses=True)
    assert records([every], {}, BACKENDS)[NAME] == ["10.0.0.1", "10.0.0.2"]
    assert records([headless], {}, [NOT_READY]) == {}


def test_a_service_with_an_address_leads_to_the_ready_pods_ports() -> None:
    made = a_service()
    addresses = {"web": "10.96.0.10"}
    assert records([made], addresses, BACKENDS) == {NAME: ["10.96.0.10"]}
    assert balancers([made], addresses, BACKENDS) == [Balancer("10.96.0.10", 80, [("10.0.0.1", 8000)])]
    assert balancers([made], addresses, [NOT_READY]) == [Balancer("10.96.0.10", 80, [])]
    assert balancers([a_service(clusterIP="None")], addresses, BACKENDS) == []
