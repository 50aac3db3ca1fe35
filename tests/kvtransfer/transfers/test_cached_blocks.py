"""Tests fetches of cached blocks by their hashes, and offers, between two engines over real ZMQ and real UCX."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.config import Switch, TransferConfig
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import (
    CachedRequest,
    Cancel,
    Done,
    Failed,
    FailureCause,
    FirstToken,
    Held,
    Offer,
    Ping,
    Pong,
    Refused,
)
from pdserve_kvtransfer.events import (
    BlocksComing,
    BlocksLanded,
    BlocksOffered,
    CachedFetchOrder,
    CachedWanted,
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
from tests.kvtransfer.fakes import FakeDecode, FakePrefill
from tests.kvtransfer.inproc import Fabric, InprocTransport
from tests.kvtransfer.rig import BLOCK_BYTES, CONFIG, PATIENT, Pair, engine, pair
from tests.kvtransfer.test_ranks import nodes
from tests.kvtransfer.transfers.test_any_order import world

HASHES = tuple(os.urandom(32) for _ in range(3))
PLACES = (7, 1, 5)
SOURCES = (4, 9, 2)


def order(
    rig: Pair, *, target: PrefillTarget | None = None, deadline_s: float = 30.0, places: tuple[int, ...] = PLACES
) -> CachedFetchOrder:
    transfer = TransferId(new_id(), 0, rig.decode.boot_id)
    return CachedFetchOrder(transfer, target or rig.target, HASHES, places, deadline_s, "chat-1")


def ordered(rig: Pair) -> TransferId:
    """Begins a fetch that the holder has heard of."""
    made = order(rig)
    rig.decode.thread.fetch(made)
    wanted = rig.prefill.next(CachedWanted)
    assert (wanted.transfer_id, wanted.hashes, wanted.request_id) == (made.transfer_id, HASHES, "chat-1")
    assert 0 < wanted.deadline_s <= made.deadline_s
    return made.transfer_id


def give(rig: Pair, transfer: TransferId, count: int) -> None:
    if count:
        rig.prefill.thread.push(transfer, 0, SOURCES[:count])
    rig.prefill.thread.held(transfer, count)


@pytest.mark.parametrize("count", [3, 2, 0])
def test_what_the_holder_has_arrives(count: int, mapped_or_not: bool) -> None:
    with pair() as rig:
        sent = rig.prefill.fill(*SOURCES)
        before = rig.decode.fill(*PLACES)
        for _ in range(3):
            transfer = ordered(rig)
            give(rig, transfer, count)
            landed = rig.decode.next(FetchLanded)
            assert (landed.transfer_id, landed.landed, landed.bytes) == (transfer, count, count * BLOCK_BYTES)
            assert rig.prefill.next(PushEnded) == PushEnded(transfer, PushOutcome.DONE)
            at = count * BLOCK_BYTES
            assert rig.decode.read(*PLACES) == sent[:at] + before[at:], "blocks that the holder lacks are untouched"
        received, pushed = rig.decode.thread.stats(), rig.prefill.thread.stats()
        assert (received.transfers_received, pushed.transfers_sent, pushed.handshakes) == (3, 3, 1)
        assert not received.failures and not pushed.failures


def test_cached_blocks_without_checksums() -> None:
    with pair(config=TransferConfig(heartbeat_ms=50, lease_ms=600, checksums=Switch.OFF)) as rig:
        sent = rig.prefill.fill(*SOURCES)
        give(rig, ordered(rig), 2)
        assert rig.decode.next(FetchLanded).landed == 2
        assert rig.decode.read(*PLACES[:2]) == sent[: 2 * BLOCK_BYTES]


def test_cached_blocks_and_prompts_pass_between_the_same_engines() -> None:
    with pair() as rig:
        sent = rig.prefill.fill(*SOURCES)
        cached = ordered(rig)
        prompt = rig.fetch((10, 11, 12))
        assert rig.prefill.next(PushWanted).transfer_id == prompt
        rig.prefill.thread.push(prompt, 0, SOURCES)
        rig.prefill.thread.first_token(prompt, (SampledToken(1),), 0)
        rig.decode.next(FirstTokenArrived)
        landed = rig.decode.next(FetchLanded)
        assert (landed.transfer_id, landed.landed) == (prompt, 3)
        give(rig, cached, 3)
        assert rig.decode.next(FetchLanded).transfer_id == cached
        assert rig.decode.read(*PLACES) == rig.decode.read(10, 11, 12) == sent


@pytest.mark.parametrize(("sources", "targets", "kv_heads"), [(2, 2, 4), (1, 2, 2), (2, 1, 4)])
def test_a_part_of_the_blocks_lands_on_every_rank(sources: int, targets: int, kv_heads: int, tmp_path: Path) -> None:
    with nodes(sources, targets, kv_heads, tmp_path) as both:
        contents = [both.prefill.fill(block) for block in SOURCES]
        for count in (2, 0, 3):
            transfer = ordered(both.rig)
            give(both.rig, transfer, count)
            assert both.decode.engine.next(FetchLanded).landed == count
            for place, content in zip(PLACES[:count], contents[:count], strict=True):
                assert both.decode.holds(place, content)
            assert both.prefill.engine.next(PushEnded).outcome is PushOutcome.DONE


def test_paced_cached_blocks_land_as_there_is_room() -> None:
    with pair() as rig:
        sent = rig.prefill.fill(*SOURCES)
        paced = replace(order(rig), block_ids=(7,), paced_blocks=3)
        transfer = paced.transfer_id
        rig.decode.thread.fetch(paced)
        rig.prefill.next(CachedWanted)
        give(rig, transfer, 2)
        # Both orders are right, because the first block already has its place.
        assert {rig.decode.take(), rig.decode.take()} == {BlocksComing(transfer, 2), BlocksLanded(transfer, 1)}
        rig.decode.thread.accept_blocks(transfer, (1,))
        landed = rig.decode.next(FetchLanded)
        assert (landed.landed, rig.decode.read(7, 1)) == (2, sent[: 2 * BLOCK_BYTES])
        assert rig.prefill.next(PushEnded).outcome is PushOutcome.DONE


def test_paced_blocks_that_the_holder_lacks_leave_their_places(mapped_or_not: bool) -> None:
    with pair() as rig:
        paced = replace(order(rig), paced_blocks=3)
        rig.decode.thread.fetch(paced)
        rig.prefill.next(CachedWanted)
        give(rig, paced.transfer_id, 0)
        assert rig.decode.next(FetchLanded).landed == 0
        assert rig.prefill.next(PushEnded).outcome is PushOutcome.DONE


# ------------------------------------------------------------ endings


def test_a_cancel_midway_leaves_nothing_held() -> None:
    with pair(config=PATIENT) as rig:
        transfer = ordered(rig)
        rig.prefill.thread.push(transfer, 0, SOURCES[:1])
        eventually(lambda: rig.decode.thread.stats().bytes_received > 0)
        rig.decode.thread.cancel_fetch(transfer)
        assert rig.decode.next(FetchCancelled) == FetchCancelled(transfer, ())
        rig.prefill.next(PushCancelled)
        assert rig.prefill.next(PushEnded) == PushEnded(transfer, PushOutcome.CANCELLED)
        rig.prefill.thread.push(transfer, 1, SOURCES[1:])
        rig.prefill.thread.held(transfer, 3)
        give(rig, ordered(rig), 3)
        assert rig.decode.next(FetchLanded).landed == 3


def test_a_cancel_waits_for_what_is_still_written() -> None:
    fabric = Fabric()
    with pair(config=PATIENT, transport=lambda: InprocTransport(fabric)) as rig:
        transfer = ordered(rig)
        fabric.hold()
        rig.prefill.thread.push(transfer, 0, SOURCES[:2])
        eventually(lambda: fabric.stuck() == 2)
        rig.decode.thread.cancel_fetch(transfer)
        assert rig.decode.next(FetchCancelled).quarantined == PLACES[:2]
        rig.prefill.next(PushCancelled)
        fabric.release()
        eventually(lambda: rig.decode.thread.stats().quarantined_blocks == 0)
        rig.prefill.next(PushEnded)


def test_a_holder_that_dies_leaves_the_blocks_that_have_landed() -> None:
    with pair(config=PATIENT) as rig:
        sent = rig.prefill.fill(*SOURCES)
        transfer = ordered(rig)
        rig.prefill.thread.push(transfer, 0, SOURCES[:2])
        eventually(lambda: rig.decode.thread.stats().bytes_received == 2 * BLOCK_BYTES)
        rig.prefill.close()
        failed = rig.decode.next(FetchFailed)
        assert (failed.transfer_id, failed.quarantined) == (transfer, ())
        assert rig.decode.read(*PLACES[:2])[: failed.landed * BLOCK_BYTES] == sent[: failed.landed * BLOCK_BYTES]
        # The digests may have been lost with the holder.
        assert failed.landed in (0, 2)


def test_an_asker_that_dies_lets_the_blocks_go() -> None:
    with pair() as rig:
        transfer = ordered(rig)
        rig.prefill.thread.push(transfer, 0, SOURCES[:1])
        rig.decode.close()
        rig.prefill.next(PushCancelled)
        assert rig.prefill.next(PushEnded).transfer_id == transfer


def test_a_holder_that_refuses() -> None:
    with pair() as rig:
        transfer = ordered(rig)
        rig.prefill.thread.fail_push(transfer, "busy", FailureCause.LOAD)
        failed = rig.decode.next(FetchFailed)
        assert (failed.reason, failed.kind, failed.landed) == ("busy", FailureKind.OVERLOADED, 0)
        rig.prefill.next(PushEnded)


def test_a_holder_that_does_not_answer_in_time() -> None:
    with pair(config=PATIENT) as rig:
        # The time is not meant for the handshake.
        give(rig, ordered(rig), 0)
        rig.decode.next(FetchLanded)
        rig.prefill.next(PushEnded)
        rig.decode.thread.fetch(order(rig, deadline_s=0.3))
        rig.prefill.next(CachedWanted)
        assert rig.decode.next(FetchFailed).kind is FailureKind.DEADLINE
        rig.prefill.next(PushCancelled)
        rig.prefill.next(PushEnded)


def test_a_holder_that_lies_ends_that_fetch_alone() -> None:
    with engine(config=PATIENT) as asker, FakePrefill() as holder:
        rig = Pair(asker, asker)
        asker.thread.fetch(order(rig, target=holder.target))
        holder.welcome()
        request = holder.next(CachedRequest)
        asker.thread.fetch(order(rig, target=holder.target))
        other = holder.next(CachedRequest)
        holder.send(Held(request.transfer_id, 4))
        failed = asker.next(FetchFailed)
        assert (failed.transfer_id, failed.kind) == (request.transfer_id, FailureKind.CORRUPT)
        assert holder.next(Cancel).transfer_id == request.transfer_id
        holder.send(FirstToken(other.transfer_id, (SampledToken(1),), 0))
        assert asker.next(FetchFailed).kind is FailureKind.CORRUPT
        assert holder.next(Cancel).transfer_id == other.transfer_id
        asker.thread.fetch(order(rig, target=holder.target))
        holder.send(Held(holder.next(CachedRequest).transfer_id, 0))
        assert asker.next(FetchLanded).landed == 0
        holder.next(Done)


def test_an_order_for_cached_blocks_has_to_make_sense() -> None:
    with pair() as rig:
        good = order(rig)
        for bad in (
            replace(good, hashes=()),
            replace(good, hashes=HASHES[:2]),
            replace(good, hashes=(*HASHES[:2], b"short")),
            replace(good, block_ids=(1, 1, 2)),
            replace(good, block_ids=(1, 2, 999)),
            replace(good, hashes=HASHES[:1] * 65_537, paced_blocks=65_537),
        ):
            with pytest.raises(ValueError):
                rig.decode.thread.fetch(bad)
        with pytest.raises(ValueError, match="hashes"):
            rig.decode.thread.offer(rig.target, ())
        rig.decode.thread.fetch(good)
        with pytest.raises(ValueError, match="already"):
            rig.decode.thread.fetch(good)


def test_a_request_of_a_newer_engine_that_asks_for_more_is_refused_at_once() -> None:
    with engine(config=PATIENT) as holder, FakeDecode(holder.address) as asker:
        asker.greet()
        transfer = TransferId(new_id(), 0, asker.boot_id)
        request = CachedRequest(transfer_id=transfer, tag=3, hashes=HASHES, deadline_s=9.0)
        newer: Any = msgspec.defstruct("Newer", [("urgent", bool)], bases=(CachedRequest,), kw_only=True)
        asker.send(newer(**msgspec.structs.asdict(request), urgent=True))
        failed = asker.next(Failed)
        assert failed.transfer_id == transfer and "urgent" in failed.reason


# ------------------------------------------------------------ offers


def test_an_offer_meets_the_other_engine_and_says_where_the_blocks_are() -> None:
    with pair() as rig:
        content = rig.decode.fill(*SOURCES)
        rig.decode.thread.offer(rig.target, HASHES, "chat-1")
        offered = rig.prefill.next(BlocksOffered)
        assert (offered.hashes, offered.request_id) == (HASHES, "chat-1")
        assert (offered.holder.control, offered.holder.boot_id) == (rig.decode.address, rig.decode.boot_id)
        # The engine that got the offer fetches the blocks, the other way round.
        transfer = TransferId(new_id(), 0, rig.prefill.boot_id)
        rig.prefill.thread.fetch(CachedFetchOrder(transfer, offered.holder, offered.hashes, PLACES, 30.0))
        assert rig.decode.next(CachedWanted).hashes == HASHES
        rig.decode.thread.push(transfer, 0, SOURCES)
        rig.decode.thread.held(transfer, 3)
        assert rig.prefill.next(FetchLanded).landed == 3
        assert rig.prefill.read(*PLACES) == content
        assert rig.decode.next(PushEnded).outcome is PushOutcome.DONE


def test_while_the_handshake_lasts_the_newest_offer_of_each_text_waits() -> None:
    other = (*HASHES[:2], os.urandom(32))
    with engine(config=PATIENT) as sender, FakePrefill() as receiver:
        for count in (1, 2, 3):
            # Two choices of one request begin with the same prompt.
            sender.thread.offer(receiver.target, HASHES[:count], "chat-1")
            sender.thread.offer(receiver.target, other[:count], "chat-1")
        receiver.welcome()
        heard = [receiver.next(Offer) for _ in range(2)]
        assert [tuple(offer.hashes) for offer in heard] == [HASHES, other]
        sender.thread.offer(receiver.target, HASHES[:1], "chat-1")
        assert len(receiver.next(Offer).hashes) == 1


@pytest.mark.parametrize("late", [False, True])
def test_an_offer_does_not_wait_longer_than_a_lease(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with world(1, 1, monkeypatch) as made:
        made.offer(0)
        made.now += CONFIG.lease_ms / 1000 if late else 0
        for node in range(4):
            made.turn(node)
        made.settle()
        assert made.offers_heard == (0 if late else 1)


def test_offers_to_an_engine_that_reads_nothing_do_not_pile_up() -> None:
    with engine(config=PATIENT) as sender, FakePrefill() as receiver:
        sender.thread.offer(receiver.target, HASHES, "first")
        receiver.welcome()
        receiver.next(Offer)
        for number in range(200):
            sender.thread.offer(receiver.target, HASHES, f"chat-{number}")
        # The order comes after all offers, so when it has failed, all offers that will be sent were sent.
        sender.thread.fetch(order(Pair(sender, sender), target=receiver.target, deadline_s=0.001))
        assert sender.next(FetchFailed).kind is FailureKind.DEADLINE
        assert [receiver.next(Offer).request_id for _ in range(63)] == [f"chat-{number}" for number in range(63)]
        receiver.next(CachedRequest)
        receiver.next(Cancel)
        sender.thread.fetch(order(Pair(sender, sender), target=receiver.target))
        receiver.send(Held(receiver.next(CachedRequest).transfer_id, 0))
        sender.next(FetchLanded)
        receiver.next(Done)
        sender.thread.offer(receiver.target, HASHES, "again")
        assert receiver.next(Offer).request_id == "again"


def test_an_engine_offers_only_what_it_holds_itself() -> None:
    with engine(config=PATIENT) as receiver, FakeDecode(receiver.address) as sender:
        sender.greet()
        other = PrefillTarget("another", receiver.address, new_id())
        sender.send(Offer(other, HASHES))
        sender.send(Ping(sender.boot_id))
        sender.next(Pong)
        assert receiver.quiet()
        own = PrefillTarget("itself", "tcp://127.0.0.1:9", sender.boot_id)
        sender.send(Offer(own, HASHES))
        assert receiver.next(BlocksOffered).holder == own


def test_an_offer_of_a_stranger_is_answered_by_the_need_for_a_handshake() -> None:
    with engine(config=PATIENT) as receiver, FakeDecode(receiver.address) as sender:
        sender.send(Offer(PrefillTarget("itself", "tcp://127.0.0.1:9", sender.boot_id), HASHES))
        assert sender.next(Refused).field == "handshake"
        assert receiver.quiet()


def test_offers_that_nobody_can_get_harm_nothing() -> None:
    with pair() as rig:
        nobody = PrefillTarget("nobody", "tcp://127.0.0.1:9", new_id())
        past = msgspec.structs.replace(rig.target, boot_id=new_id())
        nowhere = msgspec.structs.replace(rig.target, control="?", boot_id=new_id())
        for target in (nobody, past, nowhere):
            rig.decode.thread.offer(target, HASHES)
            rig.decode.thread.offer(target, HASHES)
        rig.decode.thread.offer(PrefillTarget("itself", rig.decode.address, rig.decode.boot_id), HASHES)
        give(rig, ordered(rig), 3)
        assert rig.decode.next(FetchLanded).landed == 3
        assert not rig.decode.thread.stats().failures


def test_an_offer_for_a_past_boot_does_not_end_fetches_from_the_present_one() -> None:
    with pair(config=PATIENT) as rig:
        transfer = ordered(rig)
        rig.decode.thread.offer(msgspec.structs.replace(rig.target, boot_id=new_id()), HASHES)
        give(rig, transfer, 3)
        assert rig.decode.next(FetchLanded).transfer_id == transfer


def test_an_offer_for_a_past_boot_does_not_end_the_connection_to_the_present_one() -> None:
    with pair(config=PATIENT) as rig:
        give(rig, ordered(rig), 3)
        rig.decode.next(FetchLanded)
        rig.prefill.next(PushEnded)
        rig.decode.thread.offer(msgspec.structs.replace(rig.target, boot_id=new_id()), HASHES)
        give(rig, ordered(rig), 3)
        rig.decode.next(FetchLanded)
        assert rig.decode.thread.stats().handshakes == 1
