"""Tests that nodes which lack cores because others compute there are found, and no others."""

from __future__ import annotations

import logging

import pytest

from pdserve.wire.discovery import ComputeCores, NodeInfo, Role
from pdserve_proxy.registry.discovery_server import crowded_with
from tests.proxy.cluster import eventually, node_info, registered
from tests.proxy.registry.test_discovery import listening


def node(name: str, cores: range, threads: int = 0, machine: str = "here") -> NodeInfo:
    return node_info(name, Role.DECODE, compute=ComputeCores(machine, tuple(cores), threads or len(cores)))


def found(newcomer: NodeInfo, *others: NodeInfo) -> tuple[str, ...]:
    shared = crowded_with(newcomer, others)
    return () if shared is None else shared.names


def test_two_engines_on_all_cores_share_them() -> None:
    shared = crowded_with(node("d0", range(64)), [node("p0", range(64))])
    assert str(shared).startswith("d0, p0 share 64 cores of one machine (0-63) and compute with 128 threads")


@pytest.mark.parametrize(
    "others",
    [
        [],
        [node("p0", range(2, 4))],
        [node("p0", range(2), machine="elsewhere")],
        [node_info("p0", Role.DECODE)],
        [node("d0", range(2))],
    ],
    ids=["alone", "own-cores", "another-machine", "on-a-gpu", "what-it-replaces"],
)
def test_an_engine_with_cores_of_its_own_shares_none(others: list[NodeInfo]) -> None:
    assert found(node("d0", range(2)), *others) == ()


def test_a_machine_without_a_name_is_nobodys_neighbour() -> None:
    assert found(node("d0", range(2), machine=""), node("p0", range(2), machine="")) == ()


def test_quotas_that_fit_into_the_cores_share_none() -> None:
    others = [node(f"p{index}", range(8), threads=2) for index in range(3)]
    assert found(node("d0", range(8), threads=2), *others) == ()
    assert found(node("d0", range(8), threads=3), *others) == ("d0", "p0", "p1", "p2")


def test_the_smallest_group_is_named_and_a_crowd_elsewhere_is_not() -> None:
    pinned, free = node("p0", range(2)), node("p1", range(16), threads=4)
    crowd = [node("p2", range(8, 10)), node("p3", range(8, 10))]
    assert found(node("d0", range(2)), pinned, free, *crowd) == ("d0", "p0")
    assert found(node("d0", range(2, 4)), pinned, free, *crowd) == ()
    assert found(node("d0", range(1, 3)), pinned, node("p4", range(2, 3))) == ("d0", "p4")
    assert found(node("d0", range(1, 3)), pinned, *crowd) == ("d0", "p0")
    around = [node("p0", range(2), threads=1), node("p4", range(2, 4), threads=1)]
    assert found(node("d0", range(1, 3)), *around) == ()
    assert found(node("d0", range(1, 3), threads=3), *around) == ("d0", "p0")


def test_many_names_and_ranges_are_cut_short() -> None:
    scattered = range(0, 60, 2)
    text = str(crowded_with(node("d0", scattered), [node(f"p{index:02}", scattered) for index in range(20)]))
    assert "p06 and 13 more share" in text
    assert "(0,2,4,6,8,10,12,14…)" in text


async def test_the_proxy_warns_of_engines_that_share_cores(caplog: pytest.LogCaptureFixture) -> None:
    alone, other = node("d0", range(2)), node("p0", range(2))
    with caplog.at_level(logging.WARNING):
        async with listening() as ear, registered(alone, ear.control):
            await eventually(lambda: ear.names() == ["d0"], "the first registration")
            assert not caplog.records
            async with registered(other, ear.control):
                await eventually(lambda: len(ear.names()) == 2, "the second registration")
    (record,) = caplog.records
    assert record.getMessage().startswith("d0, p0 share 2 cores of one machine (0-1) and compute with 4 threads")
