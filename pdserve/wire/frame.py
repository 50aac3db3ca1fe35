"""Authenticated frames: every control message between hosts travels in one.

A frame is a MessagePack array ``[version, sender, counter, sent_ms, body, mac]``. ``mac`` is HMAC-SHA256 with the
cluster secret over all the rest and over the channel's purpose, so a frame of one channel is no good on another. In
frames of version 2 the body begins with the boot id of the process that the frame is for, and no other process takes
it. A frame of version 1 names nobody: greetings of somebody whose boot id is not known yet, tickets (which name their
node themselves), and all frames from and for pdserve 0.1.

Replays are refused: a sender's counter must rise (or, where frames may overtake each other, be a new one), and a frame
older (or newer) than ``MAX_AGE_S`` by the receiver's clock is dropped. Where frames may have to queue before they are
looked at, messages say how long they are good for instead: age alone is no sign of a replay there.

``ReplayWindow`` remembers for ever which of one sender's counters were used, in memory that does not grow with the
number of frames.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec

from pdserve.errors import AuthenticationFailed, MalformedFrame, UnreadableMessage, WrongReceiver
from pdserve.wire.ids import BootId, new_id
from pdserve.wire.version import NAMED_RECEIVERS, RELEASED_0_1, for_protocol

WINDOW = 65_536
"""How many later frames of its sender may be taken before one: 16 times what a proxy lets in at once by default."""

_MASK = (1 << WINDOW) - 1


class RisingCounter:
    """For frames that come in the order in which they were sent. Counters begin at 1."""

    def __init__(self) -> None:
        self._last = 0

    def use(self, counter: int) -> bool:
        """Whether it is higher than all before."""
        if counter <= self._last:
            return False
        self._last = counter
        return True


class ReplayWindow:
    """For frames that may overtake each other: the sliding window of RFC 4303. What is behind it counts as used."""

    def __init__(self) -> None:
        self._highest = 0
        self._used = 1
        """Bit i is for counter ``_highest`` - i."""

    def use(self, counter: int) -> bool:
        """Whether this is the first use of ``counter``, and not too far behind to be sure of it."""
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


UNNAMED = 1
"""Version of frames that do not name their receiver."""
NAMED = 2
"""Version of frames whose body begins with their receiver's boot id."""
MAX_AGE_S = 60.0
MAX_FRAME_BYTES = 4 * 2**20
MAX_SENDERS = 65_536
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they should be: the last two for text that is not UTF-8, and for
arrays within arrays without end in a field that nobody knows.
"""
_NAME_BYTES = 16
MAX_REASON_CHARS = 2_000
Reason: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]
"""Why something is refused or has failed, for people. Whoever sends one cuts it off there."""

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

    def mac(self, version: int, sender: bytes, counter: int, sent_ms: int, body: bytes) -> bytes:
        mac = self._begun.copy()
        mac.update(struct.pack(">B16sQQ", version, sender, counter, sent_ms) + body)
        return mac.digest()


class Secrets:
    """The cluster secret, or two of them while it is replaced, one a line: the first one signs, both are believed.

    Every ``Sealer`` and ``Opener`` that is made with it follows ``renew``, which may be called in any thread.
    """

    def __init__(self, secret: bytes) -> None:
        self.lines = _lines(secret)

    def renew(self, secret: bytes) -> None:
        """From the next frame on."""
        self.lines = _lines(secret)

    def __bool__(self) -> bool:
        return any(self.lines)


def _lines(secret: bytes) -> tuple[bytes, ...]:
    return tuple(line for line in secret.split(b"\n") if line) or (b"",)


class _Signers:
    """One for each secret that is good now, the one to sign with first."""

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
        self._alias = new_id()
        self._clock = clock
        self._counter = 0

    def seal(self, message: msgspec.Struct, receiver: bytes | None = None) -> bytes:
        """The frame to send, as one ZMQ part or one header value before base64.

        ``receiver`` is the boot id of the one process that shall take it; None if that is not known yet.
        """
        body = _encoder.encode(message)
        if receiver is None:
            return self._seal(UNNAMED, self._sender, body)
        return self._seal(NAMED, self._sender, receiver + body)

    def seal_for_0_1(self, message: msgspec.Struct) -> bytes:
        """As pdserve 0.1 reads it. A receiver that is newer can tell that this was not meant for it.

        The frame names nobody, so that it could be replayed anywhere. But its sender is another random number than the
        boot id in the message, which 0.1 does not compare; those who do compare them do not take it.
        """
        return self._seal(UNNAMED, self._alias, _encoder.encode(for_protocol(message, RELEASED_0_1)))

    def seal_to(self, receiver: bytes, protocol: int, message: msgspec.Struct) -> bytes:
        """For a peer with whom ``protocol`` was agreed."""
        if protocol < NAMED_RECEIVERS:
            return self.seal_for_0_1(message)
        return self.seal(for_protocol(message, protocol), receiver)

    def _seal(self, version: int, sender: bytes, body: bytes) -> bytes:
        self._counter += 1
        sent_ms = int(self._clock() * 1000)
        mac = self._signers.now()[0].mac(version, sender, self._counter, sent_ms, body)
        return _encoder.encode(_Frame(version, sender, self._counter, sent_ms, body, mac))


@dataclass(frozen=True, slots=True)
class Opened(Generic[T]):
    """An authentic message, and what its frame says about it."""

    message: T
    sender: bytes
    named: bool
    """Whether the frame named this process as its receiver."""

    @property
    def protocol(self) -> int:
        """The oldest version of the protocol that has such frames."""
        return NAMED_RECEIVERS if self.named else RELEASED_0_1


class Opener(Generic[T]):
    """Verifies and decodes what one process receives on one channel.

    ``ordered=False`` is for channels whose frames may overtake each other (one HTTP request each): a frame is then
    refused if that very counter was seen, or is ``WINDOW`` behind the latest one. ``lifetime_s`` gives the seconds for
    which a message is good, beyond the ``MAX_AGE_S`` that clocks may differ by. ``receiver`` is this process's boot id;
    without one, it takes only frames that name nobody.
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
    ) -> None:
        self._signers = _Signers(secret, purpose)
        self._purpose = purpose
        self._receiver = receiver
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message)
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._record: type[RisingCounter] | type[ReplayWindow] = RisingCounter if ordered else ReplayWindow
        self._senders: dict[bytes, RisingCounter | ReplayWindow] = {}

    def open(self, frame: bytes) -> T:
        """The message in ``frame``. Raises as ``open_from`` does."""
        return self.open_from(frame).message

    def open_from(self, frame: bytes) -> Opened[T]:
        """The message in ``frame``, and from whom it is.

        Raises MalformedFrame if it is not what this channel carries (UnreadableMessage if it is authentic nonetheless),
        AuthenticationFailed if it is not to be believed (WrongReceiver if it is authentic, but for another process).
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
            self._check_age(outer, MAX_AGE_S)
            self._check_first_use(outer)
            reason = f"unexpected {self._purpose.name.lower()} message: {exc}"
            raise UnreadableMessage(reason, outer.sender, body if named else b"") from exc
        self._check_age(outer, MAX_AGE_S + self._lifetime_s(message))
        self._check_first_use(outer)
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
            raise AuthenticationFailed("wrong signature: the sender has another cluster secret")
        return outer

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
