"""The wire changes one byte of what a receiver gets, whatever TCP sends again."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

from tests.eventually import eventually
from tests.hosts.namespaces import Host, network
from tests.hosts.wire import Corruption, segment_of

PORT, SPARED = 7000, 7001
TIMEOUT_S = 30.0
FULL = 1_400
SOME, MANY = 6_000, 200_000
"""The first two sends are in flight together before the receiver has to say anything."""


def joined(source: Host, target: Host, port: int) -> tuple[socket.socket, socket.socket]:
    """Returns the ends of a connection."""
    with target.inside():
        listening = socket.create_server((target.address, port))
    with listening, source.inside(), ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listening.accept)
        ends = socket.create_connection((target.address, port)), accepted.result(TIMEOUT_S)[0]
    for end in ends:
        end.settimeout(TIMEOUT_S)
    return ends


def sent(end: socket.socket, other: socket.socket, size: int) -> list[int]:
    """Sends random bytes, and returns where those differ that arrive."""
    data, received = os.urandom(size), bytearray()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(end.sendall, data)
        while len(received) < size:
            received += other.recv(size)
        sending.result(TIMEOUT_S)
    return [at for at, (one, two) in enumerate(zip(data, received, strict=True)) if one != two]


def test_a_byte_that_is_sent_again_is_not_the_one_that_changes(possible: None) -> None:
    with network("a", "b") as both:
        a, b = both.hosts.values()
        there, back = both.wire.between("a", "b")
        (end, other), (spared, spared_other) = joined(a, b, PORT), joined(a, b, SPARED)
        with end, other, spared, spared_other:
            assert sent(end, other, SOME) == []
            # The receiver has these bytes, but its word of it is lost, so they come once more.
            back.cut = True
            assert sent(end, other, SOME) == []
            corruption, passed = there.corrupt(spared=[SPARED]), there.passed
            eventually(lambda: there.passed > passed + FULL, "the bytes are sent again")
            assert not corruption.done
            back.cut = False
            assert sent(spared, spared_other, MANY) == []
            assert len(sent(end, other, MANY)) == 1
            assert sent(end, other, MANY) == []


def frame(number: int, data: bytes, ports: tuple[int, int] = (1, 2)) -> bytes:
    """Returns a frame of a TCP stream as the wire gets it."""
    tcp = b"".join(port.to_bytes(2) for port in ports) + number.to_bytes(4) + bytes(4) + bytes([5 << 4, 16]) + bytes(6)
    ip = bytes([0x45, 0]) + (40 + len(data)).to_bytes(2) + bytes(5) + bytes([6]) + bytes(10)
    return bytes(10) + bytes(12) + b"\x08\x00" + ip + tcp + data


def test_the_changed_byte_is_the_same_in_every_frame_that_has_it() -> None:
    corruption = Corruption(())

    def arrives(number: int, size: int, *, is_new: bool, ports: tuple[int, int] = (1, 2)) -> list[int]:
        given = frame(number, bytes(size), ports)
        segment = segment_of(given)
        assert segment is not None
        data = corruption.applied(given, segment, is_new=is_new)[-size:]
        return [number + at for at in range(size) if data[at]]

    near_the_end = 2**32 - 500
    assert arrives(near_the_end, 2_000, is_new=False) == []
    assert arrives(near_the_end, 2_000, is_new=True) == [near_the_end + 1_000]
    assert arrives(near_the_end, 2_000, is_new=False) == [near_the_end + 1_000]
    # 2**32 + 500 is 500 in the stream's numbers.
    assert arrives(400, 200, is_new=False) == [500]
    assert arrives(501, 2_000, is_new=True) == []
    assert arrives(400, 200, is_new=True, ports=(1, 3)) == []


def test_what_is_no_tcp_is_left_alone() -> None:
    assert segment_of(bytes(100)) is None
    assert segment_of(frame(1, bytes(10))[:40]) is None
