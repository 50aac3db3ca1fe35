"""Tests that pushes take turns on a link, so that a short one does not wait for the end of a huge one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from pdserve.wire.rank import ConnectLink, PiecesAnnounced, PiecesSent, SendBlocks
from pdserve.wire.sampling_params import SampledToken
from pdserve_kvtransfer.events import FetchLanded, FirstTokenArrived, PushWanted
from pdserve_kvtransfer.pieces import tag_of
from pdserve_kvtransfer.push.port import IN_FLIGHT, PushPort
from pdserve_kvtransfer.region import KvRegion, Memory, host_bytes
from tests.eventually import eventually
from tests.kvtransfer.inproc import Fabric, InprocLink, InprocTransport
from tests.kvtransfer.rig import PATIENT, Pair, engine

BLOCK_BYTES = 64
BLOCKS = 20_000
HUGE, SHORT = 1, 2
A_PORTION = 32


class RecordingLink(InprocLink):
    """A link that records the tags of the blocks that it sends, in their order."""

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        self.tags += map(tag_of, labels)
        super().send(places, length, labels, to)

    tags: list[int]


class RecordingTransport(InprocTransport):
    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self.fabric = fabric
        self.tags: list[int] = []

    def open_link(self, memory: Memory) -> InprocLink:
        own = host_bytes(memory)
        assert own is not None
        link = RecordingLink(self.fabric, own)
        link.tags = self.tags
        self.links.append(link)
        return link


def order(tag: int, first: int, count: int) -> SendBlocks:
    return SendBlocks(1, tag, first, tuple(range(first, first + count)), True)


@pytest.mark.parametrize("short", [1, A_PORTION, 3 * A_PORTION])
def test_a_short_push_beside_a_huge_one_ends_after_as_many_blocks_of_it(short: int) -> None:
    fabric = Fabric()
    transport = RecordingTransport(fabric)
    receiver = InprocTransport(fabric).open_link(memoryview(bytearray(BLOCK_BYTES)))
    region = KvRegion(memoryview(bytearray(BLOCKS * BLOCK_BYTES)), BLOCK_BYTES)
    port = PushPort(1, 0, 1, (1,), region, transport)
    port.handle(ConnectLink(1, (receiver.address,)))

    def move() -> None:
        port.turn()
        arrivals = receiver.arrivals()
        receiver.receive([0] * len(arrivals))
        receiver.progress()

    port.handle(order(HUGE, 0, BLOCKS - 1000))
    # A later portion of the huge push shares its turn and gets no further one.
    port.handle(order(HUGE, BLOCKS - 1000, 100))
    for _ in range(5):
        move()
    before = len(transport.tags)
    assert 0 < before < BLOCKS // 2
    port.handle(order(SHORT, 0, short))
    while transport.tags.count(SHORT) < short:
        move()
    meanwhile = transport.tags[before:]
    while meanwhile[-1] == HUGE:
        meanwhile.pop()
    assert meanwhile.count(HUGE) <= short + A_PORTION
    while port.moving():
        move()
    sent: Counter[int] = Counter()
    for report in port.reports:
        if isinstance(report, PiecesSent):
            sent[report.tag] += report.count
    assert sent == {HUGE: BLOCKS - 900, SHORT: short}
    announced = [(report.tag, report.first_block) for report in port.reports if isinstance(report, PiecesAnnounced)]
    assert announced == [(SHORT, 0), (HUGE, 0), (HUGE, BLOCKS - 1000)]
    port.close()
    receiver.close()


@pytest.mark.parametrize("decode_nodes", [1, 2])
def test_a_short_push_lands_beside_a_huge_one_to_the_same_or_another_node(decode_nodes: int) -> None:
    """With the real thread, the test counts the huge push's blocks that are sent before the short one lands."""
    fabric = Fabric()
    transports: list[RecordingTransport] = []

    def transport() -> RecordingTransport:
        transports.append(RecordingTransport(fabric))
        return transports[-1]

    blocks = 3 * BLOCK_BYTES
    with (
        engine(num_blocks=BLOCKS, block_bytes=blocks, config=PATIENT, transport=transport) as prefill,
        engine(num_blocks=BLOCKS, block_bytes=blocks, config=PATIENT, transport=transport) as first,
        engine(num_blocks=BLOCKS, block_bytes=blocks, config=PATIENT, transport=transport) as second,
    ):
        sent = transports[0].tags
        to = (first, second)[decode_nodes - 1]
        huge = Pair(prefill, first).fetch(tuple(range(BLOCKS - 8)))
        prefill.next(PushWanted)
        short = Pair(prefill, to).fetch(tuple(range(BLOCKS - 8, BLOCKS)))
        prefill.next(PushWanted)
        fabric.hold()
        prefill.thread.push(huge, 0, tuple(range(BLOCKS - 8)))
        eventually(lambda: len(sent) >= IN_FLIGHT)
        prefill.thread.push(short, 0, tuple(range(8)))
        prefill.thread.first_token(short, (SampledToken(1),), 0)
        fabric.release()
        to.next(FirstTokenArrived)
        to.next(FetchLanded)
        short_tag = next(tag for tag, count in Counter(sent).items() if count == 8)
        last = max(at for at, tag in enumerate(sent) if tag == short_tag)
        assert last < 4 * IN_FLIGHT + 32 * A_PORTION
