"""Tests that blocks which a prefill engine should not send never reach memory where they do not belong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.transfer import Cancel, Done, Failed, FirstToken, PrefillRequest
from pdserve_kvtransfer.events import FailureKind, FetchFailed, FetchLanded, FirstTokenArrived
from tests.eventually import eventually
from tests.kvtransfer.fakes import FakeDecode, FakePrefill
from tests.kvtransfer.rig import BLOCK_BYTES, PATIENT, Engine, Pair, engine

BLOCKS = (3, 6)
GOOD = memoryview(b"g" * BLOCK_BYTES)
BAD = memoryview(b"b" * BLOCK_BYTES)


@dataclass
class Attack:
    prefill: FakePrefill
    decode: Engine
    request: PrefillRequest
    before: bytes

    def send(self, payload: memoryview, tag: int, index: int) -> None:
        self.prefill.post(payload, tag, index)
        self.prefill.finish()

    def dropped(self, count: int) -> bool:
        return self.decode.thread.stats().stale_blocks_dropped == count

    def others_untouched(self) -> bool:
        others = [block for block in range(self.decode.num_blocks) if block not in BLOCKS]
        return all(
            self.decode.read(block) == self.before[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] for block in others
        )


@pytest.fixture
def attack() -> Iterator[Attack]:
    with FakePrefill() as prefill, engine(config=PATIENT) as decode:
        before = decode.fill(*range(decode.num_blocks))
        decode.thread.fetch(Pair(decode, decode).order(BLOCKS, first_block=4, target=prefill.target))
        yield Attack(prefill, decode, prefill.welcome_and_take(), before)


@pytest.mark.parametrize("case", ["tag", "index below", "index above", "too short", "too long", "empty"])
def test_a_wrong_block_is_dropped_and_its_send_completes(attack: Attack, case: str) -> None:
    tag, payload, index = attack.request.tag, BAD, 4
    if case == "tag":
        tag ^= 1
    elif case == "index below":
        index = 3
    elif case == "index above":
        index = 6
    elif case == "too short":
        payload = BAD[:-1]
    elif case == "too long":
        payload = memoryview(b"b" * (3 * BLOCK_BYTES + 5))
    else:
        payload = BAD[:0]
    attack.send(payload, tag, index)
    eventually(lambda: attack.dropped(1))
    assert attack.decode.read(*range(attack.decode.num_blocks)) == attack.before
    finish_well(attack)


def finish_well(attack: Attack) -> None:
    attack.prefill.deliver(attack.request, 4, GOOD)
    attack.prefill.deliver(attack.request, 5, GOOD)
    attack.prefill.send(FirstToken(attack.request.transfer_id, (SampledToken(1),), 0))
    attack.decode.next(FirstTokenArrived)
    attack.decode.next(FetchLanded)
    assert attack.decode.read(*BLOCKS) == bytes(GOOD) * 2
    assert attack.others_untouched()
    assert attack.prefill.next(Done).transfer_id == attack.request.transfer_id


def test_a_block_of_a_size_that_no_engine_has_ends_the_link(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine allocates no memory for such a block, not even to discard it."""
    monkeypatch.setattr("pdserve_kvtransfer.fetch.port.MAX_PIECE_BYTES", 2 * BLOCK_BYTES)
    attack.send(BAD, attack.request.tag ^ 1, 4)  # Now UCX is connected.
    attack.prefill.post(memoryview(b"b" * (2 * BLOCK_BYTES + 1)), attack.request.tag, 4)
    failed = attack.decode.next(FetchFailed)
    assert (failed.kind, failed.landed, failed.quarantined) == (FailureKind.PEER_LOST, 0, ())
    assert attack.decode.read(*range(attack.decode.num_blocks)) == attack.before


def test_a_block_lands_once(attack: Attack) -> None:
    attack.prefill.deliver(attack.request, 4, GOOD)
    attack.send(BAD, attack.request.tag, 4)
    eventually(lambda: attack.dropped(1))
    assert attack.decode.read(BLOCKS[0]) == bytes(GOOD)
    finish_rest(attack)


def finish_rest(attack: Attack) -> None:
    attack.prefill.deliver(attack.request, 5, GOOD)
    attack.prefill.send(FirstToken(attack.request.transfer_id, (SampledToken(1),), 0))
    attack.decode.next(FirstTokenArrived)
    assert attack.decode.next(FetchLanded).bytes == 2 * BLOCK_BYTES


def test_a_block_after_the_end_touches_nothing(attack: Attack) -> None:
    attack.prefill.send(Failed(attack.request.transfer_id, "gone"))
    attack.decode.next(FetchFailed)
    attack.send(BAD, attack.request.tag, 4)
    eventually(lambda: attack.dropped(1))
    assert attack.decode.read(*range(attack.decode.num_blocks)) == attack.before
    assert attack.decode.quiet()


def test_a_stranger_who_knows_the_tag_cannot_pass_off_a_block(attack: Attack) -> None:
    attack.send(BAD, attack.request.tag, 4)
    attack.prefill.deliver(attack.request, 5, GOOD)
    eventually(lambda: attack.decode.thread.stats().bytes_received == 2 * BLOCK_BYTES)
    attack.prefill.announce(attack.request, 4, GOOD)
    attack.prefill.send(FirstToken(attack.request.transfer_id, (SampledToken(1),), 0))
    failed = attack.decode.next(FetchFailed)
    assert (failed.kind, failed.landed, failed.quarantined) == (FailureKind.CORRUPT, 0, ())
    assert attack.prefill.next(Cancel).transfer_id == attack.request.transfer_id
    assert attack.decode.thread.stats().failures[FailureKind.CORRUPT] == 1


def test_a_block_in_another_one_s_place_is_noticed(attack: Attack) -> None:
    attack.prefill.announce(attack.request, 4, GOOD, BAD)
    attack.send(BAD, attack.request.tag, 4)
    assert attack.decode.next(FetchFailed).kind is FailureKind.CORRUPT


def test_nothing_counts_that_was_not_announced(attack: Attack) -> None:
    attack.send(GOOD, attack.request.tag, 4)
    attack.send(GOOD, attack.request.tag, 5)
    attack.prefill.send(FirstToken(attack.request.transfer_id, (SampledToken(1),), 0))
    attack.decode.next(FirstTokenArrived)
    attack.prefill.send(Failed(attack.request.transfer_id, "gone"))
    failed = attack.decode.next(FetchFailed)
    assert failed.landed == 0


@pytest.mark.parametrize("shares", [True, False], ids=["mapped", "not mapped"])
def test_a_decode_engine_that_sends_blocks_is_not_waited_for(shares: bool) -> None:
    with engine(config=PATIENT) as prefill, FakeDecode(prefill.address, shares=shares) as decode:
        before = prefill.fill(*range(prefill.num_blocks))
        decode.greet()
        eventually(lambda: decode.link.progress() or decode.link.poster.attached == 2 * shares)
        decode.post(BAD, 1, 0)
        decode.finish()
        assert prefill.read(*range(prefill.num_blocks)) == before
