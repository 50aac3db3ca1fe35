"""Connections that fill the memory, over real sockets without ZMQ: it is the kernel that counts their bytes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pdserve.wire import connection_guard
from pdserve.wire.connection_guard import ConnectionGuard

LIMIT = 100_000


class Listener:
    def __init__(self, owned: ExitStack) -> None:
        self._owned = owned
        self._socket = owned.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._socket.getsockname()[1]
        self.guard = ConnectionGuard(LIMIT)

    def connected(self) -> tuple[socket.socket, socket.socket]:
        """A client, and this side's end, which is guarded."""
        client = self._owned.enter_context(socket.create_connection(("127.0.0.1", self.port), 5))
        here, _ = self._socket.accept()
        self._owned.enter_context(here)
        self.guard.accepted(here.fileno())
        return client, here

    def took(self, client: socket.socket, here: socket.socket, size: int) -> None:
        """``size`` bytes came, and lie in this process."""
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


def test_the_oldest_of_too_many_that_say_nothing_are_cut(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "MAX_SILENT", 2)
    peers = [listener.connected() for _ in range(5)]
    listener.guard.heard(peers[0][1].fileno())
    listener.guard.check(listener.port)
    assert [is_cut(client) for client, _ in peers] == [False, True, True, False, False]


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
