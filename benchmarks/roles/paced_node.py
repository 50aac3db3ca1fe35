"""Runs a node with a paced engine: ``python -m benchmarks.roles.paced_node ROLE PACE``.

Settings come from the environment. This is a program of its own, so that no setting of a real node can replace its
engine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.programs import study_program
from benchmarks.roles.pace import Pace
from pdserve.api.node.server import serve
from pdserve.config import NodeConfig
from pdserve.process import die_with_parent
from pdserve.settings import cache_folder, load, resolve_secret, state_folder
from pdserve.wire.discovery import Role


def paced_node_command(role: Role, pace: Pace) -> tuple[str, ...]:
    """Returns the command of a paced node."""
    encoded = msgspec.json.encode(pace).decode()
    return study_program("benchmarks.roles.paced_node", role.value, encoded)


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises ConfigError and ModelError."""
    die_with_parent(environ)
    role, pace = argv
    config = load(NodeConfig, [], environ, prog="benchmarks.roles.paced_node")
    secret = resolve_secret(config.security, [config.http.host], state_folder(environ))
    engine = study_program("benchmarks.roles.paced_engine", pace)
    return serve(Role(role), config, secret, Path(config.model.path), cache_folder(environ), engine_command=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
