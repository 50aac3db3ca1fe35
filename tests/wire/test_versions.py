"""Tests what hosts of two versions read of each other, with the schemas of all releases beside today's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgpack
import msgspec
import pytest

from pdserve.control.frame import Opener, Purpose, Sealer
from pdserve.errors import UnreadableMessage
from pdserve.wire import discovery
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.terms import Ticket
from pdserve.wire.version import OLDEST_PROTOCOL, PROTOCOL_VERSION, SPOKEN, Spoken, for_protocol, since
from tests.terms import made_terms
from tests.wire.schema import Schema, breaches, schema_of

SECRET = b"the secret of a cluster"
OURS, THEIRS = b"o" * 16, b"t" * 16

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
    plain = NextTicket(attempt=0, node=OURS, terms=made_terms(1.0, request_id="r"))
    assert opener.open(sealer.seal(plain)).terms.prompt.request_id == "r"
    with pytest.raises(UnreadableMessage, match="unknown field `sampling`"):
        opener.open(sealer.seal(msgspec.structs.replace(plain, sampling=NextSampling(max_tokens=1, seed=1))))


# ------------------------------------------------------------ ranges of versions


@pytest.mark.parametrize(
    ("ours", "theirs", "common"),
    [
        (Spoken(6, 5), Spoken(6, 5), 6),
        (Spoken(6, 5), Spoken(5, 5), 5),
        (Spoken(6, 5), Spoken(7, 6), 6),
        (Spoken(6, 5), Spoken(8, 7), None),
        (Spoken(6, 5), Spoken(4, 4), None),
        (Spoken(6, 6), Spoken(5, 5), None),
    ],
)
def test_the_newest_version_that_both_speak(ours: Spoken, theirs: Spoken, common: int | None) -> None:
    assert ours.common(theirs) == theirs.common(ours) == common


def test_ranges_are_named_for_people() -> None:
    assert [str(Spoken(6, 5)), str(Spoken(5, 5)), str(SPOKEN)] == ["5 to 6", "5", "6"]


# ------------------------------------------------------------ fields that came later


class Inner(msgspec.Struct, frozen=True, omit_defaults=True):
    size: int
    colour: Annotated[str, msgspec.Meta(max_length=8), since(PROTOCOL_VERSION)] = ""


class Grown(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    added: Annotated[int, since(PROTOCOL_VERSION)] = 0
    inner: Inner | None = None


def test_later_fields_are_left_out_for_an_older_peer_at_any_depth() -> None:
    message = Grown("x", 3, Inner(1, "red"))
    assert for_protocol(message, PROTOCOL_VERSION) is message
    frame = Sealer(SECRET, Purpose.DISCOVERY, OURS).seal_to(THEIRS, PROTOCOL_VERSION - 1, message)
    assert msgpack.unpackb(msgpack.unpackb(frame)[4][len(THEIRS) :]) == {"name": "x", "inner": {"size": 1}}


# ------------------------------------------------------------ releases

RELEASED = Path(__file__).parent / "released"
"""A schema of each release that hosts of today work with, as ``tests.wire.schema`` has written it."""


def test_hosts_of_each_release_read_todays_messages_and_todays_hosts_theirs() -> None:
    for path in RELEASED.glob("*.json"):
        released = msgspec.json.decode(path.read_bytes(), type=Schema)
        assert released.protocol < OLDEST_PROTOCOL or not list(breaches(released, schema_of())), path.name


def altered(fields: list[Any], **config: Any) -> Schema:
    return schema_of([msgspec.defstruct("Load", fields, omit_defaults=True, **config)], PROTOCOL_VERSION + 1)


@pytest.mark.parametrize("order", [False, True])
def test_a_change_that_a_released_host_does_not_survive_is_named(order: bool) -> None:
    config: dict[str, Any] = {"forbid_unknown_fields": order}
    fields: list[Any] = [("running", int), ("waiting", int, 0)]
    released = msgspec.structs.replace(altered(fields, **config), protocol=PROTOCOL_VERSION)
    released = msgspec.json.decode(msgspec.json.encode(released), type=Schema)

    def breaking(now: list[Any]) -> list[str]:
        return list(breaches(released, altered(now, **config)))

    later = Annotated[int, since(PROTOCOL_VERSION + 1)]
    assert breaking(fields) == breaking([*fields, ("added", later, 0)]) == []
    assert breaking([*fields, ("added", int, 0)]) == (
        [] if order else ["Load.added is new, and does not say since which version"]
    )
    assert breaking([("added", int), *fields]) == ["Load.added is new, and has no default"]
    assert breaking([("running", str), fields[1]]) == ["Load.running is another"]
    assert breaking(fields[1:]) == ["Load.running is gone"]
    assert breaking(fields[:1]) == (["Load.waiting is gone"] if order else [])
    assert list(breaches(released, schema_of([Inner]))) == ["Load is gone"]
