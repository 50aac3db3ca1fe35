"""What the UCX transport promises a link's owner."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

import pytest

from pdserve.errors import TransferError
from pdserve_kvtransfer.transport import Arrival, Completion
from pdserve_kvtransfer.ucx import UcxLink, UcxTransport
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
