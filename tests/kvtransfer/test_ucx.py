"""What the UCX transport promises a link's owner."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.config import TransferConfig
from pdserve.errors import TransferError
from pdserve_kvtransfer.transport import Arrival, Completion
from pdserve_kvtransfer.ucx import UcxLink, UcxTransport, configured_ucx
from tests.kvtransfer.rig import WAIT_S

SIZE = 256 * 1024


class Two:
    def __init__(self, transport: UcxTransport) -> None:
        self.sender, self.receiver = transport.open_link(), transport.open_link()
        self.sender.connect([self.receiver.address])
        self.receiver.connect([self.sender.address])

    def arrival(self) -> Arrival:
        deadline = time.monotonic() + WAIT_S
        while (arrival := self.receiver.probe()) is None:
            assert time.monotonic() < deadline
            self.sender.progress()
            self.receiver.progress()
        return arrival

    def finish(self, *completions: Completion) -> None:
        deadline = time.monotonic() + WAIT_S
        while not all(completion.done() for completion in completions):
            assert time.monotonic() < deadline
            self.sender.progress()
            self.receiver.progress()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture(params=["", "tcp,self"], ids=["shared memory", "tcp"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    transport = UcxTransport(request.param)
    made = Two(transport)
    yield made
    made.close()
    transport.close()


def test_a_message_lands_in_the_given_memory_and_nowhere_else(two: Two) -> None:
    memory = bytearray(3 * SIZE)
    sent = two.sender.send(memoryview(b"s" * SIZE), 2**40 - 1, 2**24 - 1)
    arrival = two.arrival()
    assert (arrival.tag, arrival.index, arrival.length) == (2**40 - 1, 2**24 - 1, SIZE)
    received = two.receiver.receive(arrival, memoryview(memory)[SIZE : 2 * SIZE])
    two.finish(sent, received)
    assert not sent.failed() and not received.failed()
    assert memory == bytes(SIZE) + b"s" * SIZE + bytes(SIZE)


def test_closing_the_receiver_ends_what_it_accepted(two: Two) -> None:
    memory = bytearray(SIZE)
    two.sender.send(memoryview(b"s" * SIZE), 1, 0)
    two.receiver.receive(two.arrival(), memoryview(memory))
    two.receiver.close()
    before = bytes(memory)
    for _ in range(1_000):
        two.sender.progress()
    assert memory == before


def test_closing_the_sender_ends_what_it_sends(two: Two) -> None:
    source = bytearray(b"s" * SIZE)
    memory = bytearray(SIZE)
    two.sender.send(memoryview(source), 1, 0)
    arrival = two.arrival()
    two.sender.close()
    source[:] = b"r" * SIZE
    received = two.receiver.receive(arrival, memoryview(memory))
    for _ in range(1_000):
        two.receiver.progress()
    assert b"r" not in memory, "memory was read after the link was closed"
    assert not received.done() or received.failed()


def test_closing_twice_is_closing_once(two: Two) -> None:
    two.close()
    two.close()


def test_an_armed_link_wakes_its_owner(two: Two) -> None:
    two.finish(two.sender.send(memoryview(b"x"), 1, 0), two.receiver.receive(two.arrival(), memoryview(bytearray(1))))
    assert settled(two.receiver)
    two.sender.send(memoryview(b"x"), 1, 1)
    two.sender.progress()
    ready, _, _ = select.select([two.receiver.fileno()], [], [], WAIT_S)
    assert ready
    assert two.arrival().index == 1


def settled(link: UcxLink) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not link.arm():
        assert time.monotonic() < deadline
        link.progress()
    return True


def test_a_link_is_broken_once_tcp_says_so() -> None:
    transport = UcxTransport("tcp,self")
    two = Two(transport)
    two.finish(two.sender.send(memoryview(b"x"), 1, 0), two.receiver.receive(two.arrival(), memoryview(bytearray(1))))
    assert not two.receiver.broken()
    two.sender.close()
    deadline = time.monotonic() + WAIT_S
    while not two.receiver.broken():
        assert time.monotonic() < deadline
        two.receiver.progress()
    two.close()
    transport.close()


def test_transports_that_do_not_exist() -> None:
    with pytest.raises(TransferError, match="no_such_transport"):
        UcxTransport("no_such_transport").open_link()


def listening() -> set[tuple[str, int]]:
    """IPv4 addresses and ports that this process listens on."""
    mine = {link for fd in Path("/proc/self/fd").iterdir() if (link := _target(fd)).startswith("socket:")}
    rows = (line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:])
    ends = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    return {(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in ends}


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:
        return ""


def test_blocks_use_the_devices_and_ports_of_the_settings() -> None:
    before = listening()
    config = TransferConfig(ucx_tls="tcp", ucx_net_devices="lo", ucx_tcp_ports="42310-42329")
    transport = configured_ucx(config)
    two = Two(transport)
    try:
        found = listening() - before
        assert len(found) == 2
        assert all(host == "127.0.0.1" and 42310 <= port <= 42329 for host, port in found)
        sent = two.sender.send(memoryview(b"x"), 1, 0)
        two.finish(sent, two.receiver.receive(two.arrival(), memoryview(bytearray(1))))
    finally:
        two.close()
        transport.close()


def test_a_range_with_no_port_left_is_told() -> None:
    transport = UcxTransport("tcp", "lo", "42330-42330")
    link = transport.open_link()
    try:
        with pytest.raises(TransferError, match="cannot make a worker"):
            transport.open_link()
    finally:
        link.close()
        transport.close()
