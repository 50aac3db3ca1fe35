"""Attacks on control ports and other ports that are not for clients: bytes, ZMQ messages and frames."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, get_type_hints

import msgspec

from pdserve.control.frame import MAX_FRAME_BYTES, NAMED, UNNAMED, Purpose, Sealer
from pdserve.errors import WrongReceiver
from pdserve.wire import discovery
from pdserve.wire.cache_groups import GroupSpec, Keep
from pdserve.wire.discovery import Ack, Capacity, Deregister, NodeHeartbeat, NodeInfo, NodeLoad, Register, Role
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.terms import PromptTerms
from pdserve.wire.transfer import (
    Cancel,
    Done,
    EngineSpec,
    Examine,
    Examined,
    Failed,
    Hello,
    LinkAddress,
    MemoryOffer,
    Ping,
    Pong,
    PrefillRequest,
    Probe,
    ProbeEnd,
    ProbeRefused,
    Refused,
    Welcome,
)
from pdserve.wire.version import SPOKEN
from tests.attacks.heads import HTTP2_PREFACE, TLS_HELLO
from tests.attacks.insider import FOREIGN, changed, flipped, sealed
from tests.attacks.target import CONTEXT, PROMPT

MIB = 2**20
_VERSIONS = (SPOKEN.newest, SPOKEN.oldest)
_DICE = random.Random(11)
NULL = b"NULL" + bytes(16)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + NULL + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
CONNECTED = GREETING + READY


def _long(kind: int, size: int) -> bytes:
    """Returns the beginning of a ZMTP frame that claims this size."""
    return bytes((kind,)) + size.to_bytes(8, "big")


BYTES = {
    "nothing": b"",
    "one byte": b"x",
    "one NUL": b"\0",
    "64 NUL bytes": bytes(64),
    "1 MiB of NUL": bytes(MIB),
    "1,000 times 0xff": b"\xff" * 1_000,
    "64 random bytes": _DICE.randbytes(64),
    "1,000 random bytes": _DICE.randbytes(1_000),
    "1 MiB of random bytes": _DICE.randbytes(MIB),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an HTTP/2 preface": HTTP2_PREFACE,
    "a TLS hello": TLS_HELLO,
    "half a greeting": GREETING[:20],
    "a greeting": GREETING,
    "a greeting of version 1": b"\x01\x00",
    "a greeting of version 2": b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00",
    "a greeting of version 9": GREETING[:10] + b"\x09\x09" + GREETING[12:],
    "a greeting for passwords": GREETING.replace(NULL, b"PLAIN" + bytes(15)),
    "a greeting for CURVE": GREETING.replace(NULL, b"CURVE" + bytes(15)),
    "a greeting for nobody's mechanism": GREETING.replace(NULL, b"\xff" * 20),
    "a greeting, and rubbish": GREETING + _DICE.randbytes(500),
    "a handshake that says it is huge": GREETING + _long(6, 2**63 - 1),
    "a handshake with a socket type of nobody's": CONNECTED.replace(b"DEALER", b"WIZARD"),
    "a handshake of a publisher": GREETING + b"\x04\x16\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB",
    "a handshake that lies about a length": GREETING + b"\x04\x19\x05READY\xffSocket-Type\xff\xff\xff\xffDEALER",
    "a handshake that is an error": GREETING + b"\x04\x0b\x05ERROR\x04oops",
    "a connection, and rubbish": CONNECTED + _DICE.randbytes(500),
    "a message that says it is 2^63 - 1 bytes long": CONNECTED + _long(2, 2**63 - 1) + b"x",
    "a message that says it is 2^64 - 1 bytes long": CONNECTED + _long(2, 2**64 - 1) + b"x",
    "a message above what is taken": CONNECTED + _long(2, MAX_FRAME_BYTES + 1) + b"x",
    "a message that stays half": CONNECTED + _long(2, 1_000) + b"x",
    "parts without an end": CONNECTED + b"\x01\x01x" * 1_000,
    "a command of nobody's": CONNECTED + b"\x04\x07\x06WIZARD",
    "a command without a name": CONNECTED + b"\x04\x00",
    "a ping of a wrong length": CONNECTED + b"\x04\x05\x04PING",
    "subscriptions": CONNECTED + b"\x00\x01\x01" * 1_000,
    "reserved flags": CONNECTED + b"\xf8\x01x" * 100,
}

_MAGIC = bytes.fromhex("78563412bebafeca")
"""The first bytes of a UCX connection over TCP."""
UCX_BYTES = {
    "UCX's beginning": _MAGIC,
    "half of UCX's beginning": _MAGIC[:4],
    "UCX's beginning, and rubbish": _MAGIC + _DICE.randbytes(1_000),
    "UCX's beginning, and NUL bytes": _MAGIC + bytes(1_000),
    "UCX's beginning, and 0xff": _MAGIC + b"\xff" * 1_000,
    "UCX's beginning, and a message that says it is huge": _MAGIC + b"\x1f" + b"\xff\xff\xff\x7f" + bytes(100),
    "UCX's beginning, and half a request to connect": _MAGIC + b"\x20" + (40).to_bytes(4, "little") + bytes(20),
    "UCX's beginning, and a request to connect": _MAGIC + b"\x20" + (40).to_bytes(4, "little") + bytes(40),
}

Messages = Sequence[Sequence[bytes]]
Answer: TypeAlias = type[msgspec.Struct] | type[WrongReceiver]
"""A kind of message, or WrongReceiver for a frame that is meant for another process."""


def harmless(purpose: Purpose, own: bytes, *, names: bool = True) -> msgspec.Struct:
    """Returns a message that any sender may send: it is answered once and changes nothing.

    ``names`` is whether its frame will name its receiver.
    """
    if purpose is Purpose.TRANSFER:
        return Examine(own, *_VERSIONS)
    return NodeHeartbeat(own, NodeLoad()) if names else discovery.NodeHello(own, new_id(), *_VERSIONS)


def harmless_answer(purpose: Purpose, *, names: bool = True) -> type[msgspec.Struct]:
    if purpose is Purpose.TRANSFER:
        return Examined
    return Ack if names else discovery.ProxyWelcome


@dataclass(frozen=True)
class Known:
    """All that a misbehaving member of the cluster knows."""

    purpose: Purpose
    boot: bytes
    """The boot id of the process that is attacked."""
    welcome: bytes
    """The frame in which that process answered a greeting."""
    spec: EngineSpec
    """The spec of the prefill engine."""
    node: NodeInfo
    """A node that is not the one under attack, as it registers."""
    address: bytes
    """The address of a UCX link that accepts connections."""
    own: bytes
    sealer: Sealer
    """The sealer of this member."""
    names: bool
    """Whether its frames name their receiver. Only greetings need not."""

    @property
    def receiver(self) -> bytes | None:
        return self.boot if self.names else None

    def seal(self, *messages: msgspec.Struct) -> Messages:
        """Returns a ZMQ message of one part for each message, in the right order."""
        return [[self.sealer.seal(message, self.receiver)] for message in messages]

    def sign(self, body: bytes) -> Messages:
        """Signs bytes, which need not be a message, with a correct signature."""
        return self.sign_as(NAMED, self.boot + body) if self.names else self.sign_as(UNNAMED, body)

    def sign_as(self, version: int, body: bytes) -> Messages:
        """Signs a whole body in a frame of this version. The body need not begin with a receiver's name."""
        return [[self.sealer._seal(version, self.own, body)]]

    @property
    def harmless(self) -> msgspec.Struct:
        return harmless(self.purpose, self.own, names=self.names)

    @property
    def harmless_body(self) -> bytes:
        return msgspec.msgpack.encode(self.harmless)

    def frame(self, **how: Any) -> bytes:
        """Returns a harmless message of a new sender, sealed with the arguments in ``how``."""
        somebody = new_id()
        how = {"purpose": self.purpose, "receiver": self.receiver, "sender": somebody} | how
        return sealed(harmless(self.purpose, somebody, names=self.names), **how)


@dataclass(frozen=True)
class FrameCase:
    """ZMQ messages over one connection, and the answers that they get."""

    name: str
    purpose: Purpose
    make: Callable[[Known], Messages]
    answers: tuple[Answer, ...] = ()
    any_answers: bool = False
    """Whether any answers are right."""
    cuts: bool = False
    """Whether the server closes the connection."""
    names: bool = True
    """Whether the frames name their receiver."""


NESTED = b"\x91" * 30_000 + b"\xc0"
FORMLESS: dict[str, Callable[[Known], Messages]] = {
    "an empty message": lambda _: [[b""]],
    "a byte": lambda _: [[b"x"]],
    "1,000 random bytes": lambda _: [[_DICE.randbytes(1_000)]],
    "60,000 random bytes": lambda _: [[_DICE.randbytes(60_000)]],
    "a thousand messages of a byte": lambda _: [[b"x"]] * 1_000,
    "two parts": lambda _: [[b"x", b"y"]],
    "nothing in MessagePack": lambda _: [[b"\xc0"]],
    "an empty list": lambda _: [[b"\x90"]],
    "a list of six nothings": lambda _: [[b"\x96" + b"\xc0" * 6]],
    "a map": lambda _: [[msgspec.msgpack.encode({"kind": "hello"})]],
    "lists 30,000 deep": lambda _: [[NESTED]],
    "a list that says it is huge": lambda _: [[b"\xdd\xff\xff\xff\xff"]],
    "bytes that say they are huge": lambda _: [[b"\x96\x01\xc6\xff\xff\xff\xff"]],
    "version 0, signed": lambda known: known.sign_as(0, known.harmless_body),
    "version 3, signed": lambda known: known.sign_as(3, known.harmless_body),
    "version 3 and a name, signed": lambda known: known.sign_as(3, known.boot + known.harmless_body),
}
"""These messages are not frames of either form. Neither control port answers them."""
UNANSWERED: dict[str, Callable[[Known], Messages]] = {
    "a frame behind an empty part": lambda known: [[b"", known.frame()]],
    "two frames as parts": lambda known: [[known.frame(), known.frame()]],
    "two frames in one part": lambda known: [[known.frame() + known.frame()]],
    "half a frame": lambda known: [[known.frame()[:50]]],
    "a list of seven": lambda known: [[b"\x97" + known.frame()[1:] + b"\xc0"]],
    "a list of seven, the last one deep": lambda known: [[b"\x97" + known.frame()[1:] + NESTED]],
    "the other version": lambda known: [[changed(known.frame(), 0, lambda _: UNNAMED if known.names else NAMED)]],
    "a version of 2^63": lambda known: [[changed(known.frame(), 0, lambda _: 2**63)]],
    "a version of -1": lambda known: [[changed(known.frame(), 0, lambda _: -1)]],
    "another sender": lambda known: [[changed(known.frame(), 1, lambda _: new_id())]],
    "a sender of one byte": lambda known: [[changed(known.frame(), 1, lambda _: b"x")]],
    "another counter": lambda known: [[changed(known.frame(), 2, lambda _: 2**63 - 1)]],
    "a counter of 0": lambda known: [[changed(known.frame(), 2, lambda _: 0)]],
    "another time": lambda known: [[changed(known.frame(), 3, lambda _: 0)]],
    "a time of 2^64 - 1": lambda known: [[changed(known.frame(), 3, lambda _: 2**64 - 1)]],
    "another body": lambda known: [[changed(known.frame(), 4, flipped)]],
    "a body that is text": lambda known: [[changed(known.frame(), 4, lambda _: "x")]],
    "another signature": lambda known: [[changed(known.frame(), 5, flipped)]],
    "no signature": lambda known: [[changed(known.frame(), 5, lambda _: b"")]],
    "another cluster's secret": lambda known: [[known.frame(secret=FOREIGN)]],
    "no secret": lambda known: [[known.frame(secret=b"")]],
    "another channel's purpose": lambda known: [[known.frame(purpose=Purpose.TICKET)]],
    "the purpose of the other control port": lambda known: [[known.frame(purpose=_other(known.purpose))]],
    "no message, signed": lambda known: known.sign(b""),
}
"""These are frames of both forms. Neither control port answers them."""
STALE: dict[str, Callable[[Known], Messages]] = {
    "an old frame": lambda known: [[known.frame(late_s=120.0)]],
    "a frame of tomorrow": lambda known: [[known.frame(late_s=-86_400.0)]],
}
"""These frames are authentic and untimely. An engine tells the sender that it must greet anew; a proxy says nothing."""
UNREADABLE: dict[str, Callable[[Known], bytes]] = {
    "a message of no kind": lambda _: msgspec.msgpack.encode({}),
    "a message of nobody's kind": lambda _: msgspec.msgpack.encode({"kind": "wizard"}),
    "a message of two kinds": lambda _: b"\x82\xa4kind\xa4ping\xa4kind\xa5hello",
    "half a message": lambda known: known.harmless_body[:-3],
    "two names": lambda known: known.boot + known.harmless_body,
    "lists 30,000 deep": lambda _: b"\x81\xa4kind" + NESTED,
    "unknown fields 30,000 deep": lambda known: _with(known.harmless_body, b"\xa1x" + NESTED),
    "a kind that is no UTF-8": lambda _: b"\x81\xa4kind\xa2\xff\xfe",
    "a list for the sender": lambda known: _with(known.harmless_body, b"\xa7boot_id" + NESTED),
}
"""These bodies are signed for both control ports. A proxy tells a sender that named it that it cannot read them."""
STRAY: dict[str, Callable[[Known], Messages]] = {
    "another receiver": lambda known: [[known.sealer.seal(known.harmless, new_id())]],
    "another node": lambda known: [[known.sealer.seal(known.harmless, known.node.boot_id)]],
    "a receiver of NUL bytes": lambda known: [[known.sealer.seal(known.harmless, bytes(16))]],
    "its sender": lambda known: [[known.sealer.seal(known.harmless, known.own)]],
    "nobody, though its version does": lambda known: known.sign_as(NAMED, known.harmless_body),
    "nobody and says nothing": lambda known: known.sign_as(NAMED, b""),
    "one byte of its receiver": lambda known: known.sign_as(NAMED, known.boot[:1]),
    "all but the last byte of its receiver": lambda known: known.sign_as(NAMED, known.boot[:15]),
    "its receiver without the first byte": lambda known: known.sign_as(NAMED, known.boot[1:] + known.harmless_body),
}
"""These frames name another process. The receiver asks the sender for a greeting."""


def _other(purpose: Purpose) -> Purpose:
    return Purpose.DISCOVERY if purpose is Purpose.TRANSFER else Purpose.TRANSFER


def _with(message: bytes, field: bytes) -> bytes:
    """Returns a message, which is a short map, with one more field at its end."""
    return bytes((message[0] + 1,)) + message[1:] + field


def frame_cases() -> Iterator[FrameCase]:
    """Yields every case."""
    yield from _formless()
    yield from _receivers()
    yield from _greetings()
    yield from _probes()
    yield from (*_frames(True), *_discovery(), *_strangers(), *_orders())
    for case in (*_frames(False), *_unnamed()):
        yield replace(case, name=f"{case.name}, in a frame that names nobody", names=False)


def _formless() -> Iterator[FrameCase]:
    for purpose in (Purpose.DISCOVERY, Purpose.TRANSFER):
        port = purpose.name.lower()
        for name, make in FORMLESS.items():
            yield FrameCase(f"{port}: {name}", purpose, make)
        too_large: Callable[[Known], Messages] = lambda _: [[bytes(MAX_FRAME_BYTES + 1)]]  # noqa: E731  # short
        yield FrameCase(f"{port}: a message above what is taken", purpose, too_large, cuts=True)
        parts: Callable[[Known], Messages] = lambda _: [[b""] * 1_000]  # noqa: E731
        yield FrameCase(f"{port}: a thousand parts", purpose, parts)
    large: Callable[[Known], Messages] = lambda _: [[bytes(MAX_FRAME_BYTES)]]  # noqa: E731  # beside its like
    yield FrameCase("a message as large as is taken", Purpose.TRANSFER, large)


def _frames(names: bool) -> Iterator[FrameCase]:
    for purpose in (Purpose.DISCOVERY, Purpose.TRANSFER):
        port, answer = purpose.name.lower(), harmless_answer(purpose, names=names)
        for name, make in UNANSWERED.items():
            yield FrameCase(f"{port}: {name}", purpose, make)
        # The refusal is for the frame's sender, which is not the sender of the greeting.
        stale = (WrongReceiver,) if names and purpose is Purpose.TRANSFER else ()
        for name, make in STALE.items():
            yield FrameCase(f"{port}: {name}", purpose, make, stale)
        refusal = (discovery.ProxyRefusal,) if names and purpose is Purpose.DISCOVERY else ()
        for name, body in UNREADABLE.items():
            yield FrameCase(f"{port}: {name}, signed", purpose, _signing(body), refusal)
        yield FrameCase(
            f"{port}: a field too much, signed",
            purpose,
            _signing(lambda known: _with(known.harmless_body, b"\xa1x\x01")),
            (answer,),
        )
        yield FrameCase(f"{port}: a frame twice", purpose, _twice, (answer,))
        yield FrameCase(f"{port}: a frame overtaken by the next", purpose, _overtaken, (answer,))


def _receivers() -> Iterator[FrameCase]:
    for purpose, answer in ((Purpose.DISCOVERY, Ack), (Purpose.TRANSFER, Refused)):
        port = purpose.name.lower()
        for name, make in STRAY.items():
            yield FrameCase(f"{port}: a frame that names {name}", purpose, make, (answer,))
        yield FrameCase(f"{port}: an old frame that names another receiver", purpose, _old_stray)
        yield FrameCase(f"{port}: a frame that names its receiver in the version that names none", purpose, _hidden)
        yield FrameCase(
            f"{port}: the receiver's own answer", purpose, lambda known: [[known.welcome]], (WrongReceiver,)
        )


def _signing(body: Callable[[Known], bytes]) -> Callable[[Known], Messages]:
    return lambda known: known.sign(body(known))


def _old_stray(known: Known) -> Messages:
    return [[known.frame(receiver=new_id(), late_s=120.0)]]


def _hidden(known: Known) -> Messages:
    return known.sign_as(UNNAMED, known.boot + known.harmless_body)


def _twice(known: Known) -> Messages:
    (message,) = known.seal(known.harmless)
    return [message, message]


def _overtaken(known: Known) -> Messages:
    first, second = known.seal(known.harmless, known.harmless)
    return [second, first]


# ------------------------------------------------------------------ discovery


def _discovery() -> Iterator[FrameCase]:
    def case(name: str, make: Callable[[Known], Messages], *answers: Answer) -> FrameCase:
        return FrameCase(name, Purpose.DISCOVERY, make, answers)

    refusal = (discovery.ProxyRefusal,)
    yield case("a heartbeat of nobody", lambda known: known.seal(NodeHeartbeat(known.own, NodeLoad())), Ack)
    yield case("a heartbeat of another's", lambda known: known.seal(NodeHeartbeat(new_id(), NodeLoad())))
    yield case("a goodbye of nobody", lambda known: known.seal(Deregister(known.own)))
    yield case("a goodbye of the decode node's", lambda known: known.seal(Deregister(known.node.boot_id)))
    yield case("a registration of the decode node's", lambda known: known.seal(Register(known.node)))
    yield case("an acknowledgement", lambda known: known.seal(Ack(known.own, True)), *refusal)
    loads = {"negative": NodeLoad(-1, -(2**63), -5), "huge": NodeLoad(2**63 - 1, 2**64 - 1, 2**63)}
    for name, load in loads.items():
        yield case(
            f"a {name} load of nobody's",
            lambda known, load=load: known.seal(NodeHeartbeat(known.own, load)),  # type: ignore[misc]
            *refusal,
        )
    highest = NodeLoad(2**63 - 1, 2**63 - 1, 2**63 - 1)
    yield case("the highest load of nobody's", lambda known: known.seal(NodeHeartbeat(known.own, highest)), Ack)
    for name, versions in {"of tomorrow": (2**63, 2**62), "of yesterday": (1, 1), "below 0": (-1, -1)}.items():
        yield case(
            f"a greeting with versions {name}",
            lambda known, versions=versions: known.seal(discovery.NodeHello(known.own, new_id(), *versions)),  # type: ignore[misc]
            discovery.ProxyRefusal,
        )
    yield case(
        "a greeting with half a nonce",
        lambda known: known.seal(discovery.NodeHello(known.own, bytes(8), *_VERSIONS)),
        *refusal,
    )
    yield case(
        "fifty questions who is there",
        lambda known: known.seal(*[discovery.NodeHello(known.own, new_id(), *_VERSIONS)] * 50),
        *[discovery.ProxyWelcome] * 50,
    )
    refused: dict[str, dict[str, object]] = {
        "a name with line breaks": {"name": "x\r\ny"},
        "a URL of another scheme": {"url": "ftp://127.0.0.1:1"},
        "a URL that is a file": {"url": "file:///etc/passwd"},
        "a URL that is none": {"url": "x"},
        "a model with a NUL": {"model": "x\0"},
        "a prefill node without a control address": {"role": Role.PREFILL, "control": ""},
        "a decode node whose control address is none": {"role": Role.DECODE, "control": "x"},
        "a mixed node whose control address is a file": {"role": Role.MIXED, "control": "ipc:///tmp/x"},
        "a name of 1,000 characters": {"name": "x" * 1_000},
        "a boot of one byte": {"boot_id": b"x"},
        "a negative capacity": {"capacity": Capacity(-1, -1, -1, -1)},
        "a huge capacity": {"capacity": Capacity(2**63, 2**63, 2**63, 2**64 - 1)},
        "versions of tomorrow": {"protocol": 2**63, "oldest_protocol": 2**62},
    }
    for name, fields in refused.items():
        yield case(f"a registration with {name}", _registration(fields), *refusal)
    odd: dict[str, dict[str, object]] = {
        "another fingerprint": {"fingerprint": "x"},
        "another model": {"model": "nobody's"},
        "no name": {"name": ""},
        "a capacity of nothing": {"capacity": Capacity(0, 0, 0, 0)},
    }
    for name, fields in odd.items():
        # No other node waits for this node's role, and it deregisters at once.
        apart = {"url": "http://127.0.0.1:1", "fingerprint": "x"}
        yield case(f"a registration with {name}", _registration(apart | fields), Ack)


def _unnamed() -> Iterator[FrameCase]:
    """Yields messages that must name their receiver. In frames that name nobody, they get no answer."""
    for name, message in {
        "a heartbeat of nobody": lambda known: NodeHeartbeat(known.own, NodeLoad()),
        "a goodbye of nobody": lambda known: Deregister(known.own),
        "a goodbye of the decode node's": lambda known: Deregister(known.node.boot_id),
        "a registration": lambda known: Register(msgspec.structs.replace(known.node, boot_id=known.own)),
        "a registration of the decode node's": lambda known: Register(known.node),
        "an acknowledgement": lambda known: Ack(known.own, True),
    }.items():
        yield FrameCase(name, Purpose.DISCOVERY, lambda known, message=message: known.seal(message(known)))  # type: ignore[misc]
    for name, message in {
        "a greeting": _hello,
        "a ping of nobody": lambda known: Ping(known.own),
        "an order of nobody": lambda known: _order(known),
        "an end of nobody's": lambda known: Done(_transfer_id(known)),
        "a cancel of nobody's": lambda known: Cancel(_transfer_id(known)),
        "the end of a probe": lambda known: ProbeEnd(known.own),
        "a welcome": lambda known: Welcome(known.own, known.spec, [known.address]),
    }.items():
        yield _transfer(name, lambda known, message=message: known.seal(message(known)))  # type: ignore[misc]


def _registration(fields: dict[str, object]) -> Callable[[Known], Messages]:
    def make(known: Known) -> Messages:
        own: dict[str, object] = {"boot_id": known.own, "name": "attacker", "url": "http://127.0.0.1:1"}
        node = msgspec.structs.replace(known.node, **(own | fields))
        return known.seal(Register(node), Deregister(known.own))

    return make


# ------------------------------------------------------------------ transfer


def _transfer(name: str, make: Callable[[Known], Messages], *answers: Answer, any_answers: bool = False) -> FrameCase:
    return FrameCase(name, Purpose.TRANSFER, make, answers, any_answers)


def _strangers() -> Iterator[FrameCase]:
    """Yields messages of senders that have not greeted."""
    yield _transfer("a ping of nobody", lambda known: known.seal(Ping(known.own)), Refused)
    yield _transfer("an order of nobody", lambda known: known.seal(_order(known)), Refused)
    yield _transfer("an end of nobody's", lambda known: known.seal(Done(_transfer_id(known))))
    yield _transfer("a cancel of nobody's", lambda known: known.seal(Cancel(_transfer_id(known))))
    yield _transfer("a ping in the name of the prefill engine", lambda known: known.seal(Ping(known.boot)))
    yield _transfer("a ping in the name of another engine", lambda known: known.seal(Ping(new_id())))
    yield _transfer("a greeting in the name of another engine", _borrowed_greeting)
    yield _transfer("a prefill engine's own message", lambda known: known.seal(Pong(known.own)))
    yield _transfer("a welcome", lambda known: known.seal(Welcome(known.own, known.spec, [known.address])))


def _greetings() -> Iterator[FrameCase]:
    """Yields handshakes of engines that do not fit, or that cannot be reached."""
    odd = GroupSpec("x" * 10_000, Keep.WINDOW, -1, 2**63, -(2**63), "", 2**62)
    for name, groups in {"an odd cache group": (odd,), "ten thousand cache groups": (odd,) * 10_000}.items():
        yield _transfer(
            f"a greeting with {name}",
            lambda known, groups=groups: _greeting(known, {"groups": groups}),  # type: ignore[misc]
            any_answers=True,
        )
    for name, kind in get_type_hints(EngineSpec).items():
        if name == "groups":
            continue
        values = (0, -1, 2**40, 2**63) if kind is int else ("", "x", "x" * 10_000)
        for value in values:
            yield _transfer(
                f"a greeting with {name} = {str(value)[:20]}",
                lambda known, name=name, value=value: _greeting(known, {name: value}),  # type: ignore[misc]
                Welcome if (name, value) in FITTING else Refused,
            )
    for name, addresses in {
        "no address": [],
        "two addresses": [b"", b""],
        "an empty address": [b""],
        "an address that is no MessagePack": [b"\xff" * 50],
        "an address of 65,536 NUL bytes": [bytes(65_536)],
        "an address without a worker": [msgspec.msgpack.encode(LinkAddress(b"", 5))],
        "an address of a worker of one byte": [msgspec.msgpack.encode(LinkAddress(b"\xff", 5))],
    }.items():
        yield _transfer(
            f"a greeting with {name}",
            lambda known, addresses=addresses: known.seal(Hello(known.own, known.spec, addresses)),  # type: ignore[misc]
            any_answers=True,
        )
    yield _transfer("an address above what is taken", _too_long)
    yield _transfer(
        "an offer of memory that is not there", _offering(MemoryOffer(1, 3, "0" * 32, 4096, 0, 5)), any_answers=True
    )
    huge = MemoryOffer(2**62, 2**62, "f" * 32, 2**62, 511, 2**61)
    yield _transfer("an offer of memory of 2^62 bytes", _offering(huge), any_answers=True)
    yield _transfer("a greeting, and again", lambda known: known.seal(_hello(known), _hello(known)), any_answers=True)
    yield _transfer("fifty greetings", lambda known: known.seal(*[_hello(known)] * 50), any_answers=True)


FITTING = {("protocol", 2**40), ("protocol", 2**63), ("oldest_protocol", 0), ("oldest_protocol", -1)}
"""An engine with these values speaks further versions beside the one that is spoken here."""


def _borrowed_greeting(known: Known) -> Messages:
    return known.seal(Hello(new_id(), known.spec, [known.address]))


def _hello(known: Known) -> Hello:
    return Hello(known.own, known.spec, [known.address])


def _greeting(known: Known, change: dict[str, object]) -> Messages:
    spec = msgspec.structs.replace(known.spec, **change)
    return known.seal(Hello(known.own, spec, [known.address]))


def _too_long(known: Known) -> Messages:
    return known.seal(Hello(known.own, known.spec, [bytes(65_537)]))


def _offering(offer: MemoryOffer) -> Callable[[Known], Messages]:
    def make(known: Known) -> Messages:
        address = msgspec.msgpack.decode(known.address, type=LinkAddress)
        offering = msgspec.msgpack.encode(msgspec.structs.replace(address, offer=offer))
        return known.seal(Hello(known.own, known.spec, [offering]))

    return make


def _probes() -> Iterator[FrameCase]:
    """Yields probes, which the doctor asks for."""
    for name, address in {"no address": b"", "rubbish": b"\xff" * 100, "NUL bytes": bytes(1_000)}.items():
        yield _transfer(
            f"a probe to {name}",
            lambda known, address=address: known.seal(_probe(known, address)),  # type: ignore[misc]
            ProbeRefused,
        )
    yield _transfer("a probe of 1 TiB", lambda known: known.seal(_probe(known, b"x", 16 * MIB, 65_536)), ProbeRefused)
    for name, size, messages in (("-1 bytes", -1, 1), ("2^40 bytes", 2**40, 1), ("no messages", 1, 0)):
        yield _transfer(
            f"a probe of {name}",
            lambda known, size=size, messages=messages: known.seal(_probe(known, b"x", size, messages)),  # type: ignore[misc]
        )
    yield _transfer("the end of nobody's probe", lambda known: known.seal(ProbeEnd(known.own)))


def _probe(known: Known, address: bytes, size: int = 1, messages: int = 1) -> Probe:
    return Probe(boot_id=known.own, address=address, message_bytes=size, messages=messages)


def _orders() -> Iterator[FrameCase]:
    """Yields orders of a decode engine that has greeted."""

    def case(name: str, *answers: Answer, any_answers: bool = False, **fields: object) -> FrameCase:
        return _transfer(
            f"an order with {name}",
            lambda known: known.seal(_hello(known), _order(known, **fields)),
            *((Welcome,) if answers else ()),
            *answers,
            any_answers=any_answers,
        )

    yield _transfer("an order with a field too much", _order_and(b"\xa1x\x01"), Welcome, Failed)
    yield _transfer("an order with fields 30,000 deep", _order_and(b"\xa1x" + NESTED), Welcome)
    yield _transfer(
        "an order with a salt that is no UTF-8", _order_and(b"\xa5terms\x81\xaacache_salt\xa2\xff\xfe"), Welcome, Failed
    )
    yield _transfer("an order that names nobody, after a greeting that does", _order_that_names_nobody, Welcome)
    yield case("no tokens", Failed, token_ids=[])
    yield case("a token beyond the vocabulary", Failed, token_ids=[49_152] * 40)
    yield case("a negative token", Failed, token_ids=[5, -1] * 20)
    yield case("a token of 2^63", Failed, token_ids=[2**63] * 40)
    yield case("more tokens than the context", Failed, token_ids=[5] * (CONTEXT + 1))
    yield case("a million tokens", Failed, token_ids=[5] * MIB)
    yield case("a block that it has not", Failed, first_block=1_000)
    yield case("a block of 2^62", Failed, first_block=2**62)
    for name, sampling in IMPOSSIBLE.items():
        yield case(name, Failed, sampling=sampling)
    for name, sampling in ODD.items():
        yield case(name, any_answers=True, sampling=sampling)
    yield case("a deadline of 10^300 s", any_answers=True, deadline_s=1e300)
    yield case("a deadline of no number", any_answers=True, deadline_s=float("nan"))
    yield case("a deadline without an end", any_answers=True, deadline_s=float("inf"))
    yield case("200 children", any_answers=True, child_seeds=tuple(range(200)))
    yield case("a salt of 1 MiB", any_answers=True, terms=PromptTerms(cache_salt="x" * MIB))
    yield _transfer("an order twice", lambda known: known.seal(_hello(known), *[_order(known)] * 2), any_answers=True)
    yield _transfer(
        "an order and its end at once",
        lambda known: known.seal(_hello(known), _order(known), Done(_transfer_id(known))),
        any_answers=True,
    )
    yield _transfer(
        "an order and its cancel at once",
        lambda known: known.seal(_hello(known), _order(known), Cancel(_transfer_id(known))),
        any_answers=True,
    )


def _order_and(field: bytes) -> Callable[[Known], Messages]:
    def make(known: Known) -> Messages:
        order = _with(msgspec.msgpack.encode(_order(known)), field)
        return [*known.seal(_hello(known)), *known.sign(order)]

    return make


def _order_that_names_nobody(known: Known) -> Messages:
    (greeting,) = known.seal(_hello(known))
    (order,) = replace(known, names=False).seal(_order(known))
    return [greeting, order]


_GREEDY: dict[str, Any] = {"max_tokens": 1, "seed": 0, "temperature": 0.0}
IMPOSSIBLE = {
    "a bias beyond the vocabulary": SamplingParams(**_GREEDY, logit_bias=((10**6, 1.0),)),
    "a bias of a negative token": SamplingParams(**_GREEDY, logit_bias=((-(10**6), 1.0),)),
    "nothing allowed that there is": SamplingParams(**_GREEDY, allowed_token_ids=(10**6,)),
    "negative bad words": SamplingParams(**_GREEDY, bad_words=((-(10**6),),)),
    "negative stops": SamplingParams(**_GREEDY, stop_token_ids=(-(10**6),), min_tokens=1),
}
"""A greeted engine's order with these parameters is refused."""
ODD = {
    "a bias of no number": SamplingParams(**_GREEDY, logit_bias=((5, float("nan")),)),
    "an infinite bias": SamplingParams(**_GREEDY, logit_bias=((5, float("inf")),)),
    "bad words beyond the vocabulary": SamplingParams(**_GREEDY, bad_words=((10**6,),)),
    "stops beyond the vocabulary": SamplingParams(**_GREEDY, stop_token_ids=(10**6,), min_tokens=1),
    "a million log probabilities": SamplingParams(**_GREEDY, logprobs=10**6),
    "a temperature of 10^308": SamplingParams(max_tokens=1, seed=0, temperature=1e308),
    "a temperature of no number": SamplingParams(max_tokens=1, seed=0, temperature=float("nan")),
    "an infinite temperature": SamplingParams(max_tokens=1, seed=0, temperature=float("inf")),
    "a top_k of 2^62": SamplingParams(max_tokens=1, seed=0, top_k=2**62),
    "a top_p of 10^-300": SamplingParams(max_tokens=1, seed=0, top_p=1e-300),
    "a repetition penalty of 10^-300": SamplingParams(**_GREEDY, repetition_penalty=1e-300),
    "a repetition penalty without an end": SamplingParams(**_GREEDY, repetition_penalty=float("inf")),
    "max_tokens of 2^62": SamplingParams(max_tokens=2**62, seed=0, temperature=0.0),
    "min_tokens of 2^62": SamplingParams(**_GREEDY, min_tokens=2**62),
}


def _transfer_id(known: Known) -> TransferId:
    return TransferId(known.own, 0, known.own)


def _order(known: Known, **fields: object) -> PrefillRequest:
    ordered: dict[str, Any] = {
        "transfer_id": _transfer_id(known),
        "tag": 1 + _DICE.getrandbits(38),
        "token_ids": PROMPT,
        "first_block": 0,
        "sampling": SamplingParams(**_GREEDY),
        "deadline_s": 30.0,
        "terms": PromptTerms(cache_salt=known.own.hex()),
    }
    return PrefillRequest(**(ordered | fields))
