"""Tests engines of two versions over real sockets: a real engine, and one that speaks as the next release may."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.config import TransferConfig
from pdserve.control.frame import NAMED, Purpose, Sealer
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.transfer import Examine, Examined, Failed, Hello, Ping, Pong, PrefillRequest, Refused, Welcome
from pdserve.wire.version import PROTOCOL_VERSION, SPOKEN
from pdserve_kvtransfer.events import (
    FailureKind,
    FetchFailed,
    PushWanted,
)
from tests.kvtransfer.fakes import FakeDecode, FakePrefill
from tests.kvtransfer.rig import PATIENT, SAMPLING, SECRET, SPEC, WAIT_S, Pair, engine


class NextHello(Hello, frozen=True, tag_field="kind", tag="hello"):
    colour: str = "blue"


NEXT_SPEC = msgspec.structs.replace(SPEC, protocol=PROTOCOL_VERSION + 1, oldest_protocol=PROTOCOL_VERSION)


class NextRequest(PrefillRequest, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="prefill"):
    adapter: str = ""


def test_a_newer_decode_engine_is_served_and_what_only_it_knows_is_refused_by_name() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        decode.send(NextHello(decode.boot_id, NEXT_SPEC, [decode.link.address]))
        decode.link.connect(decode.next(Welcome).rank_addresses)
        transfers = [TransferId(new_id(), 0, decode.boot_id) for _ in range(2)]
        for transfer, adapter in zip(transfers, ("", "lora-7"), strict=True):
            decode.send(
                NextRequest(
                    transfer_id=transfer,
                    tag=77,
                    token_ids=[1, 2],
                    first_block=0,
                    sampling=SAMPLING,
                    deadline_s=10.0,
                    adapter=adapter,
                )
            )
        assert prefill.next(PushWanted).transfer_id == transfers[0]
        failed = decode.next(Failed)
        assert failed.transfer_id == transfers[1]
        assert "unknown field `adapter`" in failed.reason


def test_an_order_that_nobody_can_decode_ends_nothing() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        decode.greet()
        assert decode.peer is not None
        nested = b"\x82\xa4kind\xa7prefill\xa1x" + b"\x91" * 100_000 + b"\xc0"
        decode.socket.send(decode.sealer._seal(NAMED, decode.boot_id, decode.peer + nested))
        decode.send(Ping(decode.boot_id))
        decode.next(Pong)


def test_a_newer_prefill_engine_is_fetched_from() -> None:
    with FakePrefill() as prefill, engine(config=PATIENT) as decode:
        decode.thread.fetch(Pair(decode, decode).order((0,), target=prefill.target))
        hello = prefill.next(Hello)
        prefill.link.connect(hello.rank_addresses)
        prefill.send(Welcome(prefill.boot_id, NEXT_SPEC, [prefill.link.address]))
        prefill.next(PrefillRequest)


@pytest.mark.parametrize("newer", [1, 3])
def test_engines_without_a_common_version_say_so_on_both_sides(newer: int) -> None:
    far = msgspec.structs.replace(SPEC, protocol=SPOKEN.newest + newer + 1, oldest_protocol=SPOKEN.newest + newer)
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        decode.send(Hello(decode.boot_id, far, [decode.link.address]))
        refused = decode.next(Refused)
        assert (refused.field, refused.ours, refused.theirs) == ("protocol", str(SPOKEN), str(far.spoken))
    with FakePrefill() as there, engine(config=PATIENT) as here:
        here.thread.fetch(Pair(here, here).order((0,), target=there.target))
        there.next(Hello)
        there.send(Welcome(there.boot_id, far, [there.link.address]))
        failed = here.next(FetchFailed)
        assert failed.kind is FailureKind.MISFIT
        assert f"protocol is {SPOKEN} here and {far.spoken} there" in failed.reason


# ------------------------------------------------------------ frames for another engine


def test_frames_for_one_prefill_engine_are_good_at_no_other() -> None:
    with (
        engine() as meant,
        engine() as other,
        FakeDecode(meant.address) as decode,
        FakeDecode(other.address) as thief,
    ):
        hello = decode.seal(Hello(decode.boot_id, SPEC, [decode.link.address]))
        for socket in (thief.socket, decode.socket):
            socket.send(hello)
        assert thief.socket.poll(int(WAIT_S * 1000))
        thief.socket.recv()  # This is the other engine's refusal, which names the decode engine and not the thief.
        decode.next(Welcome)
        assert other.thread.stats().handshakes == 0
        assert other.thread.stats().frames_dropped == 1


def test_frames_for_one_decode_engine_are_good_at_no_other() -> None:
    with FakePrefill() as prefill, engine(config=PATIENT) as decode:
        decode.thread.fetch(Pair(decode, decode).order((0,), target=prefill.target))
        prefill.welcome()
        request = prefill.next(PrefillRequest)
        failed = Failed(request.transfer_id, "said to another")
        prefill.socket.send_multipart([prefill.route, prefill.sealer.seal(failed, new_id())])
        prefill.socket.send_multipart([prefill.route, prefill.sealer.seal(failed)])
        foreign = Sealer(SECRET, Purpose.TRANSFER, new_id())
        prefill.socket.send_multipart([prefill.route, foreign.seal(failed, decode.boot_id)])
        prefill.send(Failed(request.transfer_id, "said to this one"))
        assert "said to this one" in decode.next(FetchFailed).reason


def test_only_an_examination_may_name_nobody() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        decode.greet()
        decode.socket.send(decode.sealer.seal(Ping(decode.boot_id)))
        decode.socket.send(decode.sealer.seal(Hello(decode.boot_id, SPEC, [decode.link.address])))
        decode.send(Examine(decode.boot_id, SPOKEN.newest, SPOKEN.oldest))
        decode.next(Examined)  # Nothing may come before it.


# ------------------------------------------------------------ heartbeats


def test_a_decode_engine_pings_as_often_as_the_prefill_engines_lease_needs() -> None:
    # By its own setting, the engine would send its first ping too late for this test.
    slow = TransferConfig(heartbeat_ms=30_000, lease_ms=60_000)
    with FakePrefill() as prefill, engine(config=slow) as decode:
        decode.thread.fetch(Pair(decode, decode).order((0,), target=prefill.target))
        hello = prefill.next(Hello)
        prefill.link.connect(hello.rank_addresses)
        prefill.send(Welcome(prefill.boot_id, SPEC, [prefill.link.address], lease_ms=40))
        prefill.next(PrefillRequest)
        for _ in range(3):
            prefill.next(Ping)


def test_a_prefill_engine_says_how_long_its_lease_is() -> None:
    with engine(config=PATIENT) as prefill, FakeDecode(prefill.address) as decode:
        assert decode.greet().lease_ms == PATIENT.lease_ms
