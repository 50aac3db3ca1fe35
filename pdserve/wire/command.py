"""Tells a node what to do: a command of its cluster's operator, or of a proxy, in the header ``x-pdserve-command``.

The header is a sealed frame (purpose ``COMMAND``) that names the node's boot id as its receiver. So a command is valid
for one start of one node, once, and for as long as the hosts' clocks may differ. A node without a proxy takes none. The
request is a ``POST`` to ``COMMAND_PATH`` at the node's API, and has no body; the response is a ``CommandResult``, or
what the command asks for.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from pdserve.control.frame import Purpose, Sealer, Secrets, to_header
from pdserve.wire.discovery import Role
from pdserve.wire.ids import BootId, RequestId, new_id

COMMAND_PATH = "/internal/command"
COMMAND_HEADER = "x-pdserve-command"


class SetRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="set_role"):
    """Changes what the proxies route to the node. What runs there goes on."""

    role: Role


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="drain"):
    """Ends the node as SIGTERM does: it takes no new work, and ends when it has none left."""


class Recall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="recall"):
    """Asks what the node remembers of the requests with this id. It changes nothing. The answer: ``RecalledParts``."""

    request_id: RequestId


NodeChange: TypeAlias = SetRole | Drain
Command: TypeAlias = NodeChange | Recall


class CommandResult(msgspec.Struct, frozen=True):
    """What a command has changed, as JSON."""

    role: Role
    """The node's role now."""
    before: Role
    draining: bool
    uninformed: tuple[Annotated[str, msgspec.Meta(max_length=512)], ...] = ()
    """The proxies that have not acknowledged the role in time. They hear of it as soon as they can be reached."""


class CommandSigner:
    """Signs the commands of one process."""

    def __init__(self, secret: bytes | Secrets) -> None:
        self._sealer = Sealer(secret, Purpose.COMMAND, new_id())

    def sign(self, command: Command, node: BootId) -> str:
        """Returns the value of the header by which ``node`` is to carry out ``command``."""
        return to_header(self._sealer.seal(command, node))
