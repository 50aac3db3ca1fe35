"""Tests that a frame is accepted only if it is this cluster's, for this channel, recent and new."""

from __future__ import annotations

import hmac
import struct

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.control.frame import (
    MAX_AGE_S,
    MAX_FRAME_BYTES,
    NAMED,
    SKEW_WINDOW_S,
    UNNAMED,
    ClockSkew,
    Opener,
    Purpose,
    Sealer,
    Secrets,
)
from pdserve.errors import AuthenticationFailed, MalformedFrame, StaleFrame, UnreadableMessage, WireError, WrongReceiver
from pdserve.wire.discovery import Ack, ToProxy

SECRET = b"the cluster's own secret"
BOOT = b"0123456789abcdef"
OTHER = b"fedcba9876543210"
ACK = Ack(BOOT, known=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def sealer(
    clock: Clock, *, secret: bytes = SECRET, purpose: Purpose = Purpose.DISCOVERY, sender: bytes = BOOT
) -> Sealer:
    return Sealer(secret, purpose, sender, clock=clock)


def opener(clock: Clock, *, ordered: bool = True, lifetime_s: float = 0.0) -> Opener[Ack]:
    return Opener(SECRET, Purpose.DISCOVERY, Ack, ordered=ordered, lifetime_s=lambda _: lifetime_s, clock=clock)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_good_frame_opens(ordered: bool) -> None:
    clock = Clock()
    sender, receiver = sealer(clock), opener(clock, ordered=ordered)
    assert [receiver.open(sender.seal(ACK)) for _ in range(3)] == [ACK] * 3


def test_its_outside_is_plain_messagepack() -> None:
    version, sender, counter, sent_ms, body, mac = msgpack.unpackb(sealer(Clock()).seal(ACK))
    assert (version, sender, counter, sent_ms, len(mac)) == (1, BOOT, 1, 1_000_000_000, 32)
    assert msgpack.unpackb(body) == {"kind": "ack", "boot_id": BOOT, "known": True}


@given(st.binary(min_size=1, max_size=130).filter(lambda secret: b"\n" not in secret))
def test_its_mac_is_the_hmac_of_pythons_library(secret: bytes) -> None:
    version, sender, counter, sent_ms, body, mac = msgpack.unpackb(sealer(Clock(), secret=secret).seal(ACK))
    signed = b"discovery\0" + struct.pack(">B16sQQ", version, sender, counter, sent_ms) + body
    assert mac == hmac.digest(secret, signed, "sha256")


def test_any_changed_byte_is_refused() -> None:
    clock = Clock()
    frame = sealer(clock).seal(ACK)
    for position in range(len(frame)):
        for flip in (0x01, 0x80):
            changed = bytearray(frame)
            changed[position] ^= flip
            with pytest.raises(WireError):
                opener(clock).open(bytes(changed))


def test_any_missing_or_added_byte_is_refused() -> None:
    clock = Clock()
    frame = sealer(clock).seal(ACK)
    for length in range(len(frame)):
        with pytest.raises(MalformedFrame):
            opener(clock).open(frame[:length])
    with pytest.raises(MalformedFrame):
        opener(clock).open(frame + b"\0")


@given(st.binary(max_size=300))
def test_no_bytes_break_it(data: bytes) -> None:
    with pytest.raises(WireError):
        opener(Clock()).open(data)


def test_another_secret_is_refused() -> None:
    clock = Clock()
    with pytest.raises(AuthenticationFailed, match="signature"):
        opener(clock).open(sealer(clock, secret=b"another secret").seal(ACK))


def test_of_two_secrets_the_first_signs_and_both_are_believed() -> None:
    clock = Clock()
    old, new = b"the old secret", b"the new secret"
    receiver: Opener[Ack] = Opener(new + b"\n" + old, Purpose.DISCOVERY, Ack, ordered=False, clock=clock)
    assert receiver.open(sealer(clock, secret=new, sender=b"n" * 16).seal(ACK)) == ACK
    assert receiver.open(sealer(clock, secret=old, sender=b"o" * 16).seal(ACK)) == ACK
    with pytest.raises(AuthenticationFailed, match="signature"):
        receiver.open(sealer(clock, secret=new + b"\r" + old + b"x").seal(ACK))
    frame = Sealer(new + b"\n" + old, Purpose.DISCOVERY, BOOT, clock=clock).seal(ACK)
    assert Opener(new, Purpose.DISCOVERY, Ack, clock=clock).open(frame) == ACK
    with pytest.raises(AuthenticationFailed, match="signature"):
        Opener(old, Purpose.DISCOVERY, Ack, clock=clock).open(frame)


def test_what_is_made_with_secrets_follows_them() -> None:
    clock = Clock()
    secrets = Secrets(SECRET)
    sender, receiver = Sealer(secrets, Purpose.DISCOVERY, BOOT, clock=clock), opener(clock)
    follower: Opener[Ack] = Opener(secrets, Purpose.DISCOVERY, Ack, clock=clock)
    first = sender.seal(ACK)
    assert receiver.open(first) == follower.open(first) == ACK
    secrets.renew(b"another secret")
    second = sender.seal(ACK)
    with pytest.raises(AuthenticationFailed, match="signature"):
        receiver.open(second)
    assert follower.open(second) == ACK
    with pytest.raises(AuthenticationFailed, match="replayed"):
        follower.open(second)
    with pytest.raises(AuthenticationFailed, match="signature"):
        follower.open(first)


@pytest.mark.parametrize("purpose", [Purpose.TRANSFER, Purpose.TICKET])
def test_a_frame_of_another_channel_is_refused(purpose: Purpose) -> None:
    clock = Clock()
    with pytest.raises(AuthenticationFailed, match="signature"):
        opener(clock).open(sealer(clock, purpose=purpose).seal(ACK))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_replay_is_refused(ordered: bool) -> None:
    clock = Clock()
    receiver = opener(clock, ordered=ordered)
    frame = sealer(clock).seal(ACK)
    receiver.open(frame)
    with pytest.raises(AuthenticationFailed, match="replayed"):
        receiver.open(frame)


def test_order_matters_only_where_the_channel_keeps_it() -> None:
    clock = Clock()
    sender = sealer(clock)
    first, second = sender.seal(ACK), sender.seal(ACK)
    strict, loose = opener(clock), opener(clock, ordered=False)
    assert strict.open(second) == loose.open(second) == loose.open(first) == ACK
    with pytest.raises(AuthenticationFailed, match="replayed"):
        strict.open(first)


def test_one_sender_does_not_disturb_another() -> None:
    clock = Clock()
    receiver = opener(clock)
    ahead, fresh = sealer(clock), sealer(clock, sender=b"f" * 16)
    for _ in range(5):
        receiver.open(ahead.seal(ACK))
    assert receiver.open(fresh.seal(ACK)) == ACK


@pytest.mark.parametrize("shift_s", [MAX_AGE_S + 1, -MAX_AGE_S - 1])
def test_too_old_or_from_the_future_is_refused(shift_s: float) -> None:
    clock = Clock()
    frame = sealer(clock).seal(ACK)
    clock.now += shift_s
    with pytest.raises(AuthenticationFailed, match="clock"):
        opener(clock).open(frame)


def test_the_next_frame_of_a_sender_that_is_too_old_is_told_apart() -> None:
    clock, receiver_id = Clock(), b"r" * 16
    receiver: Opener[Ack] = Opener(SECRET, Purpose.DISCOVERY, Ack, receiver=receiver_id, clock=clock)
    sender = sealer(clock)
    first, late, unnamed, elsewhere = (
        sender.seal(ACK, receiver_id),
        sender.seal(ACK, receiver_id),
        sender.seal(ACK),
        sender.seal(ACK, b"e" * 16),
    )
    unknown = sealer(clock, sender=b"u" * 16).seal(ACK, receiver_id)
    receiver.open(first)
    clock.now += MAX_AGE_S + 1
    for frame, boot_id in ((late, BOOT), (unknown, b"u" * 16)):
        with pytest.raises(StaleFrame) as stale:
            receiver.open(frame)
        assert stale.value.sender == boot_id
    # An attacker may have any of these, and must not make a receiver believe that something was lost, or lost again.
    for frame in (first, late, unnamed, elsewhere, unknown):
        with pytest.raises(AuthenticationFailed) as refused:
            receiver.open(frame)
        assert not isinstance(refused.value, StaleFrame)
    assert receiver.open(sender.seal(ACK, receiver_id)) == ACK


def test_a_sender_is_heard_after_its_first_frame_was_too_old() -> None:
    clock, receiver_id = Clock(), b"r" * 16
    receiver: Opener[Ack] = Opener(SECRET, Purpose.DISCOVERY, Ack, receiver=receiver_id, clock=clock)
    sender = sealer(clock)
    early = sender.seal(ACK, receiver_id)
    clock.now -= MAX_AGE_S + 1
    with pytest.raises(StaleFrame):
        receiver.open(early)
    clock.now += MAX_AGE_S + 1
    with pytest.raises(AuthenticationFailed, match="replayed"):
        receiver.open(early)
    assert receiver.open(sender.seal(ACK, receiver_id)) == ACK


@pytest.mark.parametrize("shift_s", [MAX_AGE_S - 1, 1 - MAX_AGE_S])
def test_a_little_skew_is_accepted(shift_s: float) -> None:
    clock = Clock()
    frame = sealer(clock).seal(ACK)
    clock.now += shift_s
    assert opener(clock).open(frame) == ACK


def test_a_replay_is_refused_for_as_long_as_its_age_would_be_accepted() -> None:
    clock = Clock()
    receiver, sender = opener(clock, ordered=False, lifetime_s=1_000.0), sealer(clock)
    clock.now += MAX_AGE_S - 1  # The sender's clock is ahead.
    frame = sender.seal(ACK)
    clock.now -= MAX_AGE_S - 1
    receiver.open(frame)
    for _ in range(20):
        clock.now += (2 * MAX_AGE_S + 998) / 20
        receiver.open(sender.seal(ACK))
        with pytest.raises(AuthenticationFailed, match="replayed"):
            receiver.open(frame)


def test_a_message_is_good_for_as_long_as_it_says_and_a_little_skew() -> None:
    clock = Clock()
    receiver, sender = opener(clock, ordered=False, lifetime_s=600.0), sealer(clock)
    frames = [sender.seal(ACK) for _ in range(2)]
    clock.now += 600.0 + MAX_AGE_S
    assert receiver.open(frames[0]) == ACK
    clock.now += 1
    with pytest.raises(AuthenticationFailed, match="at most 660 s"):
        receiver.open(frames[1])


def test_what_it_remembers_of_a_sender_does_not_grow_with_its_frames() -> None:
    clock = Clock()
    receiver, sender = opener(clock, ordered=False), sealer(clock)
    for _ in range(50):
        receiver.open(sender.seal(ACK))
    assert len(receiver._senders) == 1


def test_an_oversize_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(MalformedFrame, match=str(MAX_FRAME_BYTES)):
        opener(Clock()).open(b"\x96" + bytes(MAX_FRAME_BYTES))


def test_another_version_is_refused_by_name() -> None:
    clock = Clock()
    parts = msgpack.unpackb(sealer(clock).seal(ACK))
    with pytest.raises(MalformedFrame, match="frame version 3; this process speaks 1 and 2"):
        opener(clock).open(msgpack.packb([3, *parts[1:]]))


def test_a_signed_message_of_another_kind_is_refused() -> None:
    clock = Clock()
    receiver: Opener[ToProxy] = Opener(SECRET, Purpose.DISCOVERY, ToProxy, clock=clock)  # type: ignore[arg-type]
    with pytest.raises(MalformedFrame, match="discovery"):
        receiver.open(sealer(clock).seal(ACK))


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(b"\xa1x" + b"\x91" * 100_000 + b"\xc0", id="nested too deep"),
        pytest.param(b"\xa4kind\xa2\xff\xfe", id="no UTF-8"),
    ],
)
def test_a_signed_message_that_cannot_be_decoded_is_refused(field: bytes) -> None:
    clock = Clock()
    body = b"\x84\xa4kind\xa3ack\xa7boot_id\xc4\x10" + BOOT + b"\xa5known\xc3" + field
    for frame in (sealer(clock)._seal(UNNAMED, BOOT, body), sealer(clock)._seal(NAMED, BOOT, OTHER + body)):
        with pytest.raises(UnreadableMessage, match="discovery"):
            receiving(clock).open(frame)


class Larger(msgspec.Struct, tag_field="kind", tag="ack"):
    boot_id: bytes
    known: bool
    extra: int


def test_what_a_newer_sender_adds_to_a_statement_is_ignored() -> None:
    clock = Clock()
    assert opener(clock).open(sealer(clock).seal(Larger(BOOT, True, 1))) == ACK


# ------------------------------------------------------------ who a frame is for


def receiving(clock: Clock, boot_id: bytes = OTHER) -> Opener[Ack]:
    return Opener(SECRET, Purpose.DISCOVERY, Ack, receiver=boot_id, clock=clock)


def test_a_frame_is_for_the_process_that_it_names() -> None:
    clock = Clock()
    opened = receiving(clock).open_from(sealer(clock).seal(ACK, OTHER))
    assert (opened.message, opened.sender, opened.named) == (ACK, BOOT, True)


def test_a_frame_for_another_process_is_refused_whoever_sends_it_on() -> None:
    clock = Clock()
    frame = sealer(clock).seal(ACK, OTHER)
    for elsewhere in (receiving(clock, b"another receiver"), opener(clock)):
        with pytest.raises(WrongReceiver, match="another process") as refused:
            elsewhere.open(frame)
        assert refused.value.sender == BOOT
    assert receiving(clock).open(frame) == ACK


def test_an_old_frame_for_another_process_is_no_news_of_its_sender() -> None:
    clock = Clock()
    frame = sealer(clock).seal(ACK, OTHER)
    clock.now += MAX_AGE_S + 1
    with pytest.raises(AuthenticationFailed, match="clock") as refused:
        receiving(clock, b"another receiver").open(frame)
    assert not isinstance(refused.value, WrongReceiver)


def test_the_name_of_the_receiver_is_signed() -> None:
    clock = Clock()
    version, sender, counter, sent_ms, body, mac = msgpack.unpackb(sealer(clock).seal(ACK, OTHER))
    assert (version, body[:16]) == (2, OTHER)
    elsewhere = b"another receiver"
    for forged in (
        [version, sender, counter, sent_ms, elsewhere + body[16:], mac],
        [1, sender, counter, sent_ms, body, mac],
        [1, sender, counter, sent_ms, body[16:], mac],
    ):
        with pytest.raises(AuthenticationFailed, match="signature"):
            receiving(clock, elsewhere).open(msgpack.packb(forged))


def test_frames_that_name_nobody_say_so() -> None:
    clock = Clock()
    opened = receiving(clock).open_from(sealer(clock).seal(ACK))
    assert (opened.sender, opened.named) == (BOOT, False)


def test_an_authentic_message_of_an_unknown_kind_says_from_whom_it_is() -> None:
    class Unheard(msgspec.Struct, tag_field="kind", tag="unheard"):
        pass

    clock = Clock()
    receiver, frame = receiving(clock), sealer(clock).seal(Unheard(), OTHER)
    with pytest.raises(UnreadableMessage, match="unheard") as refused:
        receiver.open(frame)
    assert (refused.value.sender, msgpack.unpackb(refused.value.body)) == (BOOT, {"kind": "unheard"})
    with pytest.raises(AuthenticationFailed, match="replayed"):
        receiver.open(frame)


@pytest.mark.parametrize("counter", [0, -1, 2**63, 2**64 - 1])
def test_a_counter_out_of_range_is_refused(counter: int) -> None:
    clock = Clock()
    parts = msgpack.unpackb(sealer(clock).seal(ACK))
    with pytest.raises(MalformedFrame):
        opener(clock).open(msgpack.packb([*parts[:2], counter, *parts[3:]]))


@pytest.mark.parametrize("ordered", [True, False])
def test_the_highest_counter_is_the_last_one(ordered: bool) -> None:
    clock = Clock()
    sender, receiver = sealer(clock), opener(clock, ordered=ordered)
    sender._counter = 2**63 - 2
    assert receiver.open(sender.seal(ACK)) == ACK
    with pytest.raises(WireError):
        receiver.open(sender.seal(ACK))


def test_strangers_cannot_make_it_forget_a_sender() -> None:
    clock = Clock()
    receiver, frame = opener(clock), sealer(clock).seal(ACK)
    receiver.open(frame)
    for number in range(100):
        with pytest.raises(AuthenticationFailed, match="signature"):
            receiver.open(sealer(clock, secret=b"a guess", sender=number.to_bytes(16)).seal(ACK))
    assert list(receiver._senders) == [BOOT]


@pytest.mark.parametrize(
    "body",
    [
        msgpack.packb({"kind": "ack", "boot_id": BOOT, "known": True, "new": 0})[:-1] + b"\x91" * 100_000 + b"\x90",
        msgpack.packb({"boot_id": BOOT, "known": True, "kind": "ack"})[:-4] + b"\xa3\xff\xff\xff",
    ],
    ids=["arrays in arrays without end", "text that is not UTF-8"],
)
def test_an_authentic_frame_that_cannot_be_decoded_is_a_typed_error(body: bytes) -> None:
    clock = Clock()
    frame = sealer(clock)._seal(1, BOOT, body)
    with pytest.raises(UnreadableMessage):
        opener(clock).open(frame)


def test_clocks_that_differ_are_told_before_their_frames_are_dropped() -> None:
    """The youngest frame of each sender counts, because others have waited on the way."""
    here, skew = Clock(), ClockSkew()
    receiver: Opener[Ack] = Opener(SECRET, Purpose.DISCOVERY, Ack, receiver=OTHER, clock=here, skew=skew)
    assert skew.worst_s() == 0
    clocks = {name: Clock() for name in (b"a" * 16, b"b" * 16)}
    sealers = {name: sealer(clock, sender=name) for name, clock in clocks.items()}
    behind, ahead = clocks
    clocks[behind].now -= 20
    clocks[ahead].now += 30
    for sender in sealers.values():
        receiver.open(sender.seal(ACK, OTHER))
    assert skew.worst_s() == -30
    late = sealers[behind].seal(ACK, OTHER)
    here.now += 35
    receiver.open(late)
    assert skew.worst_s() == -30, "that one was 55 s old, because it was under way for so long"
    for _ in range(2):  # two windows later only what was heard since then counts
        here.now += SKEW_WINDOW_S
        clocks[behind].now = here.now - 61
        with pytest.raises(StaleFrame):
            receiver.open(sealers[behind].seal(ACK, OTHER))
    assert skew.worst_s() == 61, "it shows while they are dropped, too"
    again = sealers[behind].seal(ACK, OTHER)
    forged = bytearray(again)
    forged[-1] ^= 1
    here.now += 3 * SKEW_WINDOW_S
    for frame in (bytes(forged), late):
        with pytest.raises(WireError):
            receiver.open(frame)
    assert skew.worst_s() == 61, "forged and replayed frames say nothing"
