"""``pdserve drain`` empties a running node and ends it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pdserve.cli.node_commands import Commander, CommandFailed, leading_flags
from pdserve.config import DrainConfig
from pdserve.settings import load
from pdserve.wire.command import Drain

_DESCRIPTION = (
    "pdserve drain NODE does what SIGTERM does on the node's host: the node takes no new work, and ends when it has "
    "none left. NODE is a name or URL of the proxy's /instances. Exit status 1 if the node has not ended in time."
)
_ASK_S = 0.1


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status. Raises ConfigError, and CommandFailed if the node does not drain, or not in time."""
    config = load(DrainConfig, drain_flags(argv), environ, prog="pdserve drain", description=_DESCRIPTION)
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
        time.sleep(_ASK_S)
    return 0


def drain_flags(argv: Sequence[str]) -> list[str]:
    """Returns ``argv`` with a leading node replaced by the flag that it stands for."""
    return leading_flags(argv, ("--node",))
