"""Tests what hosts of two versions read of each other, with the schema of the last release beside today's."""

from __future__ import annotations

from typing import Annotated, Any

import msgpack
import msgspec
import pytest

from pdserve.errors import UnreadableMessage
from pdserve.wire import discovery, transfer
from pdserve.wire.frame import Opener, Purpose, Sealer
from pdserve.wire.grammar import Grammar, GrammarKind
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.ticket import Ticket
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION, RELEASED_0_1, Spoken, for_protocol, since
from tests.wire import released_0_1 as released
from tests.wire.test_messages import CHANNELS

SECRET = b"the secret of a cluster"
OURS, THEIRS = b"o" * 16, b"t" * 16

RELEASED: dict[Any, Any] = {
    discovery.ToProxy: released.ToProxy,
    discovery.FromProxy: released.Ack,
    Ticket: released.Ticket,
    transfer.ToPrefill: released.ToPrefill,
    transfer.ToDecode: released.ToDecode,
}
NEW_KINDS = (
    discovery.NodeHello,
    discovery.ProxyWelcome,
    discovery.ProxyRefusal,
    transfer.Accept,
    transfer.BlocksReady,
    transfer.CachedRequest,
    transfer.Held,
    transfer.Offer,
)
"""These are not sent to a host of 0.1, except where its version is not known yet."""

SENT = [
    pytest.param(channel, message, id=type(message).__name__)
    for channel, messages in CHANNELS
    if channel in RELEASED
    for message in messages
    if not isinstance(message, NEW_KINDS)
]


@pytest.mark.parametrize(("channel", "message"), SENT)
def test_the_last_release_reads_what_is_sealed_for_it(channel: Any, message: msgspec.Struct) -> None:
    """A field that is added without ``since`` fails here."""
    purpose = Purpose.TRANSFER
    frame = Sealer(SECRET, purpose, OURS).seal_for_0_1(message)
    read = released.Opener(SECRET, purpose.value, RELEASED[channel]).open(frame)
    plain = msgspec.to_builtins(read, builtin_types=(bytes,))
    assert msgspec.convert(plain, channel) == for_protocol(message, RELEASED_0_1)


@pytest.mark.parametrize(("channel", "message"), SENT)
def test_what_the_last_release_sends_is_read(channel: Any, message: msgspec.Struct) -> None:
    old = for_protocol(message, RELEASED_0_1)
    theirs = msgspec.convert(msgspec.to_builtins(old, builtin_types=(bytes,)), RELEASED[channel])
    opened = Opener(SECRET, Purpose.TRANSFER, channel, receiver=OURS).open_from(
        released.Sealer(SECRET, b"transfer", THEIRS).seal(theirs)
    )
    assert (opened.message, opened.sender, opened.protocol) == (old, THEIRS, RELEASED_0_1)


def test_the_last_release_drops_frames_that_name_a_receiver_and_says_why() -> None:
    frame = Sealer(SECRET, Purpose.DISCOVERY, OURS).seal(discovery.Deregister(OURS), THEIRS)
    with pytest.raises(released.Refusal, match="frame version 2; this process speaks 1"):
        released.Opener(SECRET, b"discovery", released.ToProxy).open(frame)


def test_engines_tell_the_last_release_its_own_version() -> None:
    (spec,) = {m.spec for _, messages in CHANNELS for m in messages if isinstance(m, transfer.Examined)}
    spec = msgspec.structs.replace(spec, protocol=PROTOCOL_VERSION, oldest_protocol=OLDEST_PROTOCOL)
    hello = for_protocol(transfer.Hello(OURS, spec, [b"address"]), RELEASED_0_1)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=released.ToPrefill)
    assert read.spec.protocol == released.PROTOCOL_VERSION


# ------------------------------------------------------------ the next minor version


class NextLoad(msgspec.Struct):
    running: int = 1
    waiting: int = 2
    free_blocks: int = 3
    temperature_c: int = 40


class NextHeartbeat(msgspec.Struct, tag_field="kind", tag="heartbeat"):
    boot_id: bytes
    load: NextLoad
    zone: str


def test_what_the_next_version_states_besides_is_ignored() -> None:
    opener: Opener[Any] = Opener(SECRET, Purpose.DISCOVERY, discovery.ToProxy, receiver=OURS)  # type: ignore[arg-type]
    frame = Sealer(SECRET, Purpose.DISCOVERY, THEIRS).seal(NextHeartbeat(THEIRS, NextLoad(), "eu"), OURS)
    assert opener.open(frame) == discovery.NodeHeartbeat(THEIRS, discovery.NodeLoad(1, 2, 3))


class NextSampling(SamplingParams, frozen=True, kw_only=True, omit_defaults=True):
    temperature_decay: float = 0.0


def test_the_last_release_refuses_a_grammar_by_name() -> None:
    """It would sample a first token that the grammar forbids."""
    asked = SamplingParams(max_tokens=1, seed=1, grammar=Grammar(GrammarKind.REGEX, "[ab]"))
    assert for_protocol(asked, RELEASED_0_1) == asked
    with pytest.raises(msgspec.ValidationError, match="unknown field `grammar`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=released.SamplingParams)


class NextTicket(Ticket, frozen=True, kw_only=True, omit_defaults=True):
    sampling: NextSampling | None = None


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_what_the_next_version_asks_for_besides_is_refused_by_name_when_it_is_asked_for(decay: float) -> None:
    asked = NextSampling(max_tokens=1, seed=1, temperature_decay=decay)
    if decay:
        with pytest.raises(msgspec.ValidationError, match="unknown field `temperature_decay`"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=SamplingParams)
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=SamplingParams).max_tokens == 1


def test_a_ticket_of_the_next_version_is_refused_by_the_name_of_what_is_new() -> None:
    opener = Opener(SECRET, Purpose.TICKET, Ticket, ordered=False, receiver=OURS)
    sealer = Sealer(SECRET, Purpose.TICKET, THEIRS)
    plain = NextTicket(request_id="r", attempt=0, node=OURS, deadline_s=1.0)
    assert opener.open(sealer.seal(plain)).request_id == "r"
    with pytest.raises(UnreadableMessage, match="unknown field `sampling`"):
        opener.open(sealer.seal(msgspec.structs.replace(plain, sampling=NextSampling(max_tokens=1, seed=1))))


# ------------------------------------------------------------ ranges of versions


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        (Spoken(6, 5), Spoken(6, 5), 6),
        (Spoken(6, 5), Spoken(5, 0), 5),
        (Spoken(6, 5), Spoken(7, 6), 6),
        (Spoken(6, 5), Spoken(8, 7), None),
        (Spoken(6, 5), Spoken(4, 0), None),
        (Spoken(6, 6), Spoken(5, 5), None),
    ],
)
def test_the_newest_version_that_both_speak(ours: Spoken, theirs: Spoken, common: int | None) -> None:
    assert ours.common(theirs) == theirs.common(ours) == common


def test_ranges_are_named_for_people() -> None:
    assert [str(Spoken(6, 5)), str(Spoken(5, 0)), str(Spoken(6, 6))] == ["5 to 6", "5", "6"]


class Grown(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    protocol: int
    added: Annotated[int, since(PROTOCOL_VERSION)] = 0
    inner: discovery.NodeInfo | None = None


def test_later_fields_are_left_out_for_an_older_peer_at_any_depth() -> None:
    node = discovery.NodeInfo(
        name="n",
        boot_id=OURS,
        role=discovery.Role.MIXED,
        url="http://h:1",
        control="",
        model="m",
        fingerprint="f",
        capacity=discovery.Capacity(1, 1, 1, 1),
        protocol=PROTOCOL_VERSION,
        oldest_protocol=OLDEST_PROTOCOL,
    )
    message = Grown("x", PROTOCOL_VERSION, 3, node)
    assert for_protocol(message, PROTOCOL_VERSION) is message
    plain = msgpack.unpackb(msgspec.msgpack.encode(for_protocol(message, RELEASED_0_1)))
    assert plain["protocol"] == RELEASED_0_1
    assert "added" not in plain
    assert not {"protocol", "oldest_protocol"} & plain["inner"].keys()
