"""Tests connections to the control channel that do not have the cluster secret."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import zmq

from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.transfer import Ping, Pong
from pdserve_kvtransfer.events import FetchLanded, FirstTokenArrived, PushCancelled, PushEnded, PushOutcome, PushWanted
from tests.endless_message import is_cut, many_parts, sends_without_end
from tests.eventually import eventually
from tests.kvtransfer.fakes import FakeDecode, prefill_request
from tests.kvtransfer.rig import WAIT_S, Pair, engine, pair

JUNK = b"\x96" + bytes(200)


@contextmanager
def stranger(control: str, route: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if route:
            socket.set(zmq.ROUTING_ID, route)
        socket.connect(control)
        yield socket


@contextmanager
def flood(control: str) -> Iterator[None]:
    """Sends junk as fast as the engine takes it, during the block."""
    over = threading.Event()

    def send() -> None:
        until = time.monotonic() + 3 * WAIT_S
        with stranger(control) as socket:
            socket.set(zmq.SNDTIMEO, 50)
            while not over.is_set() and time.monotonic() < until:
                try:
                    socket.send(JUNK)
                except zmq.Again:
                    continue

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def messages_of_many_parts(control: str) -> Iterator[None]:
    """Sends thirty messages a second during the block, each with a few more parts than are dropped at once."""
    over = threading.Event()

    def send() -> None:
        with ExitStack() as connections:
            while not over.wait(0.03):
                connections.enter_context(many_parts(int(control.rpartition(":")[2]), 2_500, timeout_s=WAIT_S))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def transfer_lands(rig: Pair) -> None:
    sent = rig.prefill.fill(0, 1)
    transfer_id = rig.fetch((2, 3))
    rig.prefill.next(PushWanted)
    rig.prefill.thread.push(transfer_id, 0, (0, 1))
    rig.prefill.thread.first_token(transfer_id, (SampledToken(1),), 0)
    rig.decode.next(FirstTokenArrived)
    rig.decode.next(FetchLanded)
    assert rig.prefill.next(PushEnded) == PushEnded(transfer_id, PushOutcome.DONE)
    assert rig.decode.read(2, 3) == sent


def test_a_flood_of_junk_does_not_keep_a_transfer_from_landing() -> None:
    with pair() as rig, ExitStack() as floods:
        for _ in range(2):
            floods.enter_context(flood(rig.prefill.address))
        eventually(lambda: rig.prefill.thread.stats().frames_dropped > 1_000)
        transfer_lands(rig)
        assert rig.prefill.thread.stats().leases_expired_sending == 0
        assert rig.decode.thread.stats().leases_expired_receiving == 0


def test_knowing_a_boot_id_does_not_give_its_frames() -> None:
    with pair() as rig, stranger(rig.prefill.address, rig.decode.boot_id) as early:
        transfer_lands(rig)
        with stranger(rig.prefill.address, rig.decode.boot_id) as late:
            for thief in (early, late):
                thief.send(JUNK)
            eventually(lambda: rig.prefill.thread.stats().frames_dropped >= 1)
            transfer_lands(rig)
            # Anything on its way to a thief was sent before this answer.
            with FakeDecode(rig.prefill.address) as other:
                other.greet()
                other.send(Ping(other.boot_id))
                other.next(Pong)
            assert not early.poll(100) and not late.poll(100)


def test_a_message_without_end_costs_its_sender_the_connection_and_nobody_else_anything() -> None:
    with pair() as rig:
        transfer_lands(rig)
        port = int(rig.prefill.address.rpartition(":")[2])
        assert not sends_without_end(port, 2**20, timeout_s=20.0)
        transfer_lands(rig)


def test_a_message_of_very_many_parts_costs_its_sender_the_connection_and_nobody_else_anything() -> None:
    with pair() as rig:
        transfer_lands(rig)
        port = int(rig.prefill.address.rpartition(":")[2])
        with many_parts(port, 600_000, timeout_s=20.0) as connection:
            transfer_lands(rig)
            assert is_cut(connection)


def test_messages_of_many_parts_do_not_keep_a_dead_decode_engine_alive() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as dead, messages_of_many_parts(prefill.address):
        dead.greet()
        dead.send(prefill_request(dead.boot_id))
        prefill.next(PushWanted)
        prefill.next(PushCancelled)
        assert prefill.thread.stats().leases_expired_sending == 1
