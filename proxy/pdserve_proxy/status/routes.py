"""The routes of the status: the page at ``/`` with its style and script, the report, and commands to nodes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec
from quart import Quart, Response, request

from pdserve.errors import BadUpstream, InvalidRequest, NotFound, UnsupportedMediaType
from pdserve.wire.command import CommandResult, Drain, NodeChange, SetRole
from pdserve.wire.discovery import NodeInfo
from pdserve.wire.status import IncidentKind
from pdserve_proxy.recent import Incidents
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.status.access import StatusAccess
from pdserve_proxy.status.report import SharedReport
from pdserve_proxy.upstream.node_command import CommandRefused, NodeCommander

log = logging.getLogger(__name__)

COMMANDS_PATH = "/commands"
MAX_COMMAND_BYTES = 1024
PAGE_FILES = {
    "/": ("status.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
}
NOT_SHOWN = "not_shown.html"
"""What a person sees in a browser where the status is not shown."""
SAFETY_HEADERS = {
    # The page loads its own style, script and data, and nothing else; its icon is in the page itself.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

Report = Callable[[], Awaitable[bytes]]
"""Returns the report on the whole proxy as JSON. May raise RequestError."""


class NodeOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request to ``/commands``: what a node is to do."""

    node: str
    """The boot id of the node, as the report has it: another start of the node does not carry out the command."""
    command: NodeChange


class _Answer(msgspec.Struct, frozen=True):
    """``StatusAnswer``, whose report is JSON already."""

    may_command: bool
    report: msgspec.Raw


class StatusRoutes:
    """Answers those who watch the cluster, and commands its nodes for admins."""

    def __init__(
        self,
        access: StatusAccess,
        report: Report,
        registry: RegistryView,
        commander: NodeCommander,
        incidents: Incidents,
    ) -> None:
        self._access = access
        self._report = SharedReport(report)
        self._registry = registry
        self._commander = commander
        self._incidents = incidents

    def add_routes(self, app: Quart) -> None:
        folder = files("pdserve_proxy.status").joinpath("page")
        self._not_shown = folder.joinpath(NOT_SHOWN).read_bytes()
        for path, (name, kind) in PAGE_FILES.items():
            app.add_url_rule(path, name, self._file(folder.joinpath(name).read_bytes(), kind))
        app.add_url_rule("/status", "status", self.status)
        app.add_url_rule(COMMANDS_PATH, "commands", self.command, methods=["POST"])

    def _file(self, data: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
        async def serve() -> Response:
            if not self._access.shown and "text/html" in request.headers.get("accept", ""):
                return Response(self._not_shown, 404, headers=SAFETY_HEADERS, content_type="text/html; charset=utf-8")
            self._check_shown()
            return Response(data, headers=SAFETY_HEADERS, content_type=kind)

        return serve

    async def status(self) -> Response:
        self._check_shown()
        may_command = self._access.check_viewer(_headers())
        return _json(_Answer(may_command, msgspec.Raw(await self._report())))

    async def command(self) -> Response:
        self._check_shown()
        admin = self._access.check_admin(_headers())
        order = await _order()
        node = self._node(order.node)
        what = _words(order.command)
        log.info("%s, an admin, has node %s (%s) %s", admin, node.name, node.url, what)
        try:
            result: CommandResult = await self._commander.send(order.command, node)
        except CommandRefused as exc:
            raise BadUpstream(f"node {node.name} was to {what}: {exc}", code="command_refused") from exc
        self._incidents.add(IncidentKind.COMMANDED, f"{admin} has had it {what}", node=node.name)
        return _json(result)

    def _check_shown(self) -> None:
        if not self._access.shown:
            raise NotFound(
                "the status is not shown: see --status-page; with auto, a proxy that other machines can reach needs "
                "--api-key-file or --admin-key-file for it",
                code="no_status",
            )

    def _node(self, boot_id: str) -> NodeInfo:
        for node in self._registry.snapshot().nodes:
            if node.info.boot_id.hex() == boot_id:
                return node.info
        raise NotFound("no node with this boot id is registered", param="node", code="unknown_node")


async def _order() -> NodeOrder:
    if request.mimetype != "application/json":
        raise UnsupportedMediaType("a command is sent with 'Content-Type: application/json'")
    if (request.content_length or 0) > MAX_COMMAND_BYTES:
        raise InvalidRequest(f"a command has at most {MAX_COMMAND_BYTES} bytes")
    try:
        return msgspec.json.decode(await request.get_data(cache=False), type=NodeOrder)
    except msgspec.MsgspecError as exc:
        raise InvalidRequest(f"not a command: {exc}") from exc


def _words(command: NodeChange) -> str:
    match command:
        case Drain():
            return "drain"
        case SetRole(role=role):
            return f"become a {role.value} node"


def _headers() -> dict[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), headers=SAFETY_HEADERS, content_type="application/json")
