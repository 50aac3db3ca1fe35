"""Tests engines of two versions over real sockets: one is a real engine, the other speaks as another release does."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec
import pytest

from pdserve.config import TransferConfig
from pdserve.wire.frame import NAMED, Purpose, Sealer
from pdserve.wire.grammar import Grammar, GrammarKind
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.transfer import Examine, Examined, Failed, Hello, Ping, Pong, PrefillRequest, Refused, Welcome
from pdserve.wire.version import PROTOCOL_VERSION, RELEASED_0_1, SPOKEN
from pdserve_kvtransfer.events import (
    FailureKind,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    PushEnded,
    PushOutcome,
    PushWanted,
)
from pdserve_kvtransfer.pieces import digest, label_of
from tests.kvtransfer.fakes import FakeDecode, FakePrefill
from tests.kvtransfer.rig import PATIENT, SAMPLING, SECRET, SPEC, WAIT_S, Pair, engine
from tests.wire import released_0_1 as released

TRANSFER = Purpose.TRANSFER.value
OLD_SPEC = msgspec.convert(
    {
        **{name: getattr(SPEC, name) for name in released.EngineSpec.__struct_fields__},
        "protocol": released.PROTOCOL_VERSION,
    },
    released.EngineSpec,
)


class ReleasedWords:
    """Seals and opens frames as pdserve 0.1 does. It drops and records frames that it cannot read."""

    def __init__(self, boot_id: bytes, messages: Any) -> None:
        self._sealer = released.Sealer(SECRET, TRANSFER, boot_id)
        self._opener = released.Opener(SECRET, TRANSFER, messages)
        self.dropped: list[str] = []

    def seal(self, message: msgspec.Struct) -> bytes:
        return self._sealer.seal(message)

    def read(self, frame: bytes) -> Any:
        try:
            return self._opener.open(frame)
        except released.Refusal as exc:
            self.dropped.append(str(exc))
            return None


def test_a_decode_engine_of_the_last_release_fetches_from_todays_prefill_engine() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        words = ReleasedWords(decode.boot_id, released.ToDecode)

        def hear(kind: type[Any]) -> Any:
            assert decode.socket.poll(int(WAIT_S * 1000)), f"no {kind.__name__} in time"
            message = words.read(decode.socket.recv())
            assert isinstance(message, kind), words.dropped
            return message

        decode.socket.send(words.seal(released.Hello(decode.boot_id, OLD_SPEC, [decode.link.address])))
        welcome = hear(released.Welcome)
        assert welcome.spec == OLD_SPEC
        decode.link.connect(welcome.rank_addresses)
        decode.socket.send(words.seal(released.Ping(decode.boot_id)))
        assert hear(released.Pong).boot_id == prefill.boot_id
        transfer = TransferId(new_id(), 0, decode.boot_id)
        request = released.PrefillRequest(
            transfer_id=released.TransferId(transfer.request, 0, decode.boot_id),
            tag=77,
            token_ids=list(range(13)),
            first_block=0,
            sampling=released.SamplingParams(max_tokens=1, seed=1),
            deadline_s=10.0,
        )
        decode.socket.send(words.seal(request))
        assert prefill.next(PushWanted).transfer_id == transfer
        sent = prefill.fill(0)
        prefill.thread.push(transfer, 0, (0,))
        prefill.thread.first_token(transfer, (SampledToken(5),), 0)
        arrival, block = decode.receive()
        assert (arrival.label, block) == (label_of(77, 0), sent)
        heard = [hear(object), hear(object)]
        assert {type(message) for message in heard} == {released.Digests, released.FirstToken}
        decode.socket.send(words.seal(released.Done(request.transfer_id)))
        assert prefill.next(PushEnded) == PushEnded(transfer, PushOutcome.DONE)
        assert words.dropped == []


def test_todays_decode_engine_fetches_from_a_prefill_engine_of_the_last_release() -> None:
    with FakePrefill() as prefill, engine(config=PATIENT) as decode:
        words = ReleasedWords(prefill.boot_id, released.ToPrefill)

        def hear(kind: type[Any]) -> Any:
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline and prefill.socket.poll(int(WAIT_S * 1000)):
                prefill.route, frame = prefill.socket.recv_multipart()
                message = words.read(frame)
                if isinstance(message, released.Ping):
                    say(released.Pong(prefill.boot_id))
                elif message is not None:
                    assert isinstance(message, kind), message
                    return message
            raise AssertionError(f"no {kind.__name__} in time")

        def say(message: msgspec.Struct) -> None:
            prefill.socket.send_multipart([prefill.route, words.seal(message)])

        decode.thread.fetch(Pair(decode, decode).order((3,), target=prefill.target))
        hello = hear(released.Hello)
        assert hello.spec == OLD_SPEC
        prefill.link.connect(hello.rank_addresses)
        say(released.Welcome(prefill.boot_id, OLD_SPEC, [prefill.link.address]))
        request = hear(released.PrefillRequest)
        block = memoryview(bytearray(b"x" * decode.block_bytes))
        prefill.post(block, request.tag, 0)
        prefill.finish()
        say(released.Digests(request.transfer_id, 0, 0, 0, (digest(block, label_of(request.tag, 0)),)))
        say(released.FirstToken(request.transfer_id, (released.SampledToken(7),), 0))
        assert decode.next(FirstTokenArrived).tokens == (SampledToken(7),)
        decode.next(FetchLanded)
        assert decode.read(3) == bytes(block)
        assert hear(released.Done) == released.Done(request.transfer_id)
        assert set(words.dropped) == {"frame version 2; this process speaks 1"}, "greetings in today's form, no more"


def test_what_passes_through_host_memory_is_not_ordered_from_a_prefill_engine_of_the_last_release() -> None:
    """That engine would send all blocks at once, and there is room for only a few."""
    with FakePrefill(released=True) as prefill, engine(config=PATIENT) as decode:
        words = ReleasedWords(prefill.boot_id, released.ToPrefill)
        order = Pair(decode, decode).order((), target=prefill.target)
        decode.thread.fetch(dataclasses.replace(order, token_ids=[1] * 13, paced_blocks=1))
        prefill.next(Hello)
        welcome = released.Welcome(prefill.boot_id, OLD_SPEC, [prefill.link.address])
        prefill.socket.send_multipart([prefill.route, words.seal(welcome)])
        failed = decode.next(FetchFailed)
        assert failed.kind is FailureKind.MISFIT
        assert "protocol is 6" in failed.reason


# ------------------------------------------------------------ the next minor version


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
        prefill.socket.send_multipart([prefill.route, prefill.sealer.seal_for_0_1(failed)])
        foreign = Sealer(SECRET, Purpose.TRANSFER, new_id())
        prefill.socket.send_multipart([prefill.route, foreign.seal(failed, decode.boot_id)])
        prefill.send(Failed(request.transfer_id, "said to this one"))
        assert "said to this one" in decode.next(FetchFailed).reason


def test_an_engine_that_greeted_in_todays_form_is_not_heard_in_the_last_releases() -> None:
    with engine() as prefill, FakeDecode(prefill.address) as decode:
        decode.greet()
        decode.socket.send(decode.sealer.seal(Ping(decode.boot_id)))
        decode.socket.send(decode.sealer.seal_for_0_1(Ping(decode.boot_id)))
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


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"grammar": Grammar(GrammarKind.REGEX, "[ab]")}, "grammars"),
        ({"prompt_logprobs": 0}, "log probabilities of prompts"),
        ({"logprobs": 0, "logprob_token_ids": (7,)}, "log probabilities of named tokens"),
    ],
)
def test_what_a_prefill_engine_of_the_last_release_cannot_do_does_not_count_against_it(
    fields: dict[str, Any], what: str
) -> None:
    with FakePrefill() as prefill, engine(config=PATIENT) as decode:
        words = ReleasedWords(prefill.boot_id, released.ToPrefill)
        order = Pair(decode, decode).order((3,), target=prefill.target)
        sampling = msgspec.structs.replace(order.sampling, **fields)
        decode.thread.fetch(dataclasses.replace(order, sampling=sampling))
        hello = None
        while hello is None:  # the first greeting is in words that 0.1 drops
            assert prefill.socket.poll(int(WAIT_S * 1000)), "no Hello in time"
            route, frame = prefill.socket.recv_multipart()
            hello = words.read(frame)
        assert isinstance(hello, released.Hello)
        prefill.link.connect(hello.rank_addresses)
        welcome = released.Welcome(prefill.boot_id, OLD_SPEC, [prefill.link.address])
        prefill.socket.send_multipart([route, words.seal(welcome)])
        failed = decode.next(FetchFailed)
        assert failed.kind is FailureKind.REFUSED
        assert failed.reason == f"{what} need protocol 6, and the other engine supports {RELEASED_0_1}"
