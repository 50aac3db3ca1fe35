"""Runs ``pdserve mixed`` with a mock engine: ``python -m benchmarks.stream.mock_node SCRIPT``.

Settings come from the environment. This is a program of its own, so that no setting of a real node can replace its
engine.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import MutableMapping, Sequence

from benchmarks.programs import study_program
from pdserve.api.node.server import serve
from pdserve.config import NodeConfig
from pdserve.models.checkpoint.model_files import resolve_model, served_model_name
from pdserve.process import die_with_parent
from pdserve.settings import cache_folder, load, resolve_secret, state_folder
from pdserve.wire.discovery import Role


def mock_node_command(script_file: str) -> tuple[str, ...]:
    """Returns the command of a mock node. ``script_file`` is its engine's script (``mock_engine.Script``) as JSON."""
    return study_program("benchmarks.stream.mock_node", script_file)


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises ConfigError and ModelError."""
    die_with_parent(environ)
    config = load(NodeConfig, [], environ, prog="benchmarks.stream.mock_node")
    secret = resolve_secret(config.security, [config.http.host], state_folder(environ))
    cache_dir = cache_folder(environ)
    model_dir = resolve_model(config.model.path)
    name = config.model.served_model_name or served_model_name(config.model.path, model_dir)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, served_model_name=name))
    engine = study_program("benchmarks.stream.mock_engine", argv[0])
    return serve(Role.MIXED, config, secret, model_dir, cache_dir, engine_command=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
