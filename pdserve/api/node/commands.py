"""Carries out commands of the cluster's operator, or of a proxy: another role for the node, or its drain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import cast
from urllib.parse import urlsplit

import msgspec

from pdserve.api.node.serving_node import NodePhase, ServingNode
from pdserve.config import DiscoveryConfig, TransferConfig
from pdserve.control.frame import Opener, Purpose, Secrets, from_header
from pdserve.errors import InvalidRequest, Unauthorized, WireError
from pdserve.http.request import JSON, HttpRequest
from pdserve.settings import is_loopback
from pdserve.wire.command import COMMAND_HEADER, Command, CommandResult, Drain, Recall, SetRole
from pdserve.wire.discovery import Role
from pdserve.wire.ids import BootId
from pdserve.wire.timeline import RecalledParts

log = logging.getLogger(__name__)

MAX_COMMAND_CHARS = 4096
ANNOUNCE_S = 2.0
"""How long a command waits until the proxies have acknowledged a role."""


class CommandGate:
    """Checks the commands to one node. A command names the node's boot id, and is good once."""

    def __init__(self, secret: bytes | Secrets, boot_id: BootId, clock: Callable[[], float] = time.time) -> None:
        self._opener: Opener[Command] = Opener(
            secret, Purpose.COMMAND, cast("type[Command]", Command), receiver=boot_id, ordered=False, clock=clock
        )

    def admit(self, header: str | None) -> Command:
        """Returns the command in a request's header. Raises Unauthorized, which says what is wrong about it."""
        if header is None:
            raise Unauthorized("a command needs the cluster's signature", code="no_command")
        try:
            opened = self._opener.open_from(from_header(header, MAX_COMMAND_CHARS))
        except WireError as exc:
            raise Unauthorized(f"the command is not acceptable: {exc}", code="bad_command") from exc
        if not opened.named:
            raise Unauthorized("the command is not acceptable: it names no node", code="bad_command")
        return opened.message


def is_confined(started: Role, transfer: TransferConfig, discovery: DiscoveryConfig) -> bool:
    """Returns whether a node can fetch from no other machine, although a proxy of its is on one.

    The engine of a node that starts as a prefill node and listens on loopback alone keeps UCX there while it runs.
    """
    on_loopback = is_loopback(transfer.host) and not transfer.advertise and not transfer.ucx_net_devices
    proxies = (urlsplit(proxy).hostname or "" for proxy in discovery.proxies)
    return started is Role.PREFILL and on_loopback and not all(map(is_loopback, proxies))


def check_role(role: Role, *, confined: bool) -> None:
    """Raises InvalidRequest if a node that ``is_confined`` or not must not get this role."""
    if confined and role.answers:
        raise InvalidRequest(
            f"this node was started as a prefill node on loopback alone, and as a {role.value} node it could not fetch "
            "KV blocks from other machines; start it with --transfer-host or --ucx-net-devices, or in that role",
            code="confined_to_loopback",
        )


class NodeCommands:
    """The route of a node's commands, which are carried out one after the other."""

    def __init__(
        self,
        node: ServingNode,
        gate: CommandGate,
        announce: Callable[[Role, float], Awaitable[tuple[str, ...]]],
        drain: Callable[[], None],
        *,
        confined: bool = False,
    ) -> None:
        """``announce`` tells the proxies a role, and returns those that have not taken it within so many seconds.

        A ``confined`` node answers no requests.
        """
        self._node = node
        self._gate = gate
        self._announce = announce
        self._drain = drain
        self._confined = confined
        self._turn = asyncio.Lock()

    async def handle(self, request: HttpRequest) -> None:
        """Carries out the command in ``request``. Raises RequestError, and changes nothing, if it cannot."""
        command = self._gate.admit(request.header(COMMAND_HEADER.encode()))
        result: CommandResult | RecalledParts
        match command:
            case SetRole(role):
                result = await self._set_role(role)
            case Drain():
                result = self._begin_drain()
            case Recall(request_id):
                result = self._recall(request_id)
        await request.respond(200, JSON, msgspec.json.encode(result))

    async def _set_role(self, role: Role) -> CommandResult:
        async with self._turn:
            self._node.check_serving()
            check_role(role, confined=self._confined)
            before, self._node.role = self._node.role, role
            if role is not before:
                self._node.engine.assign(role)
                log.info("commanded: this node is a %s node now, and was a %s node", role.value, before.value)
            uninformed = await self._announce(role, ANNOUNCE_S)
        return CommandResult(role, before, draining=self._node.phase is NodePhase.DRAINING, uninformed=uninformed)

    def _recall(self, request_id: str) -> RecalledParts:
        began = time.monotonic()
        parts = self._node.tracing.parts.recall(request_id)
        now = time.monotonic()
        return RecalledParts(now, now - began, parts)

    def _begin_drain(self) -> CommandResult:
        log.info("commanded: this node drains")
        self._drain()
        return CommandResult(self._node.role, self._node.role, draining=True)
