"""Has a node carry out a command, which this proxy signs with the cluster secret."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import msgspec

from pdserve.errors import PdserveError
from pdserve.http.tls import Trust
from pdserve.wire.command import COMMAND_HEADER, COMMAND_PATH, Command, CommandResult, CommandSigner
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.frame import Secrets
from pdserve_proxy.upstream.node_connection import NodeLost
from pdserve_proxy.upstream.node_pool import NodePool

COMMAND_S = 10.0
"""How long a node may take for a command."""
_MAX_CONNECTIONS = 4
_MAX_ANSWER_BYTES = 64 * 1024


class CommandRefused(PdserveError):
    """A node has not carried out a command. The message says why."""


class _NodeError(msgspec.Struct):
    message: str


class _NodeRefusal(msgspec.Struct):
    error: _NodeError


class NodeCommander:
    """Commands nodes. Owns its connections to them, and closes them as a context manager."""

    def __init__(self, secrets: Secrets, trust: Trust) -> None:
        self._signer = CommandSigner(secrets)
        self._pool = NodePool(connect_timeout_s=COMMAND_S, max_connections=_MAX_CONNECTIONS, trust=trust)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.close()

    async def send(self, command: Command, node: NodeInfo) -> CommandResult:
        """Returns what the node says when it has carried out ``command``. Raises CommandRefused."""
        try:
            async with asyncio.timeout(COMMAND_S):
                return await self._send(command, node)
        except (PdserveError, NodeLost, TimeoutError) as exc:
            raise CommandRefused(str(exc) or "it has not answered in time") from exc

    async def _send(self, command: Command, node: NodeInfo) -> CommandResult:
        headers = {COMMAND_HEADER: self._signer.sign(command, node.boot_id)}
        response = await self._pool.post(node.url, COMMAND_PATH, headers, b"", silence_s=COMMAND_S)
        try:
            body = b""
            while piece := await response.read():
                body += piece
                if len(body) > _MAX_ANSWER_BYTES:
                    raise CommandRefused(f"its answer is longer than {_MAX_ANSWER_BYTES} bytes")
        finally:
            response.close()
        if response.status != 200:
            raise CommandRefused(f"it answers {response.status}: {_message(body)}")
        try:
            return msgspec.json.decode(body, type=CommandResult)
        except msgspec.MsgspecError as exc:
            raise CommandRefused(f"its answer is none: {exc}") from exc


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_NodeRefusal).error.message
    except msgspec.MsgspecError:
        return body[:500].decode(errors="replace")
