"""Names of proxies are looked up in a thread, and followed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdserve.api.node.proxy_link import MAX_PROXIES, ProxyNames, addresses_of, is_name, look_up

WAIT_S = 30.0


class Directory:
    """Answers look-ups as the test says, and counts them."""

    def __init__(self, **addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self.asked = threading.Semaphore(0)

    def __call__(self, host: str) -> tuple[str, ...]:
        self.asked.release()
        if host not in self.addresses:
            raise OSError(f"no such host: {host}")
        return self.addresses[host]

    def wait_for_two_look_ups(self) -> None:
        """Returns when what was known before has been told."""
        for _ in range(2):
            assert self.asked.acquire(timeout=WAIT_S)


@contextmanager
def following(directory: Directory, *proxies: str) -> Iterator[tuple[ProxyNames, queue.Queue[tuple[str, ...]]]]:
    told: queue.Queue[tuple[str, ...]] = queue.Queue()
    names = ProxyNames(proxies, 0.01, told.put, directory)
    names.start()
    try:
        yield names, told
    finally:
        names.stop()


def test_addresses_that_come_and_go_are_told() -> None:
    directory = Directory(proxies=("10.0.0.1", "10.0.0.2"))
    with following(directory, "tcp://proxies:81", "tcp://10.0.0.9:82") as (_, told):
        fixed = "tcp://10.0.0.9:82"
        assert told.get(timeout=WAIT_S) == ("tcp://10.0.0.1:81", "tcp://10.0.0.2:81", fixed)
        directory.addresses["proxies"] = ("10.0.0.2", "fd00::3")
        assert told.get(timeout=WAIT_S) == ("tcp://10.0.0.2:81", "tcp://[fd00::3]:81", fixed)
        directory.wait_for_two_look_ups()
        assert told.empty(), "what has not changed is told once"


def test_a_name_that_cannot_be_looked_up_keeps_its_addresses(caplog: pytest.LogCaptureFixture) -> None:
    directory = Directory(proxies=("10.0.0.1",))
    with following(directory, "tcp://proxies:81") as (names, told):
        assert told.get(timeout=WAIT_S) == ("tcp://10.0.0.1:81",)
        assert not names.failures
        del directory.addresses["proxies"]
        directory.asked = threading.Semaphore(0)
        for _ in range(3):
            assert directory.asked.acquire(timeout=WAIT_S)
        assert told.empty()
        assert names.failures == ("tcp://proxies:81 has no address: no such host: proxies",)
        assert len(caplog.records) == 1, "one warning for all failures in a row"
        directory.addresses["proxies"] = ("10.0.0.2",)
        assert told.get(timeout=WAIT_S) == ("tcp://10.0.0.2:81",)
        assert not names.failures


def test_a_name_with_more_addresses_than_a_node_takes_is_cut() -> None:
    many = tuple(f"10.0.1.{number}" for number in range(MAX_PROXIES + 5))
    with following(Directory(proxies=many), "tcp://proxies:81") as (_, told):
        assert told.get(timeout=WAIT_S) == tuple(f"tcp://{address}:81" for address in many[:MAX_PROXIES])


def test_an_address_behind_two_names_is_one_proxy() -> None:
    found = {"tcp://a:1": ("tcp://10.0.0.1:1",), "tcp://b:1": ("tcp://10.0.0.1:1", "tcp://10.0.0.2:1")}
    assert addresses_of(("tcp://a:1", "tcp://b:1"), found) == ("tcp://10.0.0.1:1", "tcp://10.0.0.2:1")


@pytest.mark.parametrize(
    ("proxy", "named"),
    [
        ("tcp://10.0.0.1:81", False),
        ("tcp://[::1]:81", False),
        ("tcp://[fe80::1%eth0]:81", False),
        ("tcp://localhost:81", True),
        ("tcp://pdserve-control.llm.svc:81", True),
        ("nonsense", False),
    ],
)
def test_names_are_told_from_addresses(proxy: str, named: bool) -> None:
    assert is_name(proxy) is named


def test_the_system_looks_up_a_name() -> None:
    assert look_up("localhost") in {("127.0.0.1",), ("::1",)}
    with pytest.raises(OSError):
        look_up("no-such-host.invalid")
