"""Says which versions of the protocol between hosts this process supports.

A process tells its newest and its oldest version in every greeting. Two processes use the newest one that both
support. If there is none, the one that notices says so, with both ranges. ``docs/protocol.md`` has the rules by which
messages change from one version to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec

PROTOCOL_VERSION: Final = 6
"""The newest version that this process supports. Every change of the messages between hosts makes it one higher."""
OLDEST_PROTOCOL: Final = 5
"""The oldest version, for hosts that are not upgraded yet: that of the last minor release."""
NAMED_RECEIVERS: Final = 6
"""The first version whose frames name their receiver."""
PACED_TRANSFERS: Final = 6
"""The first version in which a prefill engine sends blocks only when the decode engine has room for them."""
CACHED_BLOCKS: Final = 6
"""The first version in which an engine gives others the blocks of its prefix cache, and offers them."""
RESUMED_ANSWERS: Final = 6
"""The first version in which a decode node writes journals and resumes answers."""
ROLE_COMMANDS: Final = 6
"""The first version in which a node takes commands, and serves in any role."""
GRAMMARS: Final = 6
"""The first version whose prompts may have a grammar."""
CLIENT_TURNS: Final = 6
"""The first version whose tickets stand for a client."""
TRACES: Final = 6
"""The first version whose tickets and prompts may belong to a trace."""
KEPT_ANSWERS: Final = 6
"""The first version in which a decode node keeps answers for clients that ask again."""
DIALECTS: Final = 6
"""The first version whose nodes have the routes of responses and of Anthropic's messages."""
PROMPT_LOGPROBS: Final = 6
"""The first version in which a prefill engine sends the log probabilities of prompts."""
GIVEN_BACK: Final = 6
"""The first version in which a decode node gives a request back when a prefill node is lost with it."""
NAMED_LOGPROBS: Final = 6
"""The first version whose prompts may name the tokens whose log probabilities are reported."""
CACHE_OWNERS: Final = 6
"""The first version in which a decode node keeps the cached prompts of owners of API keys apart."""
RELEASED_0_1: Final = 5
"""The version of pdserve 0.1, which refuses unknown fields and whose frames do not name their receiver."""

M = TypeVar("M", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A range of versions of the protocol."""

    newest: int
    oldest: int
    """The oldest version; 0 if that is ``newest``."""

    def common(self, other: Spoken) -> int | None:
        """Returns the newest version in both ranges, if there is one."""
        common = min(self.newest, other.newest)
        return common if common >= max(self.oldest or self.newest, other.oldest or other.newest) else None

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}" if 0 < self.oldest < self.newest else str(self.newest)


SPOKEN: Final = Spoken(PROTOCOL_VERSION, OLDEST_PROTOCOL)


def since(version: int) -> msgspec.Meta:
    """Returns the mark of a field that this version introduced. It needs a default, and its struct omits defaults."""
    return msgspec.Meta(extra={"since": version})


def for_protocol(message: M, protocol: int) -> M:
    """Returns ``message`` as a peer of ``protocol`` can read it: without the fields that came later.

    A field ``protocol`` has the sender's newest version. An older peer gets its own version there.
    """
    if protocol >= PROTOCOL_VERSION:
        return message
    changes: dict[str, Any] = dict(_later_fields(type(message), protocol))
    for name in set(message.__struct_fields__) - changes.keys():
        value = getattr(message, name)
        if isinstance(value, msgspec.Struct):
            changes[name] = for_protocol(value, protocol)
        elif name == "protocol":
            changes[name] = min(value, protocol)
    return msgspec.structs.replace(message, **changes) if changes else message


@cache
def _later_fields(kind: type[msgspec.Struct], protocol: int) -> tuple[tuple[str, Any], ...]:
    """Returns the names and defaults of the fields that came after ``protocol``."""
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    return tuple((field.name, field.default) for field in fields if _version_of(hints[field.name]) > protocol)


def _version_of(hint: Any) -> int:
    metas = (meta for meta in get_args(hint) if isinstance(meta, msgspec.Meta) and meta.extra)
    return max((meta.extra.get("since", 0) for meta in metas if meta.extra), default=0)
