"""``pdserve role`` and ``pdserve drain``: have a node carry out a command that the cluster secret signs."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from pdserve.config import CommandConfig, DrainConfig, RoleConfig, SecurityConfig, TrustConfig
from pdserve.doctor.cluster import ListedInstance, direct_opener, read_instances
from pdserve.errors import ConfigError, PdserveError
from pdserve.http.tls import Trust, read_authorities
from pdserve.settings import load, resolve_secret, state_folder
from pdserve.wire.command import COMMAND_HEADER, COMMAND_PATH, CommandResult, CommandSigner, Drain, NodeChange, SetRole
from pdserve.wire.discovery import Role

_MAX_ANSWER_BYTES = 64 * 1024
_NOBODY_BEHIND = (502, 504)
"""The statuses of a gateway in front of a node that has ended."""
_BOOT_ID = re.compile("[0-9a-f]{32}")
_ROLE_DESCRIPTION = (
    "pdserve role NODE ROLE changes what the proxies route to a running node, at once and without a restart: what runs "
    "there goes on. NODE is a name or URL of the proxy's /instances. Exit status 1 if the role was not changed."
)
_DRAIN_DESCRIPTION = (
    "pdserve drain NODE does what SIGTERM does on the node's host: the node takes no new work, and ends when it has "
    "none left. NODE is a name or URL of the proxy's /instances. Exit status 1 if the node has not ended in time."
)
_DRAIN_ASK_S = 0.1


KEY_ADVICE = "--api-key-file names a file with a key, and PDSERVE_API_KEY is one"
"""What to do where a proxy wants a key."""


class _Error(msgspec.Struct):
    message: str


class ErrorBody(msgspec.Struct):
    """What a server of OpenAI's API, and each of pdserve's, answers where it refuses."""

    error: _Error


def error_message(body: bytes) -> str | None:
    """Returns what a server says in the ``body`` of a refusal; None if that has another form."""
    try:
        return msgspec.json.decode(body, type=ErrorBody).error.message
    except msgspec.MsgspecError:
        return None


class CommandFailed(PdserveError):
    """The node was not found, or has not carried out the command."""


class Commander:
    """Commands the nodes of one proxy."""

    def __init__(
        self, config: CommandConfig, trust: TrustConfig, security: SecurityConfig, environ: Mapping[str, str]
    ) -> None:
        """Raises ConfigError if there is no node's name, no secret, or no usable file of authorities."""
        if not config.node:
            raise ConfigError("which node? Give its name or URL, as the proxy's /instances has it")
        self._config = config
        self._trust = Trust(read_authorities(trust.authorities))
        self._opener = direct_opener(self._trust)
        host = urlsplit(config.proxy_url).hostname or ""
        self._signer = CommandSigner(resolve_secret(security, [host], state_folder(environ)))

    def find(self) -> ListedInstance:
        """Returns the node as the proxy lists it. Raises CommandFailed."""
        wanted = self._config.node
        listed = self.listed()
        found = [node for node in listed if wanted.rstrip("/") in (node.name, node.url)]
        if len(found) == 1:
            return found[0]
        if found:
            urls = ", ".join(node.url for node in found)
            raise CommandFailed(f"{len(found)} nodes have the name {wanted!r}; give the URL of one of them: {urls}")
        known = ", ".join(sorted(node.name for node in listed)) or "none"
        raise CommandFailed(f"{self._config.proxy_url} knows no node {wanted!r}; it knows {known}")

    def listed(self) -> list[ListedInstance]:
        """Returns all nodes of the proxy. Raises CommandFailed."""
        listed = read_instances(self._config.proxy_url, self._config.timeout_s, self._trust)
        if isinstance(listed, str):
            raise CommandFailed(f"{self._config.proxy_url}: {listed}")
        return listed

    def send(self, command: NodeChange, node: ListedInstance) -> CommandResult:
        """Returns what the node says when it has carried out the command. Raises CommandFailed."""
        if not _BOOT_ID.fullmatch(node.boot_id) or not node.url.startswith(("http://", "https://")):
            raise CommandFailed(f"{self._config.proxy_url} does not say where {node.name} is")
        header = self._signer.sign(command, bytes.fromhex(node.boot_id))
        url = f"{node.url}{COMMAND_PATH}"
        request = urllib.request.Request(url, b"", {COMMAND_HEADER: header})  # noqa: S310  # it begins with http
        try:
            with self._opener.open(request, timeout=self._config.timeout_s) as response:
                return msgspec.json.decode(response.read(_MAX_ANSWER_BYTES), type=CommandResult)
        except urllib.error.HTTPError as exc:
            with exc:
                body = exc.read(_MAX_ANSWER_BYTES)
                words = error_message(body) or body[:200].decode(errors="replace")
                raise CommandFailed(f"{node.name} refuses: {words}") from exc
        except (OSError, http.client.HTTPException, msgspec.MsgspecError) as exc:
            raise CommandFailed(f"no answer from {node.name} at {node.url}: {exc}") from exc

    def has_ended(self, node: ListedInstance) -> bool:
        """Returns whether nobody takes connections at the node's URL, or another start of it does.

        A node that drains may leave the proxy's list before it ends. If nothing can be learnt now, it runs.
        """
        try:
            with self._opener.open(f"{node.url}/health", timeout=self._config.timeout_s):
                pass
        except urllib.error.HTTPError as exc:
            with exc:
                if exc.code in _NOBODY_BEHIND:
                    return True
        except urllib.error.URLError as exc:
            if isinstance(exc.reason, ConnectionRefusedError):
                return True
        except (OSError, http.client.HTTPException):
            pass
        try:
            return any(other.url == node.url and other.boot_id != node.boot_id for other in self.listed())
        except CommandFailed:
            return False


def change_role(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError, and CommandFailed if the node does not change its role."""
    config = load(RoleConfig, argv, environ, prog="pdserve role", description=_ROLE_DESCRIPTION)
    role = _role(config.new_role.role)
    commander = Commander(config.command, config.trust, config.security, environ)
    node = commander.find()
    result = commander.send(SetRole(role), node)
    if result.before is result.role:
        print(f"{node.name} is a {role.value} node already")
    else:
        print(f"{node.name} is a {role.value} node now; it was a {result.before.value} node")
    for proxy in result.uninformed:
        print(f"proxy {proxy} has not acknowledged it yet; the node tells it again with every heartbeat")
    return 0


def _role(name: str) -> Role:
    roles = ", ".join(role.value for role in Role)
    if not name:
        raise ConfigError(f"which role? A node is one of {roles}")
    try:
        return Role(name)
    except ValueError as exc:
        raise ConfigError(f"--role: {name!r} is no role; there are {roles}") from exc


def drain(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError, and CommandFailed if the node does not drain, or not in time."""
    config = load(DrainConfig, argv, environ, prog="pdserve drain", description=_DRAIN_DESCRIPTION)
    commander = Commander(config.command, config.trust, config.security, environ)
    node = commander.find()
    began = time.monotonic()
    commander.send(Drain(), node)
    print(f"{node.name} drains", flush=True)
    wait_s = config.drain.wait_s
    while wait_s:
        if commander.has_ended(node):
            print(f"{node.name} has ended after {time.monotonic() - began:.1f} s")
            break
        if time.monotonic() - began >= wait_s:
            raise CommandFailed(f"{node.name} still drains after {wait_s:g} s")
        time.sleep(_DRAIN_ASK_S)
    return 0
