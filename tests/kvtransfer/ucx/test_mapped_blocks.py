"""Tests links whose receiver has mapped the sender's memory: which messages count, and when a copy does."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import select
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.config import UcxCalls
from pdserve.errors import PeerLost
from pdserve.settings import cache_folder
from pdserve.wire.transfer import CELLS, LinkAddress, MemoryOffer
from pdserve_kvtransfer.configuration import chosen_poster
from pdserve_kvtransfer.pieces import digest
from pdserve_kvtransfer.region import SharedMemory
from pdserve_kvtransfer.transport import DISCARD, ArrivedMessage, MovedMessage
from pdserve_kvtransfer.ucx.compiled_poster import CompiledPoster
from pdserve_kvtransfer.ucx.ucx_transport import UcxLink, UcxTransport
from tests.eventually import eventually
from tests.kvtransfer.rig import WAIT_S, compiled_poster
from tests.kvtransfer.ucx.test_ucx_transport import Two, settled

CONTROL = 2**63
ATTACHED, NOTICE, ACKNOWLEDGEMENT = range(3)
SIZE = 8 * 2**20
BLOCK = SIZE // 4
LARGE = 128 * 2**20
LENGTHS = (0, 1, 63, 64, 65, 239, 240, 241, 256, 320, 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049, 100_003, 368_640)


@pytest.fixture
def transport() -> Iterator[UcxTransport]:
    made = UcxTransport("", make_poster=compiled_poster())
    yield made
    made.close()


@pytest.fixture
def two(transport: UcxTransport) -> Iterator[Two]:
    made = Two(transport, SIZE, shared=True)
    made.attach()
    yield made
    made.close()


def offer_of(link: UcxLink) -> MemoryOffer:
    offer = msgspec.msgpack.decode(link.address, type=LinkAddress).offer
    assert offer is not None
    return offer


def turns(*links: UcxLink) -> None:
    """Lets links take enough turns to receive any message, unless the machine is busy."""
    for _ in range(300):
        for link in links:
            link.progress()


def test_memory_is_offered_only_by_those_who_share_it_to_those_who_can_map_it(transport: UcxTransport) -> None:
    plain, shared = Two(transport), Two(transport, shared=True)
    tcp = UcxTransport("tcp,self", make_poster=compiled_poster())
    far = Two(tcp, shared=True)
    python = UcxTransport("")
    old = Two(python, shared=True)
    for link, offers in ((plain.sender, False), (shared.sender, True), (far.sender, False), (old.sender, False)):
        assert (msgspec.msgpack.decode(link.address, type=LinkAddress).offer is not None) == offers
    for one in (plain, shared, far, old):
        one.pass_one(1)
        one.close()
    for made in (tcp, python):
        made.close()


def test_an_offer_that_cannot_be_taken_changes_nothing(transport: UcxTransport) -> None:
    two = Two(transport, shared=True)
    address = msgspec.msgpack.decode(two.sender.address, type=LinkAddress)
    assert address.offer is not None
    other = transport.open_link(memoryview(bytearray(8)))
    elsewhere = msgspec.structs.replace(address.offer, name="0" * 32)
    stale = msgspec.structs.replace(address.offer, nonce=address.offer.nonce ^ 1)
    for offer in (elsewhere, stale):
        other.connect([msgspec.msgpack.encode(msgspec.structs.replace(address, offer=offer))])
        assert not other.poster.attached
    other.close()
    two.attach()
    two.pass_one(1)
    two.close()


def test_a_decode_engine_may_attach_before_the_prefill_engine_has_connected(transport: UcxTransport) -> None:
    memory = SharedMemory(8)
    sender, receiver = transport.open_link(memory), transport.open_link(memoryview(bytearray(8)))
    receiver.connect([sender.address])
    assert receiver.poster.attached == 1
    turns(receiver, sender)
    assert sender.poster.attached == 0
    sender.connect([receiver.address])

    def attached() -> bool:
        # On a busy machine, the message may arrive only now.
        turns(receiver, sender)
        return sender.poster.attached == 1

    eventually(attached)
    sender.close()
    receiver.close()


def test_each_of_several_receivers_and_senders_has_its_own(transport: UcxTransport) -> None:
    """The ranks of two engines are linked like this: two senders, two receivers."""
    memories = [SharedMemory(16) for _ in range(2)]
    into = [bytearray(64) for _ in range(2)]
    senders = [transport.open_link(memory) for memory in memories]
    receivers = [transport.open_link(memoryview(memory)) for memory in into]
    # Each receiver numbers the senders' links in its own way.
    receivers[0].connect([sender.address for sender in senders])
    receivers[1].connect([sender.address for sender in reversed(senders)])
    for number, (memory, sender) in enumerate(zip(memories, senders, strict=True)):
        memory.bytes[:] = bytes([number]) * 8 + bytes([number + 10]) * 8
        sender.connect([receiver.address for receiver in receivers])
    turns(*senders, *receivers)
    for link in (*senders, *receivers):
        assert link.poster.attached == 2
    for number, sender in enumerate(senders):
        for to in range(2):
            sender.send([0, 8], 8, [number * 2, number * 2 + 1], to)
    for to, receiver in enumerate(receivers):
        found: list[ArrivedMessage] = []
        deadline = time.monotonic() + WAIT_S
        while len(found) < 4:
            assert time.monotonic() < deadline
            turns(*senders, *receivers)
            arrivals = receiver.arrivals()
            receiver.receive([arrival.label * 8 + to * 32 for arrival in arrivals])
            found += arrivals
        turns(*senders, *receivers)
        assert into[to][to * 32 : to * 32 + 32] == b"".join(bytes([n]) * 8 for n in (0, 10, 1, 11))
        assert not any(into[to][:32] if to else into[to][32:])
        assert len(receiver.landed()) == 4
    turns(*senders)
    for number, sender in enumerate(senders):
        labels = [number * 2, number * 2 + 1]
        assert sorted(moved.label for moved in sender.sent()) == sorted(labels * 2)
        sender.close()
    for receiver in receivers:
        receiver.close()


def test_more_links_than_cells(transport: UcxTransport) -> None:
    memory = SharedMemory(8)
    for _ in range(CELLS - 1):
        assert memory.offer()
    last, beyond = transport.open_link(memory), transport.open_link(memory)
    before = offer_of(last)
    assert msgspec.msgpack.decode(beyond.address, type=LinkAddress).offer is None
    last.close()
    again = transport.open_link(memory)
    assert offer_of(again).cell == before.cell
    assert offer_of(again).nonce != before.nonce
    again.close()
    beyond.close()


def test_what_is_copied_while_the_sender_closes_does_not_count(transport: UcxTransport) -> None:
    """The test closes links during a copy until one was really closed in the middle."""
    eventually(lambda: closed_in_the_middle(transport), "a link that was closed in the middle of a copy")


def closed_in_the_middle(transport: UcxTransport) -> bool:
    """Returns whether the receiver had begun the copy, and not ended it, when the sender closed."""
    two = Two(transport, LARGE, shared=True)
    two.attach()
    two.source[:] = b"s" * LARGE
    two.sender.send([0], LARGE, [1])
    two.arrivals()
    two.receiver.receive([0])
    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(two.receiver.progress)
        while not two.memory[0] and not copying.done():
            pass
        begun = two.memory[0] == ord("s")
        two.sender.close()
        # The sender owns the memory again: no other process may write to it.
        two.source[:] = b"r" * LARGE
        try:
            copying.result()
        except PeerLost as exc:
            assert "closed the link that a block was copied from" in str(exc)
            assert not two.receiver.landed()
            return begun
        finally:
            mixed = b"r" in two.memory
            landed = two.receiver.landed()
            two.close()
    assert [moved.label for moved in landed] == [1]
    assert not mixed
    return False


def test_a_link_of_the_same_memory_does_not_stand_for_one_that_was_closed(transport: UcxTransport, two: Two) -> None:
    two.source[:] = b"s" * SIZE
    two.sender.send([0], BLOCK, [1])
    two.arrivals()
    assert two.shared is not None
    cell = offer_of(two.sender).cell
    two.sender.close()
    next_one = transport.open_link(two.shared)
    assert offer_of(next_one).cell == cell
    two.receiver.receive([0])
    with pytest.raises(PeerLost):
        turns(two.receiver)
    assert two.memory == bytes(SIZE)
    next_one.close()


def test_a_block_is_the_sender_s_again_only_when_it_was_copied(two: Two) -> None:
    two.sender.send([0, BLOCK], BLOCK, [1, 2])
    two.arrivals(2)
    turns(two.sender)
    assert not two.sender.sent(), "nobody has decided about them"
    two.receiver.receive([0, DISCARD])
    two.finish(2, 1)
    assert [moved.label for moved in two.sent] == [1, 2]
    assert [(moved.label, moved.place, moved.length) for moved in two.landed] == [(1, 0, BLOCK)]


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("digests", [True, False], ids=["digests", "no digests"])
def test_what_is_copied_is_what_was_there_and_its_digest_is_that_of_python(digests: bool, aligned: bool) -> None:
    transport = UcxTransport(
        "", make_poster=chosen_poster(UcxCalls.COMPILED, cache_folder(os.environ), digests=digests)
    )
    two = Two(transport, SIZE, shared=True)
    two.attach()
    two.source[:] = random.Random(1).randbytes(SIZE)
    # The start of a bytearray's memory is aligned to 16 bytes at least.
    start = -ctypes.addressof(ctypes.c_char.from_buffer(two.memory)) % 64 + (0 if aligned else 1)
    for label, length in enumerate(LENGTHS, 2**62):
        two.memory[:] = bytes(SIZE)
        place, into = 64 + label % 64, start + 4096
        two.sender.send([place], length, [label])
        two.arrivals()
        two.receiver.receive([into])
        two.finish(len(two.sent) + 1, len(two.landed) + 1)
        sent = two.source[place : place + length]
        assert two.memory[into : into + length] == sent
        assert two.memory[:into] == bytes(into)
        assert two.memory[into + length :] == bytes(SIZE - into - length)
        assert two.landed[-1] == MovedMessage(label, into, length, digest(sent, label) if digests else None)
    two.close()
    transport.close()


def test_copies_that_wait_keep_a_link_awake(two: Two) -> None:
    two.sender.send([0], BLOCK, [1])
    two.arrivals()
    two.receiver.receive([0])
    assert not two.receiver.arm()
    two.finish(1, 1)
    deadline = time.monotonic() + WAIT_S
    while not two.receiver.arm():
        assert time.monotonic() < deadline
        two.turn()


def control(kind: int, nonce: int, number: int, *numbers: int) -> bytes:
    return struct.pack(f"={3 + len(numbers)}Q", kind, nonce, number, *numbers)


def say(transport: UcxTransport, to: UcxLink, message: bytes) -> None:
    """Sends the message as any process can that knows the link's UCX address."""
    stranger = transport.open_link(memoryview(bytearray(message)))
    stranger.connect([to.address])
    stranger.send([0], len(message), [CONTROL])
    turns(stranger, to)
    stranger.close()


def notice(nonce: int, *blocks: int, length: int = 8, serial: int = 1, source: int = 0) -> bytes:
    """Returns the bytes of a notice, by default the second one. ``blocks`` are labels and places in turn."""
    return control(NOTICE, nonce, source, 0, length, serial, *blocks)


ANYTHING: dict[str, Callable[[int], bytes]] = {
    "nothing": lambda nonce: b"",
    "less than a head": lambda nonce: notice(nonce)[:20],
    "a notice": lambda nonce: notice(nonce, 1, 0),
    "a notice of a source that is not there": lambda nonce: notice(nonce, 1, 0, source=9),
    "more blocks than go into a notice": lambda nonce: notice(nonce, *[1, 0] * 65),
    "a large message": lambda nonce: bytes(2**20),
    "an acknowledgement": lambda nonce: control(ACKNOWLEDGEMENT, nonce, 0, 1),
    "an attachment": lambda nonce: control(ATTACHED, nonce, 0, 5, 0),
    "no kind that there is": lambda nonce: control(3, nonce, 0, 1),
}


@pytest.mark.parametrize("what", ANYTHING)
def test_strangers_are_not_listened_to(transport: UcxTransport, two: Two, what: str) -> None:
    two.source[:8] = b"original"
    two.sender.send([0], 8, [1])
    two.arrivals()
    message = ANYTHING[what](offer_of(two.sender).nonce ^ 1)
    for link in (two.sender, two.receiver):
        say(transport, link, message)
    assert not two.sender.sent()
    two.receiver.receive([DISCARD])
    assert not two.receiver.arrivals()
    for link in (two.sender, two.receiver):
        assert link.poster.attached == 1


NONSENSE: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "an empty notice": ("receiver", lambda nonce: control(NOTICE, nonce, 0)),
    "half a notice": ("receiver", lambda nonce: control(NOTICE, nonce, 0, 0)),
    "a notice with half a block": ("receiver", lambda nonce: notice(nonce, 1)),
    "a notice that was heard": ("receiver", lambda nonce: notice(nonce, 1, 0, serial=0)),
    "a block beyond the memory": ("receiver", lambda nonce: notice(nonce, 1, SIZE - 7)),
    "a block that wraps around": ("receiver", lambda nonce: notice(nonce, 1, 16, length=2**64 - 8)),
    "a place that wraps around": ("receiver", lambda nonce: notice(nonce, 1, 2**64 - 4)),
    "a label that is none": ("receiver", lambda nonce: notice(nonce, CONTROL, 0)),
    "thanks for more than was sent": ("sender", lambda nonce: control(ACKNOWLEDGEMENT, nonce, 0, 2)),
    "thanks of one that is not there": ("sender", lambda nonce: control(ACKNOWLEDGEMENT, nonce, 1, 1)),
    "thanks without a number": ("sender", lambda nonce: control(ACKNOWLEDGEMENT, nonce, 0)),
    "half an attachment": ("sender", lambda nonce: control(ATTACHED, nonce, 0, 5)),
    "a kind that is none": ("sender", lambda nonce: control(3, nonce, 0, 1)),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_of_one_who_was_told_the_nonce_ends_the_link(transport: UcxTransport, two: Two, what: str) -> None:
    whom, make = NONSENSE[what]
    two.sender.send([0], 8, [1])
    two.arrivals()
    link = two.receiver if whom == "receiver" else two.sender
    with pytest.raises(PeerLost, match="sent what no link sends"):
        say(transport, link, make(offer_of(two.sender).nonce))
    assert two.memory == bytes(SIZE)


def test_notices_are_heard_in_their_order(transport: UcxTransport, two: Two) -> None:
    """Notices could overtake each other if UCX is told to send even small messages by rendezvous."""
    nonce = offer_of(two.sender).nonce
    two.source[:24] = b"earliestmiddle..latest.."
    for serial, place in ((2, 16), (1, 8)):
        say(transport, two.receiver, notice(nonce, serial, place, serial=serial))
        assert not two.receiver.arrivals()
    say(transport, two.receiver, notice(nonce, 0, 0, serial=0))
    assert [arrival.label for arrival in two.receiver.arrivals()] == [0, 1, 2]


def stalled(transport: UcxTransport, to: UcxLink, label: int, length: int = 4 * 2**20) -> UcxLink:
    """Returns a link that has begun to send ``length`` bytes and does not continue."""
    stranger = transport.open_link(memoryview(bytearray(length)))
    stranger.connect([to.address])
    stranger.send([0], length, [label])
    poster = to.poster
    assert isinstance(poster, CompiledPoster)
    deadline = time.monotonic() + WAIT_S
    # A message under kControl is received at once.
    while not (poster._board.in_flight if label == CONTROL else to.arrivals()):
        assert time.monotonic() < deadline
        stranger.progress()
        to.progress()
    return stranger


def test_a_receiver_that_closes_copies_nothing_more_whatever_is_stuck(transport: UcxTransport, two: Two) -> None:
    two.source[:] = b"s" * SIZE
    stranger = stalled(transport, two.receiver, 5)
    assert two.receiver.arrivals() == [ArrivedMessage(5, 4 * 2**20)]
    two.receiver.receive([BLOCK])
    two.sender.send([0] * 32, BLOCK, list(range(32)))
    assert len(two.arrivals(32)) == 32
    two.receiver.receive([0] * 32)
    two.receiver.close()
    assert b"s" not in two.memory
    stranger.close()


class Rendezvous(UcxTransport):
    """A transport whose receivers have to ask for every message, however small it is."""

    def _context(self) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UCX_RNDV_THRESH", "1")
            return super()._context()


@pytest.fixture
def rendezvous() -> Iterator[UcxTransport]:
    made = Rendezvous("", make_poster=compiled_poster())
    yield made
    made.close()


def test_links_whose_smallest_messages_take_their_time(rendezvous: UcxTransport) -> None:
    two = Two(rendezvous, SIZE, shared=True)
    two.attach()
    two.source[:] = random.Random(2).randbytes(SIZE)
    count = SIZE // 4096
    labels = random.Random(3).sample(range(count), count)
    for at in range(0, count, 100):
        two.sender.send([label * 4096 for label in labels[at : at + 100]], 4096, labels[at : at + 100])
    received = 0
    deadline = time.monotonic() + WAIT_S
    while received < count:
        assert time.monotonic() < deadline
        two.turn()
        arrivals = two.receiver.arrivals()
        two.receiver.receive([arrival.label * 4096 for arrival in arrivals])
        received += len(arrivals)
    two.finish(count, count)
    assert two.memory == two.source
    two.close()


def test_a_stranger_s_unfinished_message_stops_nobody(rendezvous: UcxTransport, two: Two) -> None:
    strangers = [stalled(rendezvous, link, CONTROL, 64) for link in (two.sender, two.receiver)]
    two.pass_one(1)
    for link in (two.sender, two.receiver):
        assert isinstance(link.poster, CompiledPoster) and link.poster._board.in_flight
    for stranger in strangers:
        stranger.close()
    turns(two.sender, two.receiver)
    two.pass_one(2)


def test_a_notice_keeps_a_link_awake_until_somebody_looks(two: Two) -> None:
    two.pass_one(0)
    assert settled(two.receiver)
    two.sender.send([0], 8, [1])
    deadline = time.monotonic() + WAIT_S
    while not two.receiver.progress():
        assert time.monotonic() < deadline
        two.sender.progress()
    for _ in range(300):
        two.receiver.progress()
        assert not two.receiver.arm()
    assert two.receiver.arrivals() == [ArrivedMessage(1, 8)]
    assert settled(two.receiver), "it is for the caller now"
    two.receiver.receive([0])
    assert not two.receiver.arm()


def test_an_armed_sender_wakes_when_a_block_is_its_own_again(two: Two) -> None:
    two.sender.send([0], 8, [1])
    two.arrivals()
    assert settled(two.sender)
    two.receiver.receive([0])
    turns(two.receiver)
    ready, _, _ = select.select([two.sender.fileno()], [], [], WAIT_S)
    assert ready
    turns(two.sender)
    assert [moved.label for moved in two.sender.sent()] == [1]


def test_nothing_stays_mapped_or_open(transport: UcxTransport) -> None:
    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("pdserve-kv")
        return maps, sum("pdserve-kv" in target(fd) for fd in Path("/proc/self/fd").iterdir())

    gc.collect()
    before = held()
    two = Two(transport, shared=True)
    two.attach()
    for link in (two.sender, two.receiver):
        turns(two.sender, two.receiver)
        assert isinstance(link.poster, CompiledPoster) and not link.poster._board.in_flight
    # These are the memory and its mapping; mmap has a descriptor of its own.
    assert held() == (before[0] + 2, before[1] + 2)
    two.receiver.close()
    assert held() == (before[0] + 1, before[1] + 2)
    two.close()
    del two
    gc.collect()
    assert held() == before


def target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:
        return ""


def test_an_offer_is_not_taken_by_one_that_was_told_to_use_no_shared_memory(transport: UcxTransport) -> None:
    tcp = UcxTransport("tcp,self", make_poster=compiled_poster())
    memory = SharedMemory(8)
    sender, receiver = transport.open_link(memory), tcp.open_link(memoryview(bytearray(8)))
    assert offer_of(sender)
    receiver.connect([sender.address])
    assert not receiver.poster.attached
    for link in (sender, receiver):
        link.close()
    tcp.close()
