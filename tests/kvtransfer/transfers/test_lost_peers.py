"""Tests that a fault of one peer ends only that peer's transfers: the thread and the others' transfers go on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdserve.control.frame import MAX_AGE_S
from pdserve.errors import AuthenticationFailed, TransferError
from pdserve.wire.rank import Direction
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import Cancel, Failed, Hello, LinkAddress, Ping, Pong, PrefillRequest, Refused, Welcome
from pdserve_kvtransfer import rank_thread
from pdserve_kvtransfer.events import (
    FailureKind,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    PeersMet,
    PushCancelled,
    PushEnded,
    PushOutcome,
    PushWanted,
)
from pdserve_kvtransfer.region import Memory
from tests.kvtransfer.fakes import FakeDecode, FakePrefill, prefill_request
from tests.kvtransfer.inproc import Fabric, InprocLink, InprocTransport
from tests.kvtransfer.rig import PATIENT, SPEC, Pair, engine, pair
from tests.kvtransfer.test_ranks import nodes


def lands(rig: Pair) -> None:
    transfer_id = rig.fetch((2, 3))
    rig.prefill.next(PushWanted)
    rig.prefill.thread.push(transfer_id, 0, (0, 1))
    rig.prefill.thread.first_token(transfer_id, (SampledToken(1),), 0)
    rig.decode.next(FirstTokenArrived)
    rig.decode.next(FetchLanded)
    rig.prefill.next(PushEnded)


def of_another_ucx(address: bytes) -> bytes:
    """Returns an address in a form that this version of UCX does not know."""
    known = msgspec.msgpack.decode(address, type=LinkAddress)
    worker = bytes([known.worker[0] ^ 0x0F]) + known.worker[1:]
    return msgspec.msgpack.encode(msgspec.structs.replace(known, worker=worker))


def test_a_dropped_message_of_a_prefill_node_ends_its_fetches_at_once() -> None:
    """Its clock jumps and comes back. Pings would keep its lease for ever."""
    with engine(config=PATIENT) as decode, FakePrefill() as stranger:
        decode.thread.fetch(Pair(decode, decode).order((5,), target=stranger.target))
        request = stranger.welcome_and_take()
        stranger.clock_late_s = 2 * MAX_AGE_S
        stranger.send(Failed(request.transfer_id, "this message comes too late"))
        stranger.clock_late_s = 0.0
        failed = decode.next(FetchFailed)
        assert failed.kind is FailureKind.PEER_LOST
        assert "clock" in failed.reason


def test_a_dropped_answer_to_the_greeting_ends_the_fetches_that_wait_for_it() -> None:
    """The clock is right again, so pings are answered, and nobody greets twice."""
    with engine(config=PATIENT) as decode, FakePrefill() as stranger:
        decode.thread.fetch(Pair(decode, decode).order((5,), target=stranger.target))
        stranger.next(Hello)
        stranger.clock_late_s = 2 * MAX_AGE_S
        stranger.send(Welcome(stranger.boot_id, SPEC, [stranger.link.address]))
        stranger.clock_late_s = 0.0
        failed = decode.next(FetchFailed)
        assert failed.kind is FailureKind.PEER_LOST
        assert "clock" in failed.reason
        decode.thread.fetch(Pair(decode, decode).order((5,), target=stranger.target))
        stranger.next(Hello)


def test_a_dropped_greeting_is_refused_so_that_it_comes_again() -> None:
    with engine(config=PATIENT) as prefill, FakeDecode(prefill.address) as stranger:
        stranger.seal(Ping(stranger.boot_id))  # it asks for the prefill engine's name
        stranger.clock_late_s = 2 * MAX_AGE_S
        stranger.send(Hello(stranger.boot_id, SPEC, [stranger.link.address]))
        stranger.clock_late_s = 0.0
        assert stranger.next(Refused).field == "handshake"
        stranger.greet()


def test_an_engine_that_fell_silent_is_greeted_again_and_again() -> None:
    """The greeting that followed its silence may have been dropped."""
    with engine(config=replace(PATIENT, lease_ms=100, heartbeat_ms=50)) as decode, FakePrefill() as stranger:
        decode.thread.fetch(Pair(decode, decode).order((5,), target=stranger.target))
        stranger.next(Hello)
        assert decode.next(FetchFailed).kind is FailureKind.LEASE_EXPIRED
        hellos = 0  # the one that follows the silence, and the one that follows that
        while hellos < 2:
            if not stranger.socket.poll(50):
                decode.thread.fetch(Pair(decode, decode).order((5,), target=stranger.target))
                assert "silent" in decode.next(FetchFailed).reason
                continue
            with suppress(AuthenticationFailed):  # frames of connections that have ended
                opened = stranger.opener.open_from(stranger.socket.recv_multipart()[1])
                hellos += opened.named and isinstance(opened.message, Hello)


def test_an_engine_that_fell_silent_is_greeted_anew_at_once_when_it_is_to_be_met() -> None:
    """The last greeting may have been lost with the network, and its connection tries again only after seconds."""
    with engine(config=replace(PATIENT, lease_ms=2000, heartbeat_ms=50)) as decode, FakePrefill() as stranger:
        rig = Pair(decode, decode)
        decode.thread.fetch(rig.order((5,), target=stranger.target))
        stranger.next(Hello)
        assert decode.next(FetchFailed).kind is FailureKind.LEASE_EXPIRED
        stranger.next(Hello)  # the greeting that follows, which is not answered
        decode.thread.meet(1, (stranger.target,))
        decode.thread.fetch(rig.order((6,), target=stranger.target))
        stranger.welcome_and_take()


def test_an_engine_that_has_answered_since_its_silence_is_silent_no_more() -> None:
    """A connection that breaks later costs the next fetch a handshake, and no failure."""
    with engine(config=replace(PATIENT, lease_ms=2000, heartbeat_ms=50)) as decode, FakePrefill() as stranger:
        rig = Pair(decode, decode)
        decode.thread.fetch(rig.order((5,), target=stranger.target))
        stranger.next(Hello)
        assert decode.next(FetchFailed).kind is FailureKind.LEASE_EXPIRED
        stranger.welcome()
        decode.thread.fetch(rig.order((6,), target=stranger.target))
        while not stranger.socket.poll(20):
            if not decode.quiet():  # it had not read the answer yet
                assert "silent" in decode.next(FetchFailed).reason
                decode.thread.fetch(rig.order((6,), target=stranger.target))
        stranger.next(PrefillRequest)
        stranger.send(Refused(stranger.boot_id, "handshake", "none", "assumed"))
        assert decode.next(FetchFailed).kind is FailureKind.PEER_LOST
        decode.thread.fetch(rig.order((7,), target=stranger.target))
        stranger.welcome_and_take()


def test_a_greeting_that_is_never_answered_fails_though_pings_are() -> None:
    with engine(config=replace(PATIENT, lease_ms=500, heartbeat_ms=50)) as decode, FakePrefill() as stranger:
        decode.thread.fetch(Pair(decode, decode).order((5,), target=stranger.target))
        stranger.next(Hello)
        while decode.quiet():
            if stranger.socket.poll(20):
                stranger.socket.recv_multipart()
                stranger.send(Pong(stranger.boot_id))
        failed = decode.next(FetchFailed)
        assert failed.kind is FailureKind.PEER_LOST
        assert "greeting" in failed.reason


def test_engines_are_met_before_any_order_but_those_that_are_gone_or_never_answer() -> None:
    quick = replace(PATIENT, lease_ms=100, heartbeat_ms=50)  # a greeting has ten leases
    with pair(config=quick) as rig, FakePrefill() as silent, engine(config=PATIENT) as gone:
        gone.close()
        dead = PrefillTarget("p1", gone.address, gone.boot_id)
        own = PrefillTarget("d0", rig.decode.address, rig.decode.boot_id)
        rig.decode.thread.meet(1, (silent.target, dead, own, rig.target))
        silent.next(Hello)
        assert rig.decode.next(PeersMet).number == 1
        assert rig.prefill.thread.stats().handshakes == 1
        rig.decode.thread.meet(2, (rig.target,))
        assert rig.decode.next(PeersMet).number == 2
        rig.decode.thread.fetch(rig.order((5,)))
        rig.prefill.next(PushWanted)
        assert rig.prefill.thread.stats().handshakes == 1
        # Nothing is left of the greeting that was not answered.
        rig.decode.thread.fetch(Pair(rig.decode, rig.decode).order((6,), target=silent.target))
        silent.next(Hello)


def test_a_dropped_message_of_a_decode_node_ends_its_pushes_at_once() -> None:
    with engine(config=PATIENT) as prefill, FakeDecode(prefill.address) as stranger:
        stranger.greet()
        request = prefill_request(stranger.boot_id)
        stranger.send(request)
        prefill.next(PushWanted)
        stranger.clock_late_s = 2 * MAX_AGE_S
        stranger.send(Cancel(request.transfer_id))
        stranger.clock_late_s = 0.0
        assert "clock" in stranger.next(Failed).reason
        assert stranger.next(Refused).field == "handshake"
        assert prefill.next(PushCancelled).transfer_id == request.transfer_id
        assert prefill.next(PushEnded).outcome is PushOutcome.PEER_LOST


def test_a_spoilt_message_of_a_prefill_node_ends_its_fetches_at_once() -> None:
    """Nothing is sent twice, and pings would keep its lease for ever."""
    with engine(config=PATIENT) as decode, FakePrefill() as stranger:
        decode.thread.fetch(Pair(decode, decode).order((5,), target=stranger.target))
        request = stranger.welcome_and_take()
        frame = stranger.sealer.seal(Failed(request.transfer_id, "no"), stranger.peer)
        stranger.socket.send_multipart([stranger.route, frame[:-1] + bytes([frame[-1] ^ 1])])
        failed = decode.next(FetchFailed)
        assert failed.kind is FailureKind.CORRUPT
        assert "spoilt" in failed.reason


def test_a_spoilt_message_of_a_decode_node_ends_its_pushes_at_once() -> None:
    with engine(config=PATIENT) as prefill, FakeDecode(prefill.address) as stranger:
        stranger.greet()
        request = prefill_request(stranger.boot_id)
        stranger.send(request)
        prefill.next(PushWanted)
        stranger.socket.send(stranger.seal(Cancel(request.transfer_id))[:-1])
        assert "spoilt" in stranger.next(Failed).reason
        assert prefill.next(PushCancelled).transfer_id == request.transfer_id
        assert prefill.next(PushEnded).outcome is PushOutcome.PEER_LOST


@pytest.mark.parametrize("refuses_too", [False, True])
def test_a_prefill_node_that_ucx_cannot_reach_ends_its_own_transfers_alone(refuses_too: bool) -> None:
    with pair(config=PATIENT) as rig:
        lands(rig)
        for block in (5, 6):
            with FakePrefill() as stranger:
                rig.decode.thread.fetch(rig.order((block,), target=stranger.target))
                stranger.next(Hello)
                address = stranger.link.address if refuses_too else of_another_ucx(stranger.link.address)
                stranger.send(Welcome(stranger.boot_id, SPEC, [address]))
                if refuses_too:
                    stranger.send(Refused(stranger.boot_id, "handshake", "none", "assumed"))
                failed = rig.decode.next(FetchFailed)
                assert (failed.kind, failed.quarantined) == (FailureKind.PEER_LOST, ())
        lands(rig)


def test_a_decode_node_that_ucx_cannot_reach_is_told_and_harms_nobody() -> None:
    with pair(config=PATIENT) as rig, FakeDecode(rig.prefill.address) as stranger:
        stranger.send(Hello(stranger.boot_id, SPEC, [of_another_ucx(stranger.link.address)]))
        stranger.next(Welcome)
        assert stranger.next(Refused).field == "handshake"
        lands(rig)


@pytest.mark.parametrize("tp_size", [0, -1, 2**40])
def test_a_decode_node_of_an_impossible_number_of_ranks_is_refused(tp_size: int) -> None:
    with engine(config=PATIENT) as prefill, FakeDecode(prefill.address) as stranger:
        stranger.send(Hello(stranger.boot_id, msgspec.structs.replace(SPEC, tp_size=tp_size), []))
        stranger.next(Refused)
        with FakeDecode(prefill.address) as other:
            other.greet()
            other.send(Ping(other.boot_id))
            other.next(Pong)


def test_more_ranks_than_any_node_has_are_refused_without_counting_to_them() -> None:
    with engine(config=PATIENT) as prefill, FakeDecode(prefill.address) as stranger:
        many = 3 * 300_000
        stranger.send(Hello(stranger.boot_id, msgspec.structs.replace(SPEC, tp_size=many), [b""] * many))
        assert stranger.next(Refused).field == "tp_size"


class ScriptedTransport(InprocTransport):
    """Shows each link that it opens to ``on_open``, which may raise or change it."""

    def __init__(self, fabric: Fabric, on_open: Callable[[InprocLink, int], None]) -> None:
        super().__init__(fabric)
        self._on_open = on_open

    def open_link(self, memory: Memory) -> InprocLink:
        link = super().open_link(memory)
        self._on_open(link, len(self.links))
        return link


def test_a_defect_in_one_peers_handling_ends_that_peer_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """This holds on both sides: the second link that an engine opens fails at every look."""
    fabric = Fabric()

    def second_fails(link: InprocLink, number: int) -> None:
        def fail() -> bool:
            raise KeyError("a defect")

        if number == 2:
            link.progress = fail  # type: ignore[method-assign]

    def transport() -> ScriptedTransport:
        return ScriptedTransport(fabric, second_fails)

    with (
        engine(config=PATIENT, transport=transport) as prefill,
        engine(config=PATIENT, transport=transport) as decode,
        engine(config=PATIENT, transport=transport) as other_prefill,
        engine(config=PATIENT, transport=transport) as other_decode,
    ):
        lands(Pair(prefill, decode))
        other_decode.thread.fetch(Pair(prefill, other_decode).order((1,)))
        assert other_decode.next(FetchFailed).kind is FailureKind.PEER_LOST
        decode.thread.fetch(Pair(other_prefill, decode).order((1,)))
        failed = decode.next(FetchFailed)
        assert failed.kind is FailureKind.PEER_LOST and "KeyError" in failed.reason
        lands(Pair(prefill, decode))
    assert sum("a defect" in str(record.exc_info) for record in caplog.records) >= 2


def test_a_link_that_cannot_be_opened_on_one_rank_fails_one_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nodes(2, 2, 2, tmp_path, Fabric()) as both:

        def refuse(*_: object) -> object:
            raise TransferError("no descriptors are left")

        with monkeypatch.context() as patch:
            patch.setitem(rank_thread._MAKE_PORT, Direction.FETCH, refuse)
            order = both.rig.order((3, 8))
            both.decode.engine.thread.fetch(order)
            assert "no descriptors" in both.decode.engine.next(FetchFailed).reason
        both.decode.engine.thread.fetch(both.rig.order((3, 8)))
        both.prefill.engine.next(PushWanted)
