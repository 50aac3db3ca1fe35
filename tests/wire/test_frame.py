"""A frame is believed only if this cluster made it, for this channel, just now, and for the first time."""

from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import AuthenticationFailed, MalformedFrame, WireError
from pdserve.wire.discovery import Ack, ToProxy
from pdserve.wire.frame import MAX_AGE_S, MAX_FRAME_BYTES, Opener, Purpose, Sealer

SECRET = b"the cluster's own secret"
BOOT = b"0123456789abcdef"
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


@pytest.mark.parametrize("shift_s", [MAX_AGE_S - 1, 1 - MAX_AGE_S])
def test_a_little_skew_is_accepted(shift_s: float) -> None:
    clock = Clock()
    frame = sealer(clock).seal(ACK)
    clock.now += shift_s
    assert opener(clock).open(frame) == ACK


def test_a_replay_is_refused_for_as_long_as_its_age_would_be_accepted() -> None:
    clock = Clock()
    receiver, sender = opener(clock, ordered=False, lifetime_s=1_000.0), sealer(clock)
    clock.now += MAX_AGE_S - 1  # the sender's clock is ahead
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
    with pytest.raises(MalformedFrame, match="version 2"):
        opener(clock).open(msgpack.packb([2, *parts[1:]]))


def test_a_signed_message_of_another_kind_is_refused() -> None:
    clock = Clock()
    receiver: Opener[ToProxy] = Opener(SECRET, Purpose.DISCOVERY, ToProxy, clock=clock)  # type: ignore[arg-type]
    with pytest.raises(MalformedFrame, match="discovery"):
        receiver.open(sealer(clock).seal(ACK))


def test_a_signed_message_with_an_unknown_field_is_refused() -> None:
    class Larger(msgspec.Struct, tag_field="kind", tag="ack"):
        boot_id: bytes
        known: bool
        extra: int

    clock = Clock()
    with pytest.raises(MalformedFrame, match="unknown field"):
        opener(clock).open(sealer(clock).seal(Larger(BOOT, True, 1)))
