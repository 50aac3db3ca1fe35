"""``pdserve role`` gives a running node another role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.cli.node_commands import Commander, leading_flags
from pdserve.config import RoleConfig
from pdserve.errors import ConfigError
from pdserve.settings import load
from pdserve.wire.command import SetRole
from pdserve.wire.discovery import Role

_DESCRIPTION = (
    "pdserve role NODE ROLE changes what the proxies route to a running node, at once and without a restart: what runs "
    "there goes on. NODE is a name or URL of the proxy's /instances. Exit status 1 if the role was not changed."
)
_WORDS = ("--node", "--role")


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError, and CommandFailed if the node does not change its role."""
    config = load(RoleConfig, role_flags(argv), environ, prog="pdserve role", description=_DESCRIPTION)
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


def role_flags(argv: Sequence[str]) -> list[str]:
    """Returns ``argv`` with a leading node and role replaced by the flags that they stand for."""
    return leading_flags(argv, _WORDS)


def _role(name: str) -> Role:
    roles = ", ".join(role.value for role in Role)
    if not name:
        raise ConfigError(f"which role? A node is one of {roles}")
    try:
        return Role(name)
    except ValueError as exc:
        raise ConfigError(f"--role: {name!r} is no role; there are {roles}") from exc
