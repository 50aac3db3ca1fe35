"""Tests what the UCX transport promises to a link's owner."""

from __future__ import annotations

import gc
import os
import random
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from pdserve.config import TransferConfig, UcxCalls
from pdserve.errors import PeerLost, TransferError
from pdserve.settings import cache_folder
from pdserve.wire.transfer import LABEL_BITS, LinkAddress
from pdserve_kvtransfer.configuration import bound_to_loopback, chosen_poster, configured_ucx
from pdserve_kvtransfer.region import SharedMemory
from pdserve_kvtransfer.transport import DISCARD, ArrivedMessage, MovedMessage
from pdserve_kvtransfer.ucx.ucx_transport import MakePoster, UcxLink, UcxTransport, allowed_transports
from pdserve_kvtransfer.ucx.ucxx_poster import UcxxPoster
from tests.kvtransfer.rig import WAIT_S

SIZE = 256 * 1024


def by_label(moved: MovedMessage) -> int:
    return moved.label


class Two:
    """Two links with memories of their own. The receiver may have mapped a ``shared`` memory of the sender's."""

    def __init__(
        self, transport: UcxTransport, size: int = 4 * SIZE, shared: bool = False, memory: bytearray | None = None
    ) -> None:
        self.memory = bytearray(size) if memory is None else memory
        self.shared = SharedMemory(size) if shared else None
        self.source = memoryview(bytearray(size)) if self.shared is None else self.shared.bytes
        self.sender = transport.open_link(self.shared or self.source)
        self.receiver = transport.open_link(memoryview(self.memory))
        self.sender.connect([self.receiver.address])
        self.receiver.connect([self.sender.address])
        self.sent: list[MovedMessage] = []
        self.landed: list[MovedMessage] = []

    def attach(self) -> None:
        """Waits until the sender knows that the receiver has mapped its memory."""
        deadline = time.monotonic() + WAIT_S
        while not self.sender.poster.attached:
            assert time.monotonic() < deadline
            self.turn()

    def arrivals(self, count: int = 1) -> list[ArrivedMessage]:
        found: list[ArrivedMessage] = []
        deadline = time.monotonic() + WAIT_S
        while len(found) < count:
            assert time.monotonic() < deadline
            self.turn()
            found += self.receiver.arrivals()
        return found

    def turn(self) -> None:
        self.sender.progress()
        self.receiver.progress()
        self.sent += self.sender.sent()
        self.landed += self.receiver.landed()

    def finish(self, sent: int, landed: int) -> None:
        """Waits until this many blocks have been sent and have landed in all."""
        deadline = time.monotonic() + WAIT_S
        while (len(self.sent), len(self.landed)) != (sent, landed):
            assert time.monotonic() < deadline
            self.turn()

    def pass_one(self, label: int) -> None:
        """Passes one block from the start of one memory to the start of the other."""
        sent, landed = len(self.sent) + 1, len(self.landed) + 1
        self.sender.send([0], 1, [label])
        self.arrivals()
        self.receiver.receive([0])
        self.finish(sent, landed)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture(params=["compiled", "python"])
def poster(request: pytest.FixtureRequest) -> MakePoster:
    return chosen_poster(UcxCalls(request.param), cache_folder(os.environ))


@pytest.fixture(params=["shared memory", "tcp", "mapped"])
def two(request: pytest.FixtureRequest, poster: MakePoster) -> Iterator[Two]:
    """Yields two links, mapped where posters can do that. ``UcxxPoster`` treats mapped memory like any other."""
    transport = UcxTransport("tcp,self" if request.param == "tcp" else "", make_poster=poster)
    made = Two(transport, shared=request.param == "mapped")
    if made.shared is not None and poster is not UcxxPoster:
        made.attach()
    yield made
    made.close()
    transport.close()


def test_messages_land_in_their_places_and_nowhere_else(two: Two) -> None:
    two.source[:] = b"0" * SIZE + b"1" * SIZE + b"2" * SIZE + b"3" * SIZE
    labels = [2**LABEL_BITS - 1, 7]
    two.sender.send([3 * SIZE, SIZE], SIZE, labels)
    assert two.arrivals(2) == [ArrivedMessage(label, SIZE) for label in labels]
    two.receiver.receive([SIZE, 2 * SIZE])
    two.finish(2, 2)
    assert two.memory == bytes(SIZE) + b"3" * SIZE + b"1" * SIZE + bytes(SIZE)
    assert sorted(two.sent, key=by_label) == [MovedMessage(7, SIZE, SIZE), MovedMessage(labels[0], 3 * SIZE, SIZE)]
    assert sorted(two.landed, key=by_label) == [MovedMessage(7, 2 * SIZE, SIZE), MovedMessage(labels[0], SIZE, SIZE)]


def test_what_is_discarded_is_sent_and_lands_nowhere(two: Two) -> None:
    two.source[:] = b"s" * len(two.source)
    two.sender.send([0, SIZE, 0], SIZE, [1, 2, 3])
    two.sender.send([0], 0, [4])
    assert len(two.arrivals(4)) == 4
    two.receiver.receive([DISCARD, 0, DISCARD, DISCARD])
    two.finish(4, 1)
    assert two.landed == [MovedMessage(2, 0, SIZE)]
    assert two.memory == b"s" * SIZE + bytes(3 * SIZE)


def test_what_is_over_waits_until_it_is_taken(two: Two) -> None:
    two.sender.send([0, 1], 1, [1, 2])
    two.arrivals(2)
    two.receiver.receive([0, 1])
    for _ in range(1_000):
        two.sender.progress()
        two.receiver.progress()
    assert {moved.label for moved in two.sent + list(two.sender.sent())} == {1, 2}
    assert {moved.label for moved in two.landed + list(two.receiver.landed())} == {1, 2}
    assert not two.sender.sent()
    assert not two.receiver.landed()


def test_more_messages_than_one_look_shows(two: Two) -> None:
    count = 700
    for at in range(count):
        two.source[at] = at % 251
    two.sender.send(list(range(count)), 1, list(range(count)))
    received = 0
    deadline = time.monotonic() + WAIT_S
    while received < count:
        assert time.monotonic() < deadline
        two.turn()
        arrivals = two.receiver.arrivals()
        if arrivals:
            two.receiver.receive([arrival.label for arrival in arrivals])
            received += len(arrivals)
    two.finish(count, count)
    assert two.memory == two.source
    assert {moved.label for moved in two.landed} == set(range(count))


@pytest.mark.parametrize("place", [-2, 3 * SIZE + 1, 4 * SIZE, 2**63, 2**64 - 3])
def test_nothing_outside_of_the_memory_is_touched(two: Two, place: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        two.sender.send([0, place], SIZE, [1, 2])
    two.sender.send([0], SIZE, [1])
    two.arrivals()
    with pytest.raises(ValueError, match="outside"):
        two.receiver.receive([place])
    assert two.memory == bytes(4 * SIZE)


def test_closing_the_receiver_ends_what_it_accepted(two: Two) -> None:
    two.source[:] = b"s" * len(two.source)
    two.sender.send([0], SIZE, [1])
    two.arrivals()
    two.receiver.receive([0])
    two.receiver.close()
    before = bytes(two.memory)
    with suppress(PeerLost):
        for _ in range(1_000):
            two.sender.progress()
    assert two.memory == before


def test_closing_the_sender_ends_what_it_sends(two: Two) -> None:
    two.source[:SIZE] = b"s" * SIZE
    two.sender.send([0], SIZE, [1])
    two.arrivals()
    two.sender.close()
    two.source[:SIZE] = b"r" * SIZE
    two.receiver.receive([0])
    landed: list[MovedMessage] = []
    with suppress(PeerLost):
        for _ in range(1_000):
            two.receiver.progress()
            landed += two.receiver.landed()
    assert b"r" not in two.memory, "memory was read after the link was closed"
    assert not landed


def test_a_closed_link_keeps_no_memory(poster: MakePoster) -> None:
    """What it was still sending, for which its worker is destroyed by force, keeps none either."""
    transport = UcxTransport("", make_poster=poster)
    two = Two(transport, shared=True)
    assert two.shared is not None and (offer := two.shared.offer()) is not None
    two.sender.send([0] * 64, SIZE, range(64))
    two.sender.progress()
    assert offer.name in Path("/proc/self/maps").read_text()
    two.close()
    transport.close()
    del two
    gc.collect()
    assert offer.name not in Path("/proc/self/maps").read_text()


def test_a_link_that_ends_in_the_middle_leaves_nothing_for_others_to_touch(poster: MakePoster) -> None:
    """Both links receive into the same memory. UCX lets go of memory for both when the last of them does."""
    transport = UcxTransport("", make_poster=poster)
    first = Two(transport)
    second = Two(transport, memory=first.memory)
    second.source[:] = b"s" * len(second.source)
    for two in (first, second):
        two.sender.send([0], 4 * SIZE, [1])
        two.arrivals()
        two.receiver.receive([0])
        two.receiver.progress()
    first.receiver.close()
    second.finish(1, 1)
    assert second.memory == second.source
    first.close()
    second.close()
    transport.close()


def test_a_closed_link_does_nothing(two: Two) -> None:
    two.close()
    assert not two.sender.sent()
    assert not two.receiver.landed()


def test_closing_twice_is_closing_once(two: Two) -> None:
    two.close()
    two.close()


def test_an_armed_link_wakes_its_owner(two: Two) -> None:
    two.pass_one(0)
    assert settled(two.receiver)
    two.sender.send([0], 1, [1])
    two.sender.progress()
    ready, _, _ = select.select([two.receiver.fileno()], [], [], WAIT_S)
    assert ready
    assert two.arrivals() == [ArrivedMessage(1, 1)]


def settled(link: UcxLink) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not link.arm():
        assert time.monotonic() < deadline
        link.progress()
    return True


def test_a_link_is_broken_once_tcp_says_so(poster: MakePoster) -> None:
    transport = UcxTransport("tcp,self", make_poster=poster)
    two = Two(transport)
    two.pass_one(0)
    assert not two.receiver.broken()
    two.sender.close()
    deadline = time.monotonic() + WAIT_S
    while not two.receiver.broken():
        assert time.monotonic() < deadline
        two.receiver.progress()
    two.close()
    transport.close()


@pytest.mark.parametrize("change", [2, 3, 15])
def test_an_address_in_another_form_is_refused(change: int) -> None:
    transport = UcxTransport("")
    mine, other = (transport.open_link(memoryview(bytearray(1))) for _ in range(2))
    theirs = msgspec.msgpack.decode(other.address, type=LinkAddress)
    for worker in (b"", bytes([theirs.worker[0] ^ change]) + theirs.worker[1:]):
        address = msgspec.msgpack.encode(msgspec.structs.replace(theirs, worker=worker))
        with pytest.raises(TransferError, match="in another form"):
            mine.connect([address])
    mine.close()
    other.close()
    transport.close()


@pytest.mark.parametrize("address", [b"", b"\xc0", b"\x81\xa6worker\xc4\x01a"])
def test_what_is_no_address_is_refused(address: bytes) -> None:
    transport = UcxTransport("")
    mine = transport.open_link(memoryview(bytearray(1)))
    with pytest.raises(TransferError, match="cannot reach the other engine"):
        mine.connect([address])
    mine.close()
    transport.close()


def test_transports_that_do_not_exist() -> None:
    with pytest.raises(TransferError, match="no_such_transport"):
        UcxTransport("no_such_transport").open_link(memoryview(bytearray(1)))


def free_ports(count: int) -> range:
    """Returns consecutive ports that were free just now, below those that the kernel gives to connections."""
    while True:
        first = random.randrange(10_000, 32_000)
        ports = range(first, first + count)
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("", port))
            return ports


def listening() -> set[tuple[str, int]]:
    """Returns the IPv4 addresses and ports on which this process listens."""
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
    before, ports = listening(), free_ports(20)
    config = TransferConfig(ucx_tls="tcp", ucx_net_devices="lo", ucx_tcp_ports=f"{ports[0]}-{ports[-1]}")
    transport = configured_ucx(config)
    two = Two(transport)
    try:
        found = listening() - before
        assert len(found) == 2
        assert all(host == "127.0.0.1" and port in ports for host, port in found)
        two.pass_one(0)
    finally:
        two.close()
        transport.close()


@pytest.mark.parametrize(
    ("config", "environment", "kept"),
    [
        (TransferConfig(), "", True),
        (TransferConfig(host="0.0.0.0"), "", False),
        (TransferConfig(advertise="a-tunnel"), "", False),
        (TransferConfig(ucx_net_devices="^docker0"), "", False),
        (TransferConfig(), "^docker0", False),
    ],
)
def test_an_engine_for_this_machine_alone_keeps_ucx_to_loopback(
    config: TransferConfig, environment: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if environment:
        monkeypatch.setenv("UCX_NET_DEVICES", environment)
    monkeypatch.setenv("UCX_TLS", "tcp")
    prefill, decode = configured_ucx(config, loopback=bound_to_loopback(config)), configured_ucx(config)
    try:
        everything = {lane.device for lane in decode.resources()}
        assert {lane.device for lane in prefill.resources()} == ({"lo"} if kept else everything)
    finally:
        prefill.close()
        decode.close()


def test_a_range_with_no_port_left_is_told() -> None:
    (port,) = free_ports(1)
    transport = UcxTransport("tcp", "lo", f"{port}-{port}")
    link = transport.open_link(memoryview(bytearray(1)))
    try:
        with pytest.raises(TransferError, match="cannot make a worker"):
            transport.open_link(memoryview(bytearray(1)))
    finally:
        link.close()
        transport.close()


def test_an_address_that_was_cut_off_is_refused() -> None:
    """It is refused wherever it was cut off, although UCX does not know the address's length."""
    transport = UcxTransport("")
    memory = memoryview(bytearray(SIZE))
    other = transport.open_link(memory)
    whole = msgspec.msgpack.decode(other.address, type=LinkAddress)
    for length in (1, 2, 9, 10, 11, 20, 40, len(whole.worker) // 2, len(whole.worker) - 40, len(whole.worker) - 1):
        link = transport.open_link(memory)
        cut = msgspec.structs.replace(whole, worker=whole.worker[:length])
        with pytest.raises(TransferError, match="cannot reach"):
            link.connect([msgspec.msgpack.encode(cut)])
        link.close()
    other.close()
    transport.close()


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("", "^cuda_ipc"),
        ("all", "^cuda_ipc"),
        ("tcp,self", "tcp,self"),
        ("sm,cuda", "sm,cuda_copy,gdr_copy"),
        ("^tcp", "^tcp,cuda_ipc"),
        ("^cuda_ipc,tcp", "^cuda_ipc,tcp"),
    ],
)
def test_cuda_ipc_is_not_among_the_transports(asked: str, taken: str) -> None:
    """With cuda_ipc, a receiver would go on reading the sender's blocks after their lease."""
    assert allowed_transports(asked) == taken


@pytest.mark.parametrize("tls", ["cuda_ipc", "sm,cuda_copy,cuda_ipc", "tcp,cuda_ipc:aux"])
def test_a_transport_that_reads_after_the_end_is_refused_by_name(tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransferError, match="cuda_ipc is refused"):
        UcxTransport(tls)
    monkeypatch.setenv("UCX_TLS", tls)
    with pytest.raises(TransferError, match="cuda_ipc is refused"):
        UcxTransport("")


def test_without_cuda_ipc_ucx_has_everything_else() -> None:
    transport = UcxTransport("")
    found = {lane.transport for lane in transport.resources()}
    transport.close()
    assert {"tcp", "self", "posix"} <= found and "cuda_ipc" not in found
