"""Tests whole transfers between two engines over real ZMQ and real UCX."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pdserve.config import TransferConfig
from pdserve.control.frame import Secrets
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PromptTerms
from pdserve.wire.transfer import FailureCause, Hello, PrefillLoad, PrefillRequest, Welcome
from pdserve_kvtransfer.events import (
    BlocksComing,
    BlocksLanded,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    LoadHeard,
    PrefillNodeMet,
    PushCancelled,
    PushEnded,
    PushOutcome,
    PushWanted,
)
from tests.eventually import eventually
from tests.kvtransfer.fakes import FakePrefill
from tests.kvtransfer.rig import BLOCK_BYTES, CONFIG, PATIENT, SAMPLING, SECRET, SPEC, Pair, engine, pair

pytestmark = pytest.mark.usefixtures("mapped_or_not")

QUIET = TransferConfig(heartbeat_ms=60_000, lease_ms=600_000)
"""The engines send no ping during a test, so a load comes only with an answer."""


def complete(rig: Pair, block_ids: tuple[int, ...], *, first_block: int = 0) -> bytes:
    """Carries out one transfer from its order to its end. Returns the bytes that the prefill side sent."""
    order = rig.order(block_ids, first_block=first_block)
    local = tuple(range(len(block_ids)))
    sent = rig.prefill.fill(*local)
    rig.decode.thread.fetch(order)
    rig.prefill.next(PushWanted)
    rig.prefill.thread.push(order.transfer_id, first_block, local)
    rig.prefill.thread.first_token(order.transfer_id, (SampledToken(1),), 0)
    rig.decode.next(FirstTokenArrived)
    rig.decode.next(FetchLanded)
    assert rig.prefill.next(PushEnded).outcome is PushOutcome.DONE
    return sent


def test_a_link_that_stands_takes_a_new_secret() -> None:
    new = b"the secret that comes next"
    decode, prefill = Secrets(SECRET), Secrets(SECRET)
    with pair(decode_secret=decode, prefill_secret=prefill) as rig:
        for step in (SECRET, SECRET + b"\n" + new, new + b"\n" + SECRET, new):
            prefill.renew(step)
            complete(rig, (7, 1, 5))
            decode.renew(step)
            complete(rig, (7, 1, 5))
        assert rig.prefill.thread.stats().handshakes == 1
        assert rig.decode.thread.stats().frames_dropped == rig.prefill.thread.stats().frames_dropped == 0


def test_a_prompt_arrives_in_scattered_blocks() -> None:
    with pair() as rig:
        sent = rig.prefill.fill(4, 9, 2)
        order = rig.order((7, 1, 5))
        rig.decode.thread.fetch(order)
        wanted = rig.prefill.next(PushWanted)
        assert wanted.token_ids == order.token_ids
        assert (wanted.transfer_id, wanted.first_block, wanted.sampling) == (order.transfer_id, 0, SAMPLING)
        assert 0 < wanted.deadline_s <= order.deadline_s
        rig.prefill.thread.push(order.transfer_id, 0, (4, 9))
        rig.prefill.thread.push(order.transfer_id, 2, (2,))
        rig.prefill.thread.first_token(order.transfer_id, (SampledToken(42),), 16)
        assert rig.decode.next(FirstTokenArrived) == FirstTokenArrived(order.transfer_id, (SampledToken(42),), 16)
        landed = rig.decode.next(FetchLanded)
        assert landed.bytes == 3 * BLOCK_BYTES
        assert landed.seconds > 0
        assert rig.decode.read(7, 1, 5) == sent
        assert rig.prefill.next(PushEnded) == PushEnded(order.transfer_id, PushOutcome.DONE)
        received, pushed = rig.decode.thread.stats(), rig.prefill.thread.stats()
        assert (received.transfers_received, received.bytes_received) == (1, 3 * BLOCK_BYTES)
        assert (pushed.transfers_sent, pushed.bytes_sent) == (1, 3 * BLOCK_BYTES)
        assert not received.failures and not pushed.failures


def test_the_prefill_engine_is_told_all_that_the_answer_depends_on() -> None:
    """The salt matters most: without it, prompts of one tenant would match those of another in the cache there."""
    with pair() as rig:
        terms = PromptTerms(request_id="chat-1", cache_salt="tenant", priority=-7)
        order = replace(rig.order((7, 1, 5), first_block=2), child_seeds=(4, 2**63 - 1), terms=terms)
        rig.decode.thread.fetch(order)
        wanted = rig.prefill.next(PushWanted)
        assert replace(wanted, deadline_s=0) == PushWanted(
            order.transfer_id, order.token_ids, 2, SAMPLING, 0, (4, 2**63 - 1), terms
        )


def test_only_missing_blocks_move() -> None:
    with pair() as rig:
        before = rig.decode.fill(*range(rig.decode.num_blocks))
        sent = complete(rig, (3, 8), first_block=5)
        assert rig.decode.read(3, 8) == sent
        untouched = [block for block in range(rig.decode.num_blocks) if block not in (3, 8)]
        for block in untouched:
            assert rig.decode.read(block) == before[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        assert rig.decode.thread.stats().bytes_received == 2 * BLOCK_BYTES


def test_the_first_token_does_not_wait_for_blocks() -> None:
    with pair() as rig:
        transfer = rig.fetch((0, 1))
        rig.prefill.next(PushWanted)
        rig.prefill.thread.first_token(transfer, (SampledToken(7),), 0)
        assert rig.decode.next(FirstTokenArrived).tokens == (SampledToken(7),)
        assert rig.decode.quiet()
        rig.prefill.thread.push(transfer, 0, (0, 1))
        rig.decode.next(FetchLanded)


def test_many_transfers_share_one_handshake() -> None:
    with pair() as rig:
        transfers = [rig.fetch((2 * i, 2 * i + 1)) for i in range(8)]
        for _ in transfers:
            wanted = rig.prefill.next(PushWanted)
            rig.prefill.thread.push(wanted.transfer_id, 0, (0, 1))
            rig.prefill.thread.first_token(wanted.transfer_id, (SampledToken(1),), 0)
        eventually(lambda: rig.decode.thread.stats().transfers_received == 8)
        assert rig.decode.thread.stats().handshakes == 1
        assert rig.prefill.thread.stats().handshakes == 1


def test_engines_without_a_common_protocol_name_both_ranges() -> None:
    spec = msgspec.structs.replace(SPEC, protocol=9, oldest_protocol=8)
    with pair(decode_spec=spec) as rig:
        rig.fetch((0, 1))
        failed = rig.decode.next(FetchFailed)
        assert failed.kind is FailureKind.MISFIT
        assert failed.reason == "engines do not fit: protocol is 8 to 9 here and 6 there: upgrade the older one"


OTHER_VALUES = {
    "fingerprint": "model-b",
    "dtype": "fp32",
    "block_size": 32,
    "num_layers": 4,
    "kv_heads": 6,
    "head_dim": 16,
}


@pytest.mark.parametrize("field", sorted(OTHER_VALUES))
def test_a_misfit_is_refused_by_name(field: str) -> None:
    spec = msgspec.structs.replace(SPEC, **{field: OTHER_VALUES[field]})
    with pair(decode_spec=spec) as rig:
        transfer = rig.fetch((0, 1))
        failed = rig.decode.next(FetchFailed)
        assert (failed.transfer_id, failed.kind, failed.landed, failed.quarantined) == (
            transfer,
            FailureKind.MISFIT,
            0,
            (),
        )
        values = f"{field} is {OTHER_VALUES[field]} here and {getattr(SPEC, field)} there"
        assert failed.reason.startswith(f"engines do not fit: {values}")
        assert ("they have other files of the model" in failed.reason) == (field == "fingerprint")
        assert rig.prefill.quiet()


def test_a_wrong_secret_never_shakes_hands() -> None:
    with pair(decode_secret=b"another secret") as rig:
        rig.fetch((0,))
        assert rig.decode.next(FetchFailed).kind is FailureKind.LEASE_EXPIRED
        assert rig.prefill.thread.stats().frames_dropped > 0
        assert rig.prefill.thread.stats().handshakes == 0
        assert rig.prefill.quiet()


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (FailureCause.NODE, FailureKind.FAILED),
        (FailureCause.PROMPT, FailureKind.REFUSED),
        (FailureCause.LOAD, FailureKind.OVERLOADED),
        (FailureCause.DEADLINE, FailureKind.DEADLINE),
    ],
)
def test_fail_push_fails_the_fetch_with_its_reason(cause: FailureCause, kind: FailureKind) -> None:
    with pair(config=QUIET) as rig:
        transfer = rig.fetch((0, 1))
        rig.prefill.next(PushWanted)
        rig.prefill.thread.tell_load(PrefillLoad(700, 1500.0))
        rig.prefill.thread.fail_push(transfer, "the queue is full", cause)
        if cause is FailureCause.LOAD:
            assert rig.decode.next(LoadHeard).load == PrefillLoad(700, 1500.0)
        failed = rig.decode.next(FetchFailed)
        assert (failed.reason, failed.kind) == ("the queue is full", kind)
        assert rig.prefill.next(PushEnded) == PushEnded(transfer, PushOutcome.FAILED)
        assert rig.decode.thread.stats().failures == {kind: 1}
        assert rig.prefill.thread.stats().failures == {kind: 1}


def test_a_paced_transfer_lands_as_there_is_room_for_it() -> None:
    with pair() as rig:
        sent = rig.prefill.fill(4, 9, 2)
        order = replace(rig.order((7, 1, 5)), block_ids=(), paced_blocks=3)
        transfer = order.transfer_id
        rig.decode.thread.fetch(order)
        rig.prefill.next(PushWanted)
        rig.prefill.thread.push(transfer, 0, (4, 9))
        assert rig.decode.next(BlocksComing) == BlocksComing(transfer, 2)
        assert rig.prefill.thread.stats().bytes_sent == 0, "nobody has room for it"
        got = b""
        for landed in (1, 2):
            rig.decode.thread.accept_blocks(transfer, (7,))
            assert rig.decode.next(BlocksLanded) == BlocksLanded(transfer, landed)
            got += rig.decode.read(7)
        rig.prefill.thread.push(transfer, 2, (2,))
        rig.prefill.thread.first_token(transfer, (SampledToken(42),), 0)
        assert rig.decode.next(BlocksComing) == BlocksComing(transfer, 3)
        rig.decode.next(FirstTokenArrived)
        rig.decode.thread.accept_blocks(transfer, (7,))
        rig.decode.next(FetchLanded)
        assert got + rig.decode.read(7) == sent
        rig.decode.thread.accept_blocks(transfer, (1,))
        assert rig.prefill.next(PushEnded).outcome is PushOutcome.DONE
        complete(rig, (1, 2))


def test_a_paced_transfer_that_nobody_has_room_for_ends_at_its_deadline() -> None:
    with pair(config=PATIENT) as rig:
        order = replace(rig.order((7, 1), deadline_s=0.5), block_ids=(), paced_blocks=2)
        rig.decode.thread.fetch(order)
        rig.prefill.next(PushWanted)
        rig.prefill.thread.push(order.transfer_id, 0, (4, 9))
        rig.prefill.thread.first_token(order.transfer_id, (SampledToken(42),), 0)
        rig.decode.next(BlocksComing)
        rig.decode.next(FirstTokenArrived)
        failed = rig.decode.next(FetchFailed)
        assert (failed.kind, failed.landed, failed.quarantined) == (FailureKind.DEADLINE, 0, ())
        rig.prefill.next(PushCancelled)
        assert rig.prefill.next(PushEnded).outcome is PushOutcome.CANCELLED


def test_a_prefill_engine_says_which_prompts_it_takes() -> None:
    with engine(max_prompt_tokens=127) as prefill, engine() as decode:
        rig = Pair(prefill, decode)
        rig.fetch((0, 1))
        assert decode.next(PrefillNodeMet) == PrefillNodeMet(prefill.boot_id, 127)


def test_landed_counts_leading_blocks_only() -> None:
    with pair() as rig:
        sent = rig.prefill.fill(0, 1)
        transfer = rig.fetch((10, 11, 12, 13))
        rig.prefill.next(PushWanted)
        rig.prefill.thread.push(transfer, 0, (0, 1))
        rig.prefill.thread.push(transfer, 3, (2,))
        eventually(lambda: rig.decode.thread.stats().bytes_received == 3 * BLOCK_BYTES)
        rig.prefill.thread.fail_push(transfer, "enough")
        assert rig.decode.next(FetchFailed).landed == 2
        assert rig.decode.read(10, 11) == sent


def test_the_deadline_ends_both_sides() -> None:
    with pair() as rig:
        transfer = rig.fetch((0, 1), deadline_s=1.5)
        rig.prefill.next(PushWanted)
        failed = rig.decode.next(FetchFailed)
        assert failed.kind is FailureKind.DEADLINE
        assert "deadline" in failed.reason
        assert rig.prefill.next(PushCancelled).transfer_id == transfer
        # On a busy machine, the prefill engine's own deadline may pass before it reads the decode engine's Cancel.
        assert rig.prefill.next(PushEnded).outcome in (PushOutcome.CANCELLED, PushOutcome.FAILED)


def test_blocks_that_were_not_asked_for_fail_the_transfer() -> None:
    with pair() as rig:
        transfer = rig.fetch((0, 1))
        rig.prefill.next(PushWanted)
        rig.prefill.thread.push(transfer, 1, (0, 1))
        assert rig.decode.next(FetchFailed).kind is FailureKind.FAILED
        rig.prefill.next(PushCancelled)
        assert rig.prefill.next(PushEnded).outcome is PushOutcome.FAILED


def test_late_commands_are_ignored() -> None:
    with pair() as rig:
        complete(rig, (0, 1))
        order = rig.order((2,))
        rig.prefill.thread.push(order.transfer_id, 0, (0,))
        rig.prefill.thread.first_token(order.transfer_id, (SampledToken(1),), 0)
        rig.prefill.thread.fail_push(order.transfer_id, "late")
        complete(rig, (3,))
        assert rig.prefill.quiet()


def test_silence_between_transfers_is_not_death() -> None:
    with pair() as rig:
        complete(rig, (0,))
        assert not rig.decode.has_news_within(CONFIG.lease_ms / 1000 * 1.5)
        complete(rig, (1,))
        assert rig.decode.thread.stats().handshakes == 1


def test_heartbeats_keep_a_slow_prefill_alive() -> None:
    with pair() as rig:
        transfer = rig.fetch((0,))
        rig.prefill.next(PushWanted)
        assert not rig.decode.has_news_within(CONFIG.lease_ms / 1000 * 1.5)
        rig.prefill.thread.push(transfer, 0, (0,))
        rig.prefill.thread.first_token(transfer, (SampledToken(1),), 0)
        rig.decode.next(FirstTokenArrived)
        rig.decode.next(FetchLanded)


def test_heartbeats_say_how_busy_the_prefill_engine_is() -> None:
    with pair() as rig:
        rig.prefill.thread.tell_load(PrefillLoad(700, 1500.0))
        transfer = rig.fetch((0,))
        rig.prefill.next(PushWanted)
        assert rig.decode.next(LoadHeard) == LoadHeard(rig.target.boot_id, PrefillLoad(700, 1500.0))
        rig.prefill.thread.tell_load(PrefillLoad(0, 1500.0))
        eventually(lambda: rig.decode.next(LoadHeard).load == PrefillLoad(0, 1500.0))
        rig.decode.thread.cancel_fetch(transfer)


class TestCancel:
    def test_before_welcome(self) -> None:
        with FakePrefill() as prefill, engine(config=PATIENT) as decode:
            rig = Pair(decode, decode)
            first, second = rig.order((0, 1), target=prefill.target), rig.order((2, 3), target=prefill.target)
            decode.thread.fetch(first)
            hello = prefill.next(Hello)
            decode.thread.cancel_fetch(first.transfer_id)
            assert decode.next(FetchCancelled) == FetchCancelled(first.transfer_id, ())
            decode.thread.fetch(second)
            prefill.link.connect(hello.rank_addresses)
            prefill.send(Welcome(prefill.boot_id, SPEC, [prefill.link.address]))
            assert prefill.next(PrefillRequest).transfer_id == second.transfer_id
            assert decode.quiet()

    def test_before_the_first_block(self) -> None:
        with pair() as rig:
            transfer = rig.fetch((0, 1))
            rig.prefill.next(PushWanted)
            rig.decode.thread.cancel_fetch(transfer)
            assert rig.decode.next(FetchCancelled) == FetchCancelled(transfer, ())
            assert rig.prefill.next(PushCancelled).transfer_id == transfer
            assert rig.prefill.next(PushEnded) == PushEnded(transfer, PushOutcome.CANCELLED)
            rig.prefill.thread.push(transfer, 0, (0, 1))
            complete_after_cancel(rig)

    def test_after_some_blocks(self) -> None:
        with pair() as rig:
            transfer = rig.fetch((0, 1, 2))
            rig.prefill.next(PushWanted)
            rig.prefill.thread.push(transfer, 0, (0,))
            eventually(lambda: rig.decode.thread.stats().bytes_received == BLOCK_BYTES)
            rig.decode.thread.cancel_fetch(transfer)
            assert rig.decode.next(FetchCancelled) == FetchCancelled(transfer, ())
            rig.prefill.next(PushCancelled)
            assert rig.prefill.next(PushEnded).outcome is PushOutcome.CANCELLED
            complete_after_cancel(rig)

    def test_when_it_has_landed_unseen(self) -> None:
        with pair() as rig:
            transfer = rig.fetch((0,))
            rig.prefill.next(PushWanted)
            rig.prefill.thread.push(transfer, 0, (0,))
            rig.prefill.thread.first_token(transfer, (SampledToken(1),), 0)
            assert rig.prefill.next(PushEnded).outcome is PushOutcome.DONE
            rig.decode.thread.cancel_fetch(transfer)
            assert rig.decode.next(FetchCancelled) == FetchCancelled(transfer, ())
            assert rig.decode.quiet()

    def test_when_its_end_was_seen(self) -> None:
        with pair() as rig:
            complete(rig, (0,))
            landed = [event for event in rig.decode.seen if isinstance(event, FetchLanded)]
            rig.decode.thread.cancel_fetch(landed[0].transfer_id)
            complete(rig, (1,))
            assert rig.decode.quiet()


def complete_after_cancel(rig: Pair) -> None:
    """Checks that the engines still work and that the cancelled transfer has no second end."""
    assert rig.decode.quiet() and rig.prefill.quiet()
    sent = complete(rig, (6, 7))
    assert rig.decode.read(6, 7) == sent
    assert rig.decode.thread.stats().quarantined_blocks == 0
