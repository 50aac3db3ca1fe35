"""Tests that every fetch ends, and lands only with the bytes that were sent, whatever the transport does to blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from pdserve.config import Switch, TransferConfig
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import SampledToken
from pdserve_kvtransfer.events import (
    BlocksReleased,
    FailureKind,
    FetchFailed,
    FetchLanded,
    PeersMet,
    PushEnded,
    PushWanted,
)
from pdserve_kvtransfer.transport import Transport
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from pdserve_kvtransfer.ucx.ucxx_poster import UcxxPoster
from tests.eventually import eventually
from tests.kvtransfer.faulty import AT_RECEIVER, HARMLESS, Fault, Injector, faulty
from tests.kvtransfer.rig import CONFIG, Engine, Pair, compiled_poster, engine

pytestmark = pytest.mark.integration

TRANSFERS = 30
BLOCKS = 2
EVERY = 13
ONLY_CHECKSUMS = frozenset({Fault.CORRUPT, Fault.SWAP, Fault.FOREIGN})
"""The blocks have the right size, tag and index, so only their digests show that they are wrong."""


def serve(prefill: Engine, source: tuple[int, ...]) -> Counter[type]:
    """Carries out the requests of decode engines. Returns how often each event came."""
    prefill.poll()
    seen: Counter[type] = Counter()
    while not prefill.quiet():
        event = prefill.take()
        seen[type(event)] += 1
        if isinstance(event, PushWanted):
            prefill.thread.push(event.transfer_id, 0, source)
            prefill.thread.first_token(event.transfer_id, (SampledToken(1),), 0)
    return seen


@pytest.fixture(params=["mapped", "compiled", "python"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Transport]:
    """Returns the maker of the transport beneath the faults."""
    monkeypatch.setattr(Engine, "shares", request.param == "mapped")
    return partial(UcxTransport, "", make_poster=UcxxPoster if request.param == "python" else compiled_poster())


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name)
def test_nothing_lands_that_was_not_sent(fault: Fault, make: Callable[[], Transport]) -> None:
    nothing_else_lands(fault, CONFIG, make)


@pytest.mark.parametrize("fault", sorted(set(Fault) - ONLY_CHECKSUMS, key=str), ids=lambda fault: fault.name)
def test_nor_without_checksums_where_the_transport_itself_says_so(fault: Fault, make: Callable[[], Transport]) -> None:
    nothing_else_lands(fault, replace(CONFIG, checksums=Switch.OFF), make)


def nothing_else_lands(fault: Fault, config: TransferConfig, make: Callable[[], Transport]) -> None:
    injector = Injector(fault, EVERY)
    bad = faulty(make, injector)
    at_receiver = fault in AT_RECEIVER
    blocks = TRANSFERS * BLOCKS
    with (
        engine(config=config, transport=None if at_receiver else bad) as prefill,
        engine(config=config, transport=bad if at_receiver else None, num_blocks=blocks) as decode,
    ):
        rig = Pair(prefill, decode)
        # Where a busy machine takes longer for the handshake than a lease, all fetches would fail before any block.
        decode.thread.meet(1, (rig.target,))
        while not isinstance(decode.take(), PeersMet):
            pass
        source = (5, 2)
        sent = prefill.fill(*source)
        places: dict[TransferId, tuple[int, ...]] = {}
        ends: dict[TransferId, FetchLanded | FetchFailed] = {}
        counts: Counter[type] = Counter()

        def settled() -> bool:
            counts.update(serve(prefill, source))
            decode.poll()
            while not decode.quiet():
                event = decode.take()
                if isinstance(event, FetchLanded | FetchFailed):
                    assert event.transfer_id not in ends
                    ends[event.transfer_id] = event
                assert not isinstance(event, BlocksReleased) or event.block_ids
            return len(ends) == len(places) and counts[PushEnded] == counts[PushWanted]

        for i in range(TRANSFERS):
            order = rig.order((2 * i, 2 * i + 1))
            places[order.transfer_id] = order.block_ids
            decode.thread.fetch(order)
            if i % 5 == 4:
                eventually(settled)

        assert injector.injected > 0
        for transfer, end in ends.items():
            if isinstance(end, FetchLanded):
                assert decode.read(*places[transfer]) == sent
        failures = [end.kind for end in ends.values() if isinstance(end, FetchFailed)]
        assert len(failures) < TRANSFERS, "the rest went on"
        if fault in HARMLESS:
            assert not failures
        else:
            assert failures
        if fault in (Fault.CORRUPT, Fault.FOREIGN):
            assert set(failures) == {FailureKind.CORRUPT}
        if fault is Fault.TRUNCATE:
            assert set(failures) == {FailureKind.STALLED}
        eventually(lambda: decode.thread.stats().quarantined_blocks == 0)
