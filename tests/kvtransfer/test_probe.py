"""Tests the probes of ``pdserve doctor``: they measure real UCX, and read and write no byte of KV memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from pdserve.errors import HandshakeRefused, PeerLost
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.transfer import (
    MAX_PROBE_BYTES,
    MAX_PROBE_MESSAGE_BYTES,
    Examine,
    Examined,
    Probe,
    ProbeEnd,
    ProbeOpened,
    ProbeRefused,
)
from pdserve.wire.version import SPOKEN
from pdserve_kvtransfer.events import FetchLanded, FirstTokenArrived, PushEnded, PushOutcome, PushWanted
from pdserve_kvtransfer.pieces import label_of
from pdserve_kvtransfer.probe import host as probe_host
from pdserve_kvtransfer.probe.examiner import (
    LOAD_TAG,
    MAX_ASKER_BYTES,
    PAUSE_S,
    PING_TAG,
    START_TAG,
    Examiner,
    ProbeAsker,
    probe_memory,
)
from pdserve_kvtransfer.region import machine_identity
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from tests.eventually import eventually
from tests.kvtransfer.fakes import FakeDecode, FakePrefill
from tests.kvtransfer.inproc import Fabric, InprocTransport
from tests.kvtransfer.rig import SECRET, SPEC, WAIT_S, Engine, engine, pair

MESSAGE_BYTES = 96 * 1024
MESSAGES = 40


def probe_of(asker: FakeDecode, *, message_bytes: int = MESSAGE_BYTES, messages: int = MESSAGES) -> Probe:
    return Probe(boot_id=asker.boot_id, address=asker.link.address, message_bytes=message_bytes, messages=messages)


def opened(asker: FakeDecode) -> ProbeOpened:
    asker.send(probe_of(asker))
    answer = asker.next(ProbeOpened)
    asker.link.connect([answer.address])
    return answer


def is_opened(asker: FakeDecode) -> bool:
    """Returns whether the engine opens a probe that this asker now asks for."""
    asker.send(probe_of(asker))
    assert asker.socket.poll(int(WAIT_S * 1000))
    return isinstance(asker.opener.open(asker.socket.recv()), ProbeOpened)


def examiner(of: Engine, secret: bytes = SECRET, tls: str = "") -> Examiner:
    return Examiner(of.address, secret, UcxTransport(tls))


def test_an_engine_says_what_it_is() -> None:
    with engine() as prefill, examiner(prefill) as asker:
        found = asker.examine(WAIT_S)
        assert found is not None
        assert (found.spec, found.boot_id) == (SPEC, prefill.boot_id)
        assert found.block_bytes == prefill.block_bytes
        assert (found.machine, found.ipc_namespace) == (machine_identity().machine, machine_identity().ipc_namespace)


def test_the_handshake_is_a_decode_engines() -> None:
    with engine() as prefill, examiner(prefill) as asker:
        assert asker.greet(SPEC, prefill.boot_id, WAIT_S)
        round_trip_s = asker.control_round_trip_s(WAIT_S)
        assert round_trip_s is not None and round_trip_s > 0
    with engine() as prefill, examiner(prefill) as asker, pytest.raises(HandshakeRefused, match="dtype"):
        asker.greet(msgspec.structs.replace(SPEC, dtype="fp32"), prefill.boot_id, WAIT_S)


def test_another_secret_gets_no_answer() -> None:
    with engine() as prefill, examiner(prefill, b"another secret") as asker:
        assert asker.examine(0.3) is None
        eventually(lambda: prefill.thread.stats().frames_dropped == 1)


def test_nobody_there_is_noticed_at_once() -> None:
    with (
        Examiner("tcp://127.0.0.1:1", SECRET, UcxTransport("")) as asker,
        pytest.raises(PeerLost, match="cannot be connected"),
    ):
        asker.examine(WAIT_S)


@pytest.mark.parametrize(("tls", "transport"), [("", "memory"), ("tcp", "tcp")])
def test_a_probe_measures_and_leaves_kv_memory_alone(tls: str, transport: str) -> None:
    with engine() as prefill, examiner(prefill, tls=tls) as asker:
        blocks = tuple(range(prefill.num_blocks))
        before = prefill.fill(*blocks)
        assert asker.examine(WAIT_S) is not None
        found = asker.probe(MESSAGE_BYTES, MESSAGES, WAIT_S)
        assert found.received == MESSAGES
        assert found.bytes_per_s > 0 and found.latency_s > 0
        assert any(transport in (lane.transport, lane.device) for lane in found.lanes), found.lanes
        assert prefill.read(*blocks) == before
        assert prefill.quiet() and prefill.thread.stats().bytes_sent == 0


def test_a_load_that_lands_in_one_look_has_a_rate() -> None:
    transport = InprocTransport(Fabric())
    sender, receiver = (transport.open_link(probe_memory(MESSAGE_BYTES)) for _ in range(2))
    sender.connect([receiver.address])
    receiver.connect([sender.address])
    sender.send([0] * MESSAGES, MESSAGE_BYTES, [label_of(LOAD_TAG, index) for index in range(MESSAGES)])
    landed, bytes_per_s = ProbeAsker(receiver, MESSAGE_BYTES, time.monotonic() + WAIT_S).load(MESSAGES)
    assert landed == MESSAGES
    assert bytes_per_s > 0
    transport.close()


def test_transfers_go_on_during_a_probe() -> None:
    with pair() as rig, FakeDecode(rig.prefill.address) as asker:
        opened(asker)
        asker.post(memoryview(b"go"), START_TAG, 0)
        asker.finish()
        sent = rig.prefill.fill(0, 1)
        transfer_id = rig.fetch((2, 3))
        rig.prefill.next(PushWanted)
        rig.prefill.thread.push(transfer_id, 0, (0, 1))
        rig.prefill.thread.first_token(transfer_id, (SampledToken(1),), 0)
        assert {type(rig.decode.take()) for _ in range(2)} == {FetchLanded, FirstTokenArrived}
        assert rig.decode.read(2, 3) == sent
        assert rig.prefill.next(PushEnded).outcome is PushOutcome.DONE


def test_one_probe_at_a_time_and_a_pause_between() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as first, FakeDecode(prefill.address) as second:
        opened(first)
        second.send(probe_of(second))
        assert "another probe" in second.next(ProbeRefused).reason
        first.send(ProbeEnd(first.boot_id))
        first.send(probe_of(first))
        assert "another probe" in first.next(ProbeRefused).reason, f"before {PAUSE_S} s are over"

        eventually(lambda: is_opened(second))


def test_only_its_asker_ends_a_probe() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as asker, FakeDecode(prefill.address) as other:
        opened(asker)
        other.send(ProbeEnd(other.boot_id))
        other.send(Examine(other.boot_id, SPOKEN.newest, SPOKEN.oldest))
        other.next(Examined)
        asker.post(memoryview(b"12345678"), PING_TAG, 7)
        asker.finish()
        back, content = asker.receive()
        assert (back.label, content) == (label_of(PING_TAG, 7), b"12345678")


def test_more_than_the_bound_is_refused() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as asker:
        size = MAX_PROBE_MESSAGE_BYTES
        asker.send(probe_of(asker, message_bytes=size, messages=MAX_PROBE_BYTES // size + 1))
        assert str(MAX_PROBE_BYTES) in asker.next(ProbeRefused).reason
        asker.send(probe_of(asker, message_bytes=size + 1))
        asker.send(Examine(asker.boot_id, SPOKEN.newest, SPOKEN.oldest))
        asker.next(Examined)
        assert prefill.thread.stats().frames_dropped == 1, "a frame that is beyond the message's own bounds"


def test_an_asker_that_sends_much_ends_its_probe() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as asker:
        before = prefill.fill(*range(prefill.num_blocks))
        opened(asker)
        asker.post(memoryview(bytearray(MAX_ASKER_BYTES + 1)), PING_TAG, 0)
        asker.link.progress()
        assert "may not send" in asker.next(ProbeRefused).reason
        assert prefill.read(*range(prefill.num_blocks)) == before


def test_an_asker_that_is_gone_holds_nothing() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as second:
        with FakeDecode(prefill.address) as first:
            opened(first)

        eventually(lambda: is_opened(second))


def test_an_engine_closes_during_a_probe() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as asker:
        opened(asker)
        asker.post(memoryview(b"go"), START_TAG, 0)
        asker.finish()
        prefill.close()
        assert "closing" in asker.next(ProbeRefused).reason


def test_a_probe_that_nobody_ends_is_over_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_host, "PROBE_LIMIT_S", 1.0)
    with engine() as prefill, FakeDecode(prefill.address) as asker:
        opened(asker)
        assert "takes at most" in asker.next(ProbeRefused).reason


def test_a_peer_that_ucx_does_not_reach_is_said_in_time() -> None:
    with FakePrefill() as silent, ThreadPoolExecutor(1) as pool:

        def ask() -> str:
            transport = UcxTransport("")
            with Examiner(silent.target.control, SECRET, transport) as asker, pytest.raises(PeerLost) as caught:
                asker.probe(MESSAGE_BYTES, MESSAGES, 0.5)
            return str(caught.value)

        asking = pool.submit(ask)
        silent.next(Probe)
        silent.send(ProbeOpened(silent.boot_id, silent.link.address))
        assert asking.result(WAIT_S) == "nothing came back over UCX"
        silent.next(ProbeEnd)
