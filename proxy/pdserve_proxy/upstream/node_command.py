"""Has a node carry out a command, which this proxy signs with the cluster secret."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from pdserve.control.frame import Secrets
from pdserve.errors import PdserveError
from pdserve.http.tls import Trust
from pdserve.patience import PatientTimeout
from pdserve.tracing.timeline import on_our_clock
from pdserve.wire.command import COMMAND_HEADER, COMMAND_PATH, Command, CommandResult, CommandSigner, NodeChange, Recall
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.timeline import RecalledParts, TimelinePart
from pdserve_proxy.upstream.node_connection import NodeLost
from pdserve_proxy.upstream.node_pool import NodePool

COMMAND_S = 10.0
"""How long a node may take for a command."""
_MAX_CONNECTIONS = 16
_MAX_ANSWER_BYTES = 64 * 1024
_MAX_LANES_BYTES = 8 * 2**20

M = TypeVar("M", bound=msgspec.Struct)


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

    async def send(self, command: NodeChange, node: NodeInfo) -> CommandResult:
        """Returns what the node says when it has carried out ``command``. Raises CommandRefused."""
        body, _ = await self._ask(command, node, COMMAND_S, _MAX_ANSWER_BYTES)
        return _decoded(body, CommandResult)

    async def recall(self, request_id: str, node: NodeInfo, within_s: float) -> list[TimelinePart]:
        """Returns what the node remembers of the requests with this id, on this machine's clock.

        Raises CommandRefused.
        """
        asked_s = time.monotonic()
        body, answered_s = await self._ask(Recall(request_id), node, within_s, _MAX_LANES_BYTES)
        return on_our_clock(_decoded(body, RecalledParts), asked_s, answered_s)

    async def _ask(self, command: Command, node: NodeInfo, within_s: float, max_bytes: int) -> tuple[bytes, float]:
        """Returns the body of the node's answer, and when that began. Raises CommandRefused."""
        try:
            async with PatientTimeout(within_s):
                return await self._post(command, node, within_s, max_bytes)
        except (PdserveError, NodeLost, TimeoutError) as exc:
            raise CommandRefused(str(exc) or "it has not answered in time") from exc

    async def _post(self, command: Command, node: NodeInfo, within_s: float, max_bytes: int) -> tuple[bytes, float]:
        headers = {COMMAND_HEADER: self._signer.sign(command, node.boot_id)}
        response = await self._pool.post(node.url, COMMAND_PATH, headers, b"", silence_s=within_s)
        answered_s = time.monotonic()
        try:
            body = b""
            while piece := await response.read():
                body += piece
                if len(body) > max_bytes:
                    raise CommandRefused(f"its answer is longer than {max_bytes} bytes")
        finally:
            response.close()
        if response.status != 200:
            raise CommandRefused(f"it answers {response.status}: {_message(body)}")
        return body, answered_s


def _decoded(body: bytes, answer: type[M]) -> M:
    """Raises CommandRefused if the node's answer is none."""
    try:
        return msgspec.json.decode(body, type=answer)
    except msgspec.MsgspecError as exc:
        raise CommandRefused(f"its answer is none: {exc}") from exc


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_NodeRefusal).error.message
    except msgspec.MsgspecError:
        return body[:500].decode(errors="replace")
