"""Runs a real node on a scripted engine: ``python -m tests.api.scripted_node ROLE CONFIG_JSON MODEL_DIR JOURNAL``.

One more argument is the socket of ``tests.forks``, which then starts the engine.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import msgspec

from pdserve.api.node.server import serve
from pdserve.config import NodeConfig
from pdserve.http.guard import GuardedHttp
from pdserve.settings import resolve_secret
from pdserve.wire.discovery import Role
from tests.forks import Forks
from tests.processes import SECRET


def main(role: str, config: str, model_dir: str, journal: str, forks: str = "") -> int:
    # A client that has left in the middle of a silent stream is cut off after this time, and not after a second.
    GuardedHttp.half_closed_s = 0.2
    settings = msgspec.json.decode(config, type=NodeConfig)
    read_secret = partial(resolve_secret, settings.security, [], Path(model_dir))
    given = bool(settings.security.secret_file)
    engine = "tests.api.scripted_engine", journal
    return serve(
        Role(role),
        settings,
        read_secret() if given else SECRET.encode(),
        Path(model_dir),
        Path(model_dir),
        engine_command=Forks(forks).command(*engine) if forks else (sys.executable, "-m", *engine),
        read_secret=read_secret if given else None,
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
