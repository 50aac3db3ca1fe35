"""Runs a node with a governed engine: ``python -m lab.fault_matrix.node_program ROLE FOLDER FLAGS``."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from pdserve.api.node.server import serve
from pdserve.config import NodeConfig, Speculate
from pdserve.process import die_with_parent
from pdserve.settings import cache_folder, load, resolve_secret, state_folder
from pdserve.wire.discovery import Role


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    die_with_parent(environ)
    role, folder, *flags = argv
    config = load(NodeConfig, flags, environ, prog="lab.fault_matrix.node_program")
    secret = resolve_secret(config.security, [config.http.host], state_folder(environ))
    engine = [sys.executable, "-m", "lab.fault_matrix.engine_program", folder, config.discovery.name]
    if config.scheduler.speculation is Speculate.MTP:
        engine.append("drafts")
    return serve(Role(role), config, secret, Path(config.model.path), cache_folder(environ), engine_command=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
