"""Tests which connection a control frame came over when a new connection gets a former one's descriptor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from pdserve_kvtransfer.control.sockets import ControlBatch, ControlServer
from tests.eventually import eventually


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@contextmanager
def served(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[ControlServer]:
    server = ControlServer(context, "127.0.0.1", 0, "")
    try:
        yield server
    finally:
        server.close(0.0)


def client(context: zmq.Context[zmq.Socket[bytes]], server: ControlServer) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.connect(server.address)
    made.send(b"hello")
    return made


def with_frames(server: ControlServer) -> ControlBatch:
    return eventually(lambda: batch if (batch := server.receive()).frames else None)


def test_a_number_that_passed_to_a_newer_connection_is_not_gone(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """The server sees the end of the former connection together with the first frame of the newer one."""
    with served(context) as server, ExitStack() as stack:
        for _ in range(50):
            former = client(context, server)
            (first,) = with_frames(server).frames
            former.close(0)
            # The server has not read that end yet, nor the greeting of the next connection.
            assert server.sockets[1].poll(10_000)
            newer = stack.enter_context(client(context, server))
            assert server.sockets[0].poll(10_000)
            batch = server.receive()
            (second,) = batch.frames
            assert first.connection in batch.ended
            if second.connection == first.connection:
                assert batch.gone == []
                newer.close(0)
                gone = eventually(lambda: batch if (batch := server.receive()).gone else None)
                assert gone.gone == gone.ended == [second.connection]
                return
            assert batch.gone == [first.connection]
        pytest.fail("no number passed on")


def test_a_connection_that_ended_with_its_frame_is_gone(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with served(context) as server:
        only = client(context, server)
        assert server.sockets[0].poll(10_000)
        only.close(0)
        # The server's socket has reported that it was accepted and disconnected.
        eventually(lambda: server.sockets[1].poll(0))
        seen: list[ControlBatch] = []

        def over() -> bool:
            seen.append(server.receive())
            return bool(seen[-1].gone)

        eventually(over)
        frames = [received for batch in seen for received in batch.frames]
        assert [received.connection for received in frames] == seen[-1].gone
