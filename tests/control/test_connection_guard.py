"""Tests connections that fill the memory, over real sockets without ZMQ, because the kernel counts their bytes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from pdserve.control import connection_guard
from pdserve.control.connection_guard import ConnectionGuard, MessageReader
from tests.eventually import eventually

LIMIT = 100_000


class Listener:
    def __init__(self, owned: ExitStack) -> None:
        self._owned = owned
        self._socket = owned.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._socket.getsockname()[1]
        self.guard = ConnectionGuard(LIMIT)

    def connected(self) -> tuple[socket.socket, socket.socket]:
        """Returns a client's socket, and this side's socket, which is guarded."""
        client = self._owned.enter_context(socket.create_connection(("127.0.0.1", self.port), 5))
        here, _ = self._socket.accept()
        self._owned.enter_context(here)
        self.guard.accepted(here.fileno())
        return client, here

    def took(self, client: socket.socket, here: socket.socket, size: int) -> None:
        """Sends ``size`` bytes and reads them, so that they are in this process."""
        client.sendall(bytes(size))
        while size:
            size -= len(here.recv(size))


@pytest.fixture
def listener() -> Iterator[Listener]:
    with ExitStack() as owned:
        yield Listener(owned)


def is_cut(client: socket.socket) -> bool:
    client.settimeout(0.05)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_connection_with_more_waiting_than_it_may_is_cut(listener: Listener) -> None:
    bad, good = listener.connected(), listener.connected()
    listener.took(*bad, LIMIT + 1)
    listener.took(*good, LIMIT - 1)
    listener.guard.check(listener.port)
    assert is_cut(bad[0]) and not is_cut(good[0])


def test_what_belongs_to_messages_does_not_count(listener: Listener) -> None:
    client, here = listener.connected()
    for _ in range(5):
        listener.took(client, here, LIMIT)
        listener.guard.heard(here.fileno())
        listener.guard.check(listener.port)
    assert not is_cut(client)


def test_many_connections_may_not_do_together_what_one_may_not(listener: Listener) -> None:
    many = [listener.connected() for _ in range(connection_guard.TOTAL + 3)]
    for client, here in many:
        listener.took(client, here, LIMIT)
    listener.guard.check(listener.port)
    assert sum(is_cut(client) for client, _ in many) == 3


def test_the_oldest_of_too_many_strangers_are_cut(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "MAX_STRANGERS", 2)
    peers = [listener.connected() for _ in range(5)]
    listener.guard.trusted(peers[0][1].fileno())
    # Junk does not make a connection known.
    listener.guard.heard(peers[1][1].fileno())
    listener.guard.check(listener.port)
    assert [is_cut(client) for client, _ in peers] == [False, True, True, False, False]


def test_a_stranger_that_sends_message_after_message_is_cut(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_guard, "MAX_STRANGER_BYTES", 3 * LIMIT)
    peers = [listener.connected() for _ in range(2)]
    listener.guard.trusted(peers[0][1].fileno())
    for _ in range(4):
        for client, here in peers:
            listener.took(client, here, LIMIT)
            listener.guard.heard(here.fileno())
        listener.guard.check(listener.port)
    assert [is_cut(client) for client, _ in peers] == [False, True]


def test_news_of_a_connection_may_come_after_its_first_frame(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_guard, "MAX_STRANGERS", 0)
    client, here = listener.connected()
    listener.guard.trusted(here.fileno())
    listener.guard.accepted(here.fileno())
    listener.guard.check(listener.port)
    assert not is_cut(client)


@pytest.mark.parametrize("make", [lambda: os.eventfd(0), lambda: socket.socket(socket.AF_UNIX).detach()])
def test_a_descriptor_that_became_something_else_is_left_alone(listener: Listener, make: Callable[[], int]) -> None:
    _, here = listener.connected()
    number, other = here.detach(), make()
    try:
        os.dup2(other, number)
        before = len(os.listdir("/proc/self/fd"))
        listener.guard.check(listener.port)
        assert not listener.guard.watching
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(number)
        os.close(other)


def test_a_message_of_many_parts_is_dropped_a_few_at_a_time() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send_multipart([b""] * 2_500)
        dealer.send(b"good")
        reader = MessageReader(router)
        bad = eventually(reader.read)
        assert (bad.frame, reader.dropping) == (b"", True)
        good, looks = None, 0
        while reader.dropping:
            assert good is None
            good = reader.read()
            looks += 1
        assert looks == 3
        good = good or eventually(reader.read)
        assert good.frame == b"good"
        assert reader.read() is None and not reader.dropping


def test_a_descriptor_that_became_another_connection_is_left_alone(listener: Listener) -> None:
    _, here = listener.connected()
    with socket.create_server(("127.0.0.1", 0)) as other:
        elsewhere = socket.create_connection(other.getsockname(), 5)
        accepted, _ = other.accept()
        with elsewhere, accepted:
            number = here.detach()
            try:
                os.dup2(accepted.fileno(), number)
                listener.took(elsewhere, accepted, 2 * LIMIT)
                listener.guard.check(listener.port)
                assert not listener.guard.watching
                assert not is_cut(elsewhere)
            finally:
                os.close(number)
