"""Tests that blocks whose receive was accepted belong to no request until the receive is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest

from pdserve.errors import PeerLost
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.transfer import PrefillRequest
from pdserve_kvtransfer.events import (
    BlocksReleased,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushOutcome,
    PushWanted,
)
from tests.eventually import eventually
from tests.kvtransfer.fakes import FakePrefill
from tests.kvtransfer.inproc import Fabric, InprocTransport
from tests.kvtransfer.rig import PATIENT, Engine, Pair, engine, pair

BLOCKS = (3, 6, 1)


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def rig(fabric: Fabric) -> Iterator[Pair]:
    with pair(transport=lambda: InprocTransport(fabric)) as made:
        yield made


def stop_in_the_middle(rig: Pair, fabric: Fabric) -> PushWanted:
    """Starts a transfer whose block 0 has landed, and whose other two blocks are accepted and do not land."""
    rig.fetch(BLOCKS)
    wanted = rig.prefill.next(PushWanted)
    rig.prefill.thread.push(wanted.transfer_id, 0, (0,))
    eventually(lambda: rig.decode.thread.stats().bytes_received == rig.decode.block_bytes)
    fabric.hold()
    rig.prefill.thread.push(wanted.transfer_id, 1, (1, 2))
    eventually(lambda: fabric.stuck() == 2)
    return wanted


def test_a_cancelled_fetch_releases_blocks_when_their_receives_end(rig: Pair, fabric: Fabric) -> None:
    wanted = stop_in_the_middle(rig, fabric)
    rig.decode.thread.cancel_fetch(wanted.transfer_id)
    assert rig.decode.next(FetchCancelled) == FetchCancelled(wanted.transfer_id, (6, 1))
    assert rig.decode.thread.stats().quarantined_blocks == 2
    rig.prefill.next(PushCancelled)
    assert rig.prefill.quiet(), "its blocks are still being read"
    fabric.release()
    assert rig.decode.next(BlocksReleased).block_ids == (6, 1)
    assert rig.prefill.next(PushEnded).outcome is PushOutcome.CANCELLED
    assert rig.decode.thread.stats().quarantined_blocks == 0


def test_a_failed_fetch_tells_which_blocks_may_be_used(rig: Pair, fabric: Fabric) -> None:
    wanted = stop_in_the_middle(rig, fabric)
    rig.prefill.thread.fail_push(wanted.transfer_id, "no more")
    failed = rig.decode.next(FetchFailed)
    assert (failed.landed, failed.quarantined) == (1, (6, 1))
    fabric.release()
    assert rig.decode.next(BlocksReleased).block_ids == (6, 1)
    assert rig.prefill.next(PushEnded).outcome is PushOutcome.FAILED


def test_a_broken_link_ends_receives_before_the_fetch_is_reported(rig: Pair, fabric: Fabric) -> None:
    wanted = stop_in_the_middle(rig, fabric)
    (receiver,) = [link for link in fabric.links.values() if link.receiving]
    receiver.sever()
    failed = rig.decode.next(FetchFailed)
    assert (failed.kind, failed.landed, failed.quarantined) == (FailureKind.PEER_LOST, 1, ())
    assert rig.prefill.next(PushCancelled).transfer_id == wanted.transfer_id
    assert rig.prefill.next(PushEnded).outcome is PushOutcome.LEASE_EXPIRED
    assert not fabric.links


def test_quarantine_ends_with_the_peer(rig: Pair, fabric: Fabric) -> None:
    wanted = stop_in_the_middle(rig, fabric)
    rig.decode.thread.cancel_fetch(wanted.transfer_id)
    rig.decode.next(FetchCancelled)
    rig.prefill.close()
    assert set(rig.decode.next(BlocksReleased).block_ids) == {6, 1}
    assert rig.decode.thread.stats().quarantined_blocks == 0


def test_pings_go_on_while_blocks_are_quarantined(rig: Pair, fabric: Fabric) -> None:
    wanted = stop_in_the_middle(rig, fabric)
    rig.decode.thread.cancel_fetch(wanted.transfer_id)
    rig.decode.next(FetchCancelled)
    assert not rig.decode.has_news_within(rig.decode.config.lease_ms / 1000 * 1.5), "no lease ran out"
    fabric.release()
    rig.decode.next(BlocksReleased)


def test_blocks_that_a_peer_which_pings_for_ever_holds_back_are_free_again(fabric: Fabric) -> None:
    transport = partial(InprocTransport, fabric)
    with (
        engine(config=PATIENT, transport=transport) as liar,
        engine(transport=transport) as honest,
        engine(transport=transport) as decode,
    ):
        rig, other = Pair(liar, decode), Pair(honest, decode)
        beside = other.fetch((10, 11))
        honest.next(PushWanted)
        honest.thread.push(beside, 0, (0,))
        eventually(lambda: decode.thread.stats().bytes_received == decode.block_bytes)
        before = set(fabric.links)
        transfer_id = rig.fetch(BLOCKS)
        liar.next(PushWanted)
        for address in set(fabric.links) - before:
            fabric.links[address].holds = lambda label: True
        liar.thread.push(transfer_id, 0, (0, 1, 2))
        eventually(lambda: fabric.stuck() == 3)
        decode.thread.cancel_fetch(transfer_id)
        assert set(decode.next(FetchCancelled).quarantined) == set(BLOCKS)
        assert set(decode.next(BlocksReleased).block_ids) == set(BLOCKS)
        stats = decode.thread.stats()
        assert (stats.quarantined_blocks, stats.leases_expired_receiving) == (0, 0)
        honest.thread.push(beside, 1, (1,))
        honest.thread.first_token(beside, (SampledToken(1),), 0)
        decode.next(FirstTokenArrived)
        assert decode.next(FetchLanded).transfer_id == beside


class TestOverUcx:
    """The sender has announced its block and the decode engine has accepted it, but the sender moves no byte of it."""

    @pytest.fixture
    def prefill(self) -> Iterator[FakePrefill]:
        with FakePrefill() as made:
            yield made

    @pytest.fixture
    def decode(self) -> Iterator[Engine]:
        with engine(config=PATIENT) as made:
            made.fill(*range(made.num_blocks))
            yield made

    def stop_in_the_middle(
        self, prefill: FakePrefill, decode: Engine, block_ids: tuple[int, ...] = (5,)
    ) -> PrefillRequest:
        order = Pair(decode, decode).order(block_ids, target=prefill.target)
        decode.thread.fetch(order)
        request = prefill.welcome_and_take()
        # These blocks belong to no transfer: the first connects UCX, and the last shows that the one between was seen.
        block = memoryview(b"s" * decode.block_bytes)
        prefill.post(block, request.tag ^ 1, 0)
        prefill.finish()
        prefill.post(block, request.tag, 0)
        prefill.post(memoryview(b"x"), request.tag ^ 1, 0)
        eventually(lambda: decode.thread.stats().stale_blocks_dropped == 2)
        return request

    def test_a_cancelled_fetch_keeps_its_block_until_the_sender_goes_on(
        self, prefill: FakePrefill, decode: Engine
    ) -> None:
        transfer = self.stop_in_the_middle(prefill, decode).transfer_id
        decode.thread.cancel_fetch(transfer)
        assert decode.next(FetchCancelled) == FetchCancelled(transfer, (5,))
        assert decode.quiet()
        prefill.finish()
        assert decode.next(BlocksReleased) == BlocksReleased((5,))

    def test_beside_a_block_that_is_still_written_no_other_one_lands(
        self, prefill: FakePrefill, decode: Engine
    ) -> None:
        """Block 7 is free from the end on, although the transfer is remembered for the sake of block 5."""
        request = self.stop_in_the_middle(prefill, decode, (5, 7))
        before = decode.read(7)
        decode.thread.cancel_fetch(request.transfer_id)
        assert decode.next(FetchCancelled) == FetchCancelled(request.transfer_id, (5,))
        prefill.post(memoryview(b"l" * decode.block_bytes), request.tag, 1)
        eventually(lambda: decode.thread.stats().stale_blocks_dropped == 3)
        prefill.finish()
        assert decode.next(BlocksReleased) == BlocksReleased((5,))
        assert decode.read(7) == before

    def test_a_sender_that_dies_writes_nothing_any_more(self, prefill: FakePrefill, decode: Engine) -> None:
        self.stop_in_the_middle(prefill, decode)
        before = decode.read(5)
        prefill.socket.close(0)
        failed = decode.next(FetchFailed)
        assert (failed.kind, failed.landed, failed.quarantined) == (FailureKind.PEER_LOST, 0, ())
        with suppress(PeerLost):
            for _ in range(1_000):
                prefill.link.progress()
        assert decode.read(5) == before
        assert decode.thread.stats().quarantined_blocks == 0
