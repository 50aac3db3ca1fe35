"""Says which version of pdserve this is, and which versions of the protocol between hosts it supports.

A process tells its newest and its oldest version in every greeting. Two processes use the newest one that both
support. If there is none, the one that notices says so, with both ranges. ``docs/protocol.md`` has the rules by which
messages change from one version to the next.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

INSTALLED_VERSION: Final = importlib.metadata.version("pdserve")
"""The version of the package that is installed here."""
PROTOCOL_VERSION: Final = 6
"""The newest version that this process supports. Every change of the messages between hosts makes it one higher."""
OLDEST_PROTOCOL: Final = 6
"""The oldest version, for hosts that are not upgraded yet: that of the last minor release. 0.2.0 is the first one."""

M = TypeVar("M", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A range of versions of the protocol."""

    newest: int
    oldest: int

    def common(self, other: Spoken) -> int | None:
        """Returns the newest version in both ranges, if there is one."""
        common = min(self.newest, other.newest)
        return common if common >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}" if self.oldest < self.newest else str(self.newest)


SPOKEN: Final = Spoken(PROTOCOL_VERSION, OLDEST_PROTOCOL)


def since(version: int) -> msgspec.Meta:
    """Returns the mark of a statement's field that this version introduced.

    The field needs a default, and its struct omits defaults. A new field of an order has no mark: a peer that does not
    know it must refuse the order.
    """
    return msgspec.Meta(extra_json_schema={"since": version})


def for_protocol(message: M, protocol: int) -> M:
    """Returns ``message`` as a peer of ``protocol`` can read it: without the fields that came later."""
    if protocol >= PROTOCOL_VERSION:
        return message
    changes: dict[str, Any] = dict(_later_fields(type(message), protocol))
    for name in set(message.__struct_fields__) - changes.keys():
        value = getattr(message, name)
        if isinstance(value, msgspec.Struct):
            changes[name] = for_protocol(value, protocol)
    return msgspec.structs.replace(message, **changes) if changes else message


@cache
def _later_fields(kind: type[msgspec.Struct], protocol: int) -> tuple[tuple[str, Any], ...]:
    """Returns the names and defaults of the fields that came after ``protocol``."""
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    return tuple((field.name, field.default) for field in fields if _version_of(hints[field.name]) > protocol)


def _version_of(hint: Any) -> int:
    metas = [meta.extra_json_schema or {} for meta in get_args(hint) if isinstance(meta, msgspec.Meta)]
    return max((meta.get("since", 0) for meta in metas), default=0)
