"""Authenticates messages: every control message between hosts travels in a signed frame.

A frame is a MessagePack array ``[version, sender, counter, sent_ms, body, mac]``. ``mac`` is HMAC-SHA256 with the
cluster secret over all the rest and over the channel's purpose, so a frame of one channel is not valid on another. In
frames of version 2 the body begins with the boot id of the receiver, and no other process accepts the frame. A frame
of version 1 names no receiver: a greeting to a process whose boot id is not known yet, or a ticket (which names its
node itself). A frame in an HTTP header is written as base64url.

Replays are refused: a sender's counter must rise (or be a new one, if frames may overtake each other), and a frame
that is more than ``MAX_AGE_S`` old (or early) by the receiver's clock is dropped. If frames may queue before they are
opened, age alone is no sign of a replay, and messages say for how long they are valid.

``ReplayWindow`` remembers which of one sender's counters were used, in memory that does not grow with the number of
frames.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import math
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec

from pdserve.errors import (
    AuthenticationFailed,
    ForgedFrame,
    MalformedFrame,
    StaleFrame,
    UnreadableMessage,
    WrongReceiver,
)
from pdserve.wire.ids import BootId
from pdserve.wire.version import for_protocol

WINDOW = 65_536
"""How many later frames of its sender may overtake a frame: 16 times the requests that a proxy admits by default."""

_MASK = (1 << WINDOW) - 1


class RisingCounter:
    """The counter of a sender whose frames come in the order in which they were sent. Counters begin at 1."""

    def __init__(self) -> None:
        self._last = 0

    def use(self, counter: int) -> bool:
        """Notes a counter. Returns whether it is higher than all before."""
        if counter <= self._last:
            return False
        self._last = counter
        return True


class ReplayWindow:
    """The used counters of a sender whose frames may overtake each other: the sliding window of RFC 4303.

    Counters behind the window count as used.
    """

    def __init__(self) -> None:
        self._highest = 0
        self._used = 1
        """Bit i says whether counter ``_highest`` - i was used."""

    def use(self, counter: int) -> bool:
        """Notes a counter. Returns whether this is its first use and it is not behind the window."""
        ahead = counter - self._highest
        if ahead > 0:
            self._used = ((self._used << min(ahead, WINDOW)) | 1) & _MASK
            self._highest = counter
            return True
        bit = 1 << -ahead if -ahead < WINDOW else 0
        if not bit or self._used & bit:
            return False
        self._used |= bit
        return True


class ClockSkew:
    """How far other hosts' clocks are from this one's, by the age of their frames in this minute and the last.

    Some frames wait on the way, so of each sender the one with the least age counts. One thread notes; all may read.
    """

    def __init__(self) -> None:
        self._began_s = 0.0
        self._present: dict[bytes, float] = {}
        self._before: dict[bytes, float] = {}

    def note(self, sender: bytes, age_s: float, now_s: float) -> None:
        if not 0 <= now_s - self._began_s < SKEW_WINDOW_S:
            self._before, self._present, self._began_s = self._present, {}, now_s
        if abs(age_s) < abs(self._present.get(sender, math.inf)) and len(self._present) < MAX_SENDERS:
            self._present[sender] = age_s

    def worst_s(self) -> float:
        """Returns the difference of the sender whose clock differs most: above 0 if it is behind."""
        return max((self._before.copy() | self._present.copy()).values(), key=abs, default=0.0)


UNNAMED = 1
"""The version of frames that do not name their receiver."""
NAMED = 2
"""The version of frames whose body begins with their receiver's boot id."""
MAX_AGE_S = 60.0
MAX_FRAME_BYTES = 4 * 2**20
MAX_SENDERS = 65_536
SKEW_WINDOW_S = 60.0
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that msgspec raises for bytes of another form. The last two are for text that is not UTF-8, and for
endlessly nested arrays in an unknown field.
"""
_NAME_BYTES = 16
MAX_REASON_CHARS = 2_000
Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
"""Tells people why something is refused or has failed. Senders cut it off at this length."""

T = TypeVar("T")


def to_header(frame: bytes) -> str:
    """Returns a frame as the value of an HTTP header: base64url without padding."""
    encoded = binascii.b2a_base64(frame, newline=False)
    return encoded.translate(_URL_SAFE).rstrip(b"=").decode("ascii")


def from_header(value: str, max_chars: int) -> bytes:
    """Returns the frame in the value of an HTTP header. Raises MalformedFrame if there is none."""
    if len(value) > max_chars:
        raise MalformedFrame(f"it has {len(value)} characters; at most {max_chars} are accepted")
    try:
        return base64.b64decode(value.encode("ascii") + b"=" * (-len(value) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as exc:
        raise MalformedFrame("it is not base64url") from exc


class Purpose(enum.Enum):
    """The channel that a frame belongs to."""

    DISCOVERY = b"discovery"
    TRANSFER = b"transfer"
    TICKET = b"ticket"
    COMMAND = b"command"


class _Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    sender: BootId
    counter: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    sent_ms: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    body: bytes
    mac: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


_frame_decoder = msgspec.msgpack.Decoder(_Frame)
_encoder = msgspec.msgpack.Encoder()
_BLOCK_BYTES = 64
"""The block of SHA-256, to which HMAC pads a key."""
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_SIGNED = struct.Struct(">B16sQQ")


class _Signer:
    """Makes MACs with one secret for one channel. It hashes the key once, which is half the time of a short frame.

    It hashes by itself, as RFC 2104 says: the calls of Python's ``hmac`` are half of the other half.
    """

    def __init__(self, secret: bytes, purpose: Purpose) -> None:
        key = secret if len(secret) <= _BLOCK_BYTES else hashlib.sha256(secret).digest()
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded) + purpose.value + b"\0")
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def mac(self, version: int, sender: bytes, counter: int, sent_ms: int, body: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(_SIGNED.pack(version, sender, counter, sent_ms) + body)
        outer.update(inner.digest())
        return outer.digest()


class Secrets:
    """The cluster secret, or two of them, one a line, while it is replaced: the first one signs, and both are accepted.

    Every ``Sealer`` and ``Opener`` that is made with it follows ``renew``, which may be called in any thread.
    """

    def __init__(self, secret: bytes) -> None:
        self.lines = _lines(secret)

    def renew(self, secret: bytes) -> None:
        """Replaces the secrets, from the next frame on."""
        self.lines = _lines(secret)

    def __bool__(self) -> bool:
        return any(self.lines)


def _lines(secret: bytes) -> tuple[bytes, ...]:
    return tuple(line for line in secret.split(b"\n") if line) or (b"",)


class _Signers:
    """One signer for each accepted secret. The first one signs."""

    def __init__(self, secret: bytes | Secrets, purpose: Purpose) -> None:
        self._secrets = secret if isinstance(secret, Secrets) else Secrets(secret)
        self._purpose = purpose
        self._lines: tuple[bytes, ...] = ()
        self._signers: tuple[_Signer, ...] = ()

    def now(self) -> tuple[_Signer, ...]:
        lines = self._secrets.lines
        if lines is not self._lines:
            self._signers = tuple(_Signer(line, self._purpose) for line in lines)
            self._lines = lines
        return self._signers


class Sealer:
    """Signs what one process sends on one channel."""

    def __init__(
        self, secret: bytes | Secrets, purpose: Purpose, sender: bytes, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._signers = _Signers(secret, purpose)
        self._sender = sender
        self._clock = clock
        self._counter = 0

    def seal(self, message: msgspec.Struct, receiver: bytes | None = None) -> bytes:
        """Returns the frame of a message, as one ZMQ part or one header value before base64.

        ``receiver`` is the boot id of the one process that may accept it, or None if that is not known yet.
        """
        body = _encoder.encode(message)
        if receiver is None:
            return self._seal(UNNAMED, self._sender, body)
        return self._seal(NAMED, self._sender, receiver + body)

    def seal_to(self, receiver: bytes, protocol: int, message: msgspec.Struct) -> bytes:
        """Returns a frame for a peer with which ``protocol`` was agreed on."""
        return self.seal(for_protocol(message, protocol), receiver)

    def _seal(self, version: int, sender: bytes, body: bytes) -> bytes:
        self._counter += 1
        sent_ms = int(self._clock() * 1000)
        mac = self._signers.now()[0].mac(version, sender, self._counter, sent_ms, body)
        return _encoder.encode(_Frame(version, sender, self._counter, sent_ms, body, mac))


@dataclass(frozen=True, slots=True)
class Opened(Generic[T]):
    """An authentic message with its sender."""

    message: T
    sender: bytes
    named: bool
    """Whether the frame named this process as its receiver."""


class Opener(Generic[T]):
    """Verifies and decodes what one process receives on one channel.

    ``ordered=False`` is for channels whose frames may overtake each other (one HTTP request each): a frame is then
    refused if its counter was seen, or is ``WINDOW`` behind the latest one. ``lifetime_s`` returns the seconds for
    which a message is valid, beyond the ``MAX_AGE_S`` that clocks may differ by. ``receiver`` is this process's boot
    id. Without one, only frames that name no receiver are accepted. ``skew`` notes the age of each frame that was
    never seen before, those among them that are too old.
    """

    def __init__(
        self,
        secret: bytes | Secrets,
        purpose: Purpose,
        message: type[T],
        *,
        receiver: bytes | None = None,
        ordered: bool = True,
        lifetime_s: Callable[[T], float] = lambda _: 0.0,
        clock: Callable[[], float] = time.time,
        skew: ClockSkew | None = None,
    ) -> None:
        self._skew = skew
        self._signers = _Signers(secret, purpose)
        self._purpose = purpose
        self._receiver = receiver
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message)
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._record: type[RisingCounter] | type[ReplayWindow] = RisingCounter if ordered else ReplayWindow
        self._senders: dict[bytes, RisingCounter | ReplayWindow] = {}

    def open(self, frame: bytes) -> T:
        """Returns the message in ``frame``. Raises what ``open_from`` raises."""
        return self.open_from(frame).message

    def open_from(self, frame: bytes) -> Opened[T]:
        """Returns the message in ``frame`` with its sender.

        Raises MalformedFrame if it is no message of this channel (UnreadableMessage if it is authentic nonetheless),
        and AuthenticationFailed if it cannot be trusted (ForgedFrame if its signature is wrong; WrongReceiver if it is
        authentic, but for another process;
        StaleFrame if it names this one, is the next of its sender, and only too old).
        """
        outer = self._authentic(frame)
        named = outer.version == NAMED
        if named and outer.body[:_NAME_BYTES] != self._receiver:
            self._check_age(outer, MAX_AGE_S)
            raise WrongReceiver("frame is for another process, or for another start of this one", outer.sender)
        body = outer.body[_NAME_BYTES:] if named else outer.body
        try:
            message = self._decoder.decode(body)
        except UNDECODABLE as exc:
            self._use(outer, MAX_AGE_S)
            reason = f"unexpected {self._purpose.name.lower()} message: {exc}"
            raise UnreadableMessage(reason, outer.sender, body if named else b"") from exc
        self._use(outer, MAX_AGE_S + self._lifetime_s(message))
        return Opened(message, outer.sender, named)

    def _authentic(self, frame: bytes) -> _Frame:
        if len(frame) > MAX_FRAME_BYTES:
            raise MalformedFrame(f"frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES} are accepted")
        try:
            outer = _frame_decoder.decode(frame)
        except UNDECODABLE as exc:
            raise MalformedFrame(f"not a pdserve frame: {exc}") from exc
        if outer.version not in (UNNAMED, NAMED):
            raise MalformedFrame(f"frame version {outer.version}; this process speaks {UNNAMED} and {NAMED}")
        signed = (outer.version, outer.sender, outer.counter, outer.sent_ms, outer.body)
        if not any(hmac.compare_digest(signer.mac(*signed), outer.mac) for signer in self._signers.now()):
            raise ForgedFrame("wrong signature: the sender has another cluster secret")
        return outer

    def _use(self, frame: _Frame, max_age_s: float) -> None:
        """Notes that a frame which is for this process was used. Raises AuthenticationFailed if it may not be."""
        try:
            self._check_age(frame, max_age_s)
        except AuthenticationFailed as exc:
            # A frame that names no receiver may have been sent to another one, whose frames come here by an attacker.
            if frame.version == NAMED and self._counters_of(frame.sender).use(frame.counter):
                self._note_age(frame)
                raise StaleFrame(str(exc), frame.sender) from exc
            raise
        self._check_first_use(frame)

    def _check_age(self, frame: _Frame, max_age_s: float) -> None:
        age_s = self._clock() - frame.sent_ms / 1000
        if not -MAX_AGE_S <= age_s <= max_age_s:
            raise AuthenticationFailed(
                f"frame is {age_s:.0f} s old by this host's clock; at most {max_age_s:.0f} s are accepted: "
                "synchronise the hosts' clocks"
            )

    def _check_first_use(self, frame: _Frame) -> None:
        if not self._counters_of(frame.sender).use(frame.counter):
            raise AuthenticationFailed("replayed frame: its counter was seen before")
        self._note_age(frame)

    def _note_age(self, frame: _Frame) -> None:
        if self._skew is not None:
            now_s = self._clock()
            self._skew.note(frame.sender, now_s - frame.sent_ms / 1000, now_s)

    def _counters_of(self, sender: bytes) -> RisingCounter | ReplayWindow:
        record = self._senders.pop(sender, None) or self._record()
        self._senders[sender] = record
        if len(self._senders) > MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        return record
