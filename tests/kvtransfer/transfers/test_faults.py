"""Tests engines that die, restart, freeze or never existed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from pdserve.config import TransferConfig
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import Cancel, Done, Failed, FirstToken, Hello, Ping, Pong, Refused, Welcome
from pdserve_kvtransfer.events import (
    FailureKind,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    PushCancelled,
    PushEnded,
    PushOutcome,
    PushWanted,
)
from tests.eventually import eventually
from tests.kvtransfer.fakes import FakeDecode, FakePrefill, prefill_request
from tests.kvtransfer.program import BLOCK_BYTES, NUM_BLOCKS, pattern, state_engine
from tests.kvtransfer.rig import CONFIG, PATIENT, SPEC, WAIT_S, Engine, Pair, engine, pair

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("mapped_or_not")]


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    way = "mapped" if Engine.shares else "copied"
    argv = [sys.executable, "-m", "tests.kvtransfer.program", way, *arguments]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@contextmanager
def prefill_program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], PrefillTarget]]:
    with program("prefill", *arguments) as process:
        control, boot = line(process)
        yield process, PrefillTarget("p", control, bytes.fromhex(boot))


def big_decode(config: TransferConfig) -> Engine:
    return Engine(num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES, config=config)


def landed_blocks_are_right(decode: Engine, block_ids: tuple[int, ...], landed: int) -> bool:
    return all(
        decode.read(block_id) == bytes([pattern(index)]) * BLOCK_BYTES
        for index, block_id in enumerate(block_ids[:landed])
    )


def test_between_processes() -> None:
    block_ids = tuple(reversed(range(NUM_BLOCKS)))
    with prefill_program("all") as (_, target), engine_of(big_decode(CONFIG)) as decode:
        decode.thread.fetch(Pair(decode, decode).order(block_ids, target=target))
        decode.next(FirstTokenArrived)
        assert decode.next(FetchLanded).bytes == NUM_BLOCKS * BLOCK_BYTES
        assert landed_blocks_are_right(decode, block_ids, NUM_BLOCKS)


@contextmanager
def engine_of(made: Engine) -> Iterator[Engine]:
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("tls", ["", "tcp,self"])
def test_a_killed_prefill_process_is_noticed_without_a_lease(tls: str) -> None:
    block_ids = tuple(range(NUM_BLOCKS))
    config = TransferConfig(heartbeat_ms=100, lease_ms=60_000, ucx_tls=tls)
    with prefill_program("drip") as (process, target), engine_of(big_decode(config)) as decode:
        decode.thread.fetch(Pair(decode, decode).order(block_ids, target=target))
        # A block counts when its digest is there too. That of the first block came before the third block was pushed.
        eventually(lambda: decode.thread.stats().bytes_received >= 3 * BLOCK_BYTES)
        process.kill()
        failed = decode.next(FetchFailed)
        assert (failed.kind, failed.quarantined) == (FailureKind.PEER_LOST, ())
        assert 0 < failed.landed < NUM_BLOCKS
        assert landed_blocks_are_right(decode, block_ids, failed.landed)
        assert decode.thread.stats().quarantined_blocks == 0


def test_a_prefill_process_killed_in_the_middle_of_a_state_leaves_no_writer_behind() -> None:
    block_ids = (*reversed(range(NUM_BLOCKS)), NUM_BLOCKS)
    with prefill_program("state") as (process, target), engine_of(state_engine(PATIENT)) as decode:
        order = Pair(decode, decode).order(block_ids[:-1], target=target)
        decode.thread.fetch(replace(order, block_ids=block_ids))
        eventually(lambda: decode.thread.stats().bytes_received > 0)
        process.kill()
        failed = decode.next(FetchFailed)
        assert failed.landed <= len(block_ids) and set(failed.quarantined) <= set(block_ids)
        for index, block_id in enumerate(block_ids[: failed.landed]):
            assert set(decode.read(block_id)) == {pattern(index)}
        eventually(lambda: decode.thread.stats().quarantined_blocks == 0)
        left = decode.fill(NUM_BLOCKS)
        decode.has_news_within(0.2)
        assert decode.read(NUM_BLOCKS) == left, "nothing writes there any more"


def test_a_killed_prefill_process_fails_a_transfer_that_was_waiting() -> None:
    block_ids = tuple(range(NUM_BLOCKS))
    with prefill_program("stall") as (process, target), engine_of(big_decode(PATIENT)) as decode:
        decode.thread.fetch(Pair(decode, decode).order(block_ids, target=target))
        eventually(lambda: decode.thread.stats().bytes_received == NUM_BLOCKS // 2 * BLOCK_BYTES)
        process.kill()
        failed = decode.next(FetchFailed)
        assert failed.kind is FailureKind.PEER_LOST
        # A block counts only with its digest, and a digest may have been lost with the process.
        assert failed.landed <= NUM_BLOCKS // 2
        assert landed_blocks_are_right(decode, block_ids, failed.landed)


def test_a_frozen_prefill_process_runs_out_of_its_lease() -> None:
    block_ids = tuple(range(NUM_BLOCKS))
    with prefill_program("stall") as (process, target), engine_of(big_decode(CONFIG)) as decode:
        decode.thread.fetch(Pair(decode, decode).order(block_ids, target=target))
        eventually(lambda: decode.thread.stats().bytes_received == NUM_BLOCKS // 2 * BLOCK_BYTES)
        process.send_signal(signal.SIGSTOP)
        failed = decode.next(FetchFailed)
        assert failed.kind is FailureKind.LEASE_EXPIRED
        # A block counts only with its digest, and the process may have stopped before sending it.
        assert failed.landed <= NUM_BLOCKS // 2
        assert landed_blocks_are_right(decode, block_ids, failed.landed)
        assert decode.thread.stats().leases_expired_receiving == 1


def test_a_killed_decode_process_ends_the_push() -> None:
    prefill = Engine(num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES, config=PATIENT)
    with engine_of(prefill), program("decode", prefill.address, prefill.boot_id.hex()) as process:
        wanted = prefill.next(PushWanted)
        prefill.thread.push(wanted.transfer_id, 0, tuple(range(NUM_BLOCKS)))
        assert line(process) == ["receiving"]
        process.kill()
        assert prefill.next(PushCancelled).transfer_id == wanted.transfer_id
        ended = prefill.next(PushEnded)
        assert ended.outcome in (PushOutcome.PEER_LOST, PushOutcome.LEASE_EXPIRED)


def test_a_closed_connection_ends_what_a_former_boot_left() -> None:
    with (
        engine(config=PATIENT) as prefill,
        FakeDecode(prefill.address) as former,
        FakeDecode(prefill.address) as restarted,
    ):
        former.greet()
        former.send(prefill_request(former.boot_id))
        wanted = prefill.next(PushWanted)
        prefill.thread.push(wanted.transfer_id, 0, (0,))
        restarted.greet()
        former.socket.close(0)
        assert prefill.next(PushCancelled).transfer_id == wanted.transfer_id
        assert prefill.next(PushEnded) == PushEnded(wanted.transfer_id, PushOutcome.LEASE_EXPIRED)
        restarted.send(prefill_request(restarted.boot_id))
        assert prefill.next(PushWanted).transfer_id.decode_boot == restarted.boot_id


def test_a_decode_engine_that_stays_silent_loses_its_lease() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        decode.greet()
        decode.send(prefill_request(decode.boot_id))
        wanted = prefill.next(PushWanted)
        prefill.thread.push(wanted.transfer_id, 0, (0, 1))
        assert prefill.next(PushCancelled).transfer_id == wanted.transfer_id
        assert prefill.next(PushEnded).outcome is PushOutcome.LEASE_EXPIRED
        assert prefill.thread.stats().leases_expired_sending == 1
        # The decode engine is told at once, and again when it comes back.
        decode.send(Ping(decode.boot_id))
        answers = [type(decode.next(object)).__name__ for _ in range(4)]
        assert answers == ["Digests", "Failed", "Refused", "Refused"]


def test_a_decode_engine_that_greets_anew_ends_what_it_had() -> None:
    """An engine that took this one for dead greets like this. No transfer of the former handshake keeps its blocks."""
    with engine(config=PATIENT) as prefill, FakeDecode(prefill.address) as decode:
        decode.greet()
        decode.send(prefill_request(decode.boot_id))
        former = prefill.next(PushWanted).transfer_id
        decode.send(Hello(decode.boot_id, SPEC, [decode.link.address]))
        assert prefill.next(PushCancelled) == PushCancelled(former)
        assert prefill.next(PushEnded) == PushEnded(former, PushOutcome.PEER_LOST)
        decode.next(Failed)
        decode.next(Refused)
        decode.next(Welcome)
        decode.send(prefill_request(decode.boot_id))
        assert prefill.next(PushWanted).transfer_id != former


def test_a_decode_engine_that_goes_between_transfers_is_forgotten() -> None:
    """Nothing is kept for it. An engine that restarts now and then would otherwise leave a link each time."""
    with engine(config=PATIENT) as prefill:
        with FakeDecode(prefill.address) as decode:
            decode.greet()
        with FakeDecode(prefill.address, boot_id=decode.boot_id) as same:
            # Frames of this sealer are newer than those that the boot has sent.
            same.sealer = decode.sealer

            def unknown() -> bool:
                same.send(Ping(same.boot_id))
                return isinstance(same.next(object), Refused)

            eventually(unknown)


def test_a_request_that_comes_twice_is_computed_once() -> None:
    with engine(config=PATIENT) as prefill, FakeDecode(prefill.address) as decode:
        decode.greet()
        request = prefill_request(decode.boot_id)
        same_tag = msgspec.structs.replace(request, transfer_id=TransferId(new_id(), 0, decode.boot_id))
        for message in (request, request, same_tag):
            decode.send(message)
        decode.send(Cancel(request.transfer_id))
        assert prefill.next(PushWanted).transfer_id == request.transfer_id
        assert prefill.next(PushCancelled).transfer_id == request.transfer_id
        assert prefill.next(PushEnded).outcome is PushOutcome.CANCELLED
        decode.send(Ping(decode.boot_id))
        decode.next(Pong)
        assert prefill.quiet()


def test_a_prefill_engine_that_fell_silent_is_not_waited_for_again_until_it_answers() -> None:
    with FakePrefill() as prefill, engine() as decode:
        rig = Pair(decode, decode)
        decode.thread.fetch(rig.order((0,), target=prefill.target))
        prefill.welcome_and_take()
        assert decode.next(FetchFailed).kind is FailureKind.LEASE_EXPIRED
        for block in (1, 2):
            decode.thread.fetch(rig.order((block,), target=prefill.target))
            failed = decode.next(FetchFailed)
            assert (failed.kind, failed.reason) == (FailureKind.PEER_LOST, "it fell silent, and has not answered since")
        # The decode engine greets it without an order, and uses it as soon as it answers.
        prefill.next(Hello)
        prefill.send(Welcome(prefill.boot_id, SPEC, [prefill.link.address]))

        def waited_for() -> bool:
            decode.thread.fetch(rig.order((3,), target=prefill.target))
            return decode.next(FetchFailed).kind is FailureKind.LEASE_EXPIRED

        eventually(waited_for)


def test_a_prefill_engine_without_the_handshake_says_so() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        decode.send(prefill_request(decode.boot_id))
        assert decode.next(Refused).field == "handshake"
        assert prefill.quiet()


def test_a_request_that_makes_no_sense_is_refused() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        decode.greet()
        decode.send(prefill_request(decode.boot_id, tokens=16, first_block=1))
        assert type(decode.next(object)).__name__ == "Failed"
        decode.send(Ping(decode.boot_id))
        assert decode.next(Pong).boot_id == prefill.boot_id
        assert prefill.quiet()


def test_a_lost_handshake_fails_transfers_and_is_made_again() -> None:
    with FakePrefill() as prefill, engine(config=PATIENT) as decode:
        rig = Pair(decode, decode)
        decode.thread.fetch(rig.order((0,), target=prefill.target))
        prefill.welcome_and_take()
        prefill.send(Refused(prefill.boot_id, "handshake", "none", "assumed"))
        assert decode.next(FetchFailed).kind is FailureKind.PEER_LOST
        decode.thread.fetch(rig.order((1,), target=prefill.target))
        prefill.next(Hello)
        assert decode.thread.stats().handshakes == 2


def test_a_prefill_node_that_has_restarted_says_so() -> None:
    with pair(config=PATIENT) as rig:
        former = PrefillTarget("p", rig.prefill.address, new_id())
        rig.decode.thread.fetch(rig.order((0,), target=former))
        failed = rig.decode.next(FetchFailed)
        assert (failed.kind, failed.reason) == (FailureKind.PEER_LOST, "the prefill node has restarted")


def test_a_new_boot_at_a_known_address_replaces_the_old_one() -> None:
    with FakePrefill() as prefill, engine(config=PATIENT) as decode:
        rig = Pair(decode, decode)
        former = PrefillTarget("p", prefill.target.control, new_id())
        decode.thread.fetch(rig.order((0,), target=former))
        assert prefill.socket.poll(int(WAIT_S * 1000)), "no greeting in time"
        decode.thread.fetch(rig.order((1,), target=prefill.target))
        assert decode.next(FetchFailed).reason == "the prefill node has restarted"
        request = prefill.welcome_and_take()
        prefill.deliver(request, 0, memoryview(b"x" * decode.block_bytes))
        prefill.send(FirstToken(request.transfer_id, (SampledToken(1),), 0))
        decode.next(FirstTokenArrived)
        decode.next(FetchLanded)
        assert prefill.next(Done).transfer_id == request.transfer_id


def test_an_order_for_a_boot_of_the_past_harms_only_itself() -> None:
    with FakePrefill() as prefill, engine(config=PATIENT) as decode:
        rig = Pair(decode, decode)
        decode.thread.fetch(rig.order((0,), target=prefill.target))
        request = prefill.welcome_and_take()
        stale = PrefillTarget("p", prefill.target.control, new_id())
        decode.thread.fetch(rig.order((1,), target=stale))
        assert "names a boot" in decode.next(FetchFailed).reason
        prefill.deliver(request, 0, memoryview(b"x" * decode.block_bytes))
        prefill.send(FirstToken(request.transfer_id, (SampledToken(1),), 0))
        decode.next(FirstTokenArrived)
        assert decode.next(FetchLanded).transfer_id == request.transfer_id


@pytest.mark.parametrize("control", ["tcp://127.0.0.1:1", "not an address", "tcp://no.such.host.invalid:80"])
def test_a_prefill_node_that_is_not_there_fails_at_once(control: str) -> None:
    with engine(config=PATIENT) as decode:
        decode.thread.fetch(Pair(decode, decode).order((0, 1), target=PrefillTarget("p", control, new_id())))
        assert decode.next(FetchFailed).kind is FailureKind.PEER_LOST


def test_closing_the_prefill_engine_tells_the_decode_engine() -> None:
    with pair(config=PATIENT) as rig:
        rig.fetch((0, 1))
        rig.prefill.next(PushWanted)
        rig.prefill.close()
        assert "closing" in rig.decode.next(FetchFailed).reason
        rig.prefill.next(PushCancelled)
        assert rig.prefill.next(PushEnded).outcome is PushOutcome.FAILED


def test_closing_the_decode_engine_tells_the_prefill_engine() -> None:
    with pair(config=PATIENT) as rig:
        rig.fetch((0, 1))
        rig.prefill.next(PushWanted)
        rig.decode.close()
        assert rig.decode.next(FetchFailed).kind is FailureKind.CLOSED
        rig.prefill.next(PushCancelled)
        assert rig.prefill.next(PushEnded).outcome is PushOutcome.CANCELLED


def test_a_decode_engine_that_was_frozen_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode engine does not give up a living prefill engine because of its own pause."""
    config = TransferConfig(heartbeat_ms=50, lease_ms=5_000)
    with pair(config=config) as rig:
        transfer = rig.fetch((0, 1))
        rig.prefill.next(PushWanted)
        skip = config.lease_ms / 1000 * 3
        real = time.monotonic
        monkeypatch.setattr("pdserve_kvtransfer.thread.time", _Clock(lambda: real() + skip))
        rig.prefill.thread.push(transfer, 0, (0, 1))
        rig.prefill.thread.first_token(transfer, (SampledToken(1),), 0)
        rig.decode.next(FirstTokenArrived)
        rig.decode.next(FetchLanded)
        assert rig.decode.thread.stats().leases_expired_receiving == 0


class _Clock:
    def __init__(self, monotonic: object) -> None:
        self.monotonic = monotonic
        self.sleep = time.sleep
