"""The schema of all messages between hosts, and which of its changes hosts of a release do not survive.

At a release, ``python -m tests.wire.schema > tests/wire/released/VERSION.json`` keeps its schema. From then on,
``test_versions`` fails for a change that a host of that release could not read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pdserve.wire.command import Command
from pdserve.wire.discovery import FromProxy, ToProxy
from pdserve.wire.terms import Ticket
from pdserve.wire.transfer import LinkAddress, ToDecode, ToPrefill
from pdserve.wire.version import PROTOCOL_VERSION

BETWEEN_HOSTS: tuple[Any, ...] = (ToProxy, FromProxy, Ticket, Command, ToPrefill, ToDecode, LinkAddress)


class Schema(msgspec.Struct, frozen=True):
    protocol: int
    kinds: dict[str, dict[str, Any]]
    """The JSON schema of each struct and enum, without what only people read."""


def schema_of(types: Sequence[Any] = BETWEEN_HOSTS, protocol: int = PROTOCOL_VERSION) -> Schema:
    _, kinds = msgspec.json.schema_components(types, ref_template="{name}")
    return Schema(protocol, {name: _bare(kind) for name, kind in kinds.items()})


def _bare(kind: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kind.items() if key not in ("title", "description")}


def breaches(released: Schema, today: Schema) -> Iterator[str]:
    """Yields each change since ``released`` that a host of that release, or of today, does not survive."""
    for name, then in released.kinds.items():
        if (now := today.kinds.get(name)) is None:
            yield f"{name} is gone"
        elif "properties" not in then:
            if then != now:
                yield f"{name} has other values"
        else:
            yield from (f"{name}.{breach}" for breach in _field_breaches(then, now, released.protocol))


def _field_breaches(then: dict[str, Any], now: dict[str, Any], protocol: int) -> Iterator[str]:
    before, fields, required = then["properties"], now["properties"], now.get("required", ())
    order = then.get("additionalProperties") is False
    for field in before.keys() - fields.keys():
        if order or field in then.get("required", ()):
            yield f"{field} is gone"
    for field in before.keys() & fields.keys():
        if before[field] != fields[field]:
            yield f"{field} is another"
    for field in fields.keys() - before.keys():
        if field in required:
            yield f"{field} is new, and has no default"
        elif not order and fields[field].get("since", 0) <= protocol:
            yield f"{field} is new, and does not say since which version"


def main() -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(schema_of(), order="sorted"), indent=1) + b"\n")


if __name__ == "__main__":
    main()
