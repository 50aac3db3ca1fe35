"""Authenticated frames: every control message between hosts travels in one.

A frame is a MessagePack array ``[version, sender, counter, sent_ms, body, mac]``. ``mac`` is HMAC-SHA256 with the
cluster secret over all the rest and over the channel's purpose, so a frame of one channel is no good on another.
Replays are refused: a sender's counter must rise (or, where frames may overtake each other, be a new one), and a frame
older (or newer) than ``MAX_AGE_S`` by the receiver's clock is dropped. Where frames may have to queue before they are
looked at, messages say how long they are good for instead: age alone is no sign of a replay there.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
import time
from collections.abc import Callable
from typing import Annotated, Generic, TypeVar

import msgspec

from pdserve.errors import AuthenticationFailed, MalformedFrame
from pdserve.wire.ids import BootId
from pdserve.wire.replay_window import ReplayWindow, RisingCounter

FRAME_VERSION = 1
MAX_AGE_S = 60.0
MAX_FRAME_BYTES = 4 * 2**20
MAX_SENDERS = 65_536


T = TypeVar("T")


class Purpose(enum.Enum):
    """Which channel a frame belongs to."""

    DISCOVERY = b"discovery"
    TRANSFER = b"transfer"
    TICKET = b"ticket"


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    sender: BootId
    counter: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    sent_ms: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    body: bytes
    mac: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


_frame_decoder = msgspec.msgpack.Decoder(_Frame)
_encoder = msgspec.msgpack.Encoder()


class _Signer:
    """MACs with one secret for one channel. The key is taken in once: that is half the time of a short frame."""

    def __init__(self, secret: bytes, purpose: Purpose) -> None:
        self._begun = hmac.new(secret, purpose.value + b"\0", hashlib.sha256)

    def mac(self, sender: bytes, counter: int, sent_ms: int, body: bytes) -> bytes:
        mac = self._begun.copy()
        mac.update(struct.pack(">B16sQQ", FRAME_VERSION, sender, counter, sent_ms) + body)
        return mac.digest()


class Sealer:
    """Signs what one process sends on one channel."""

    def __init__(
        self, secret: bytes, purpose: Purpose, sender: bytes, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._signer = _Signer(secret, purpose)
        self._sender = sender
        self._clock = clock
        self._counter = 0

    def seal(self, message: msgspec.Struct) -> bytes:
        """The frame to send, as one ZMQ part or one header value before base64."""
        self._counter += 1
        body = _encoder.encode(message)
        sent_ms = int(self._clock() * 1000)
        mac = self._signer.mac(self._sender, self._counter, sent_ms, body)
        return _encoder.encode(_Frame(FRAME_VERSION, self._sender, self._counter, sent_ms, body, mac))


class Opener(Generic[T]):
    """Verifies and decodes what one process receives on one channel.

    ``ordered=False`` is for channels whose frames may overtake each other (one HTTP request each): a frame is then
    refused if that very counter was seen, or is ``WINDOW`` behind the latest one. ``lifetime_s`` gives the seconds for
    which a message is good, beyond the ``MAX_AGE_S`` that clocks may differ by.
    """

    def __init__(
        self,
        secret: bytes,
        purpose: Purpose,
        message: type[T],
        *,
        ordered: bool = True,
        lifetime_s: Callable[[T], float] = lambda _: 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._signer = _Signer(secret, purpose)
        self._purpose = purpose
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message)
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._record: type[RisingCounter] | type[ReplayWindow] = RisingCounter if ordered else ReplayWindow
        self._senders: dict[bytes, RisingCounter | ReplayWindow] = {}

    def open(self, frame: bytes) -> T:
        """The message in ``frame``.

        Raises MalformedFrame if it is not what this channel carries, AuthenticationFailed if it is not to be believed.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise MalformedFrame(f"frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are accepted")
        try:
            outer = _frame_decoder.decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as exc:
            raise MalformedFrame(f"not a pdserve frame: {exc}") from exc
        if outer.version != FRAME_VERSION:
            raise MalformedFrame(f"frame version {outer.version}; this process speaks {FRAME_VERSION}")
        expected = self._signer.mac(outer.sender, outer.counter, outer.sent_ms, outer.body)
        if not hmac.compare_digest(expected, outer.mac):
            raise AuthenticationFailed("wrong signature: the sender has another cluster secret")
        try:
            message = self._decoder.decode(outer.body)
        except (msgspec.DecodeError, msgspec.ValidationError) as exc:
            raise MalformedFrame(f"unexpected {self._purpose.name.lower()} message: {exc}") from exc
        self._check_age(outer, MAX_AGE_S + self._lifetime_s(message))
        self._check_first_use(outer)
        return message

    def _check_age(self, frame: _Frame, max_age_s: float) -> None:
        age_s = self._clock() - frame.sent_ms / 1000
        if not -MAX_AGE_S <= age_s <= max_age_s:
            raise AuthenticationFailed(
                f"frame is {age_s:.0f} s old by this host's clock; at most {max_age_s:.0f} s are accepted: "
                "synchronise the hosts' clocks"
            )

    def _check_first_use(self, frame: _Frame) -> None:
        record = self._senders.pop(frame.sender, None) or self._record()
        self._senders[frame.sender] = record
        if len(self._senders) > MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        if not record.use(frame.counter):
            raise AuthenticationFailed("replayed frame: its counter was seen before")
