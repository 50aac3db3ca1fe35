"""``python -m tests.api.scripted_node ROLE CONFIG_JSON MODEL_DIR JOURNAL``: a real node on a scripted engine."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from pdserve.api.server import serve
from pdserve.config import NodeConfig
from pdserve.wire.discovery import Role
from tests.processes import SECRET


def main(role: str, config: str, model_dir: str, journal: str) -> int:
    return serve(
        Role(role),
        msgspec.json.decode(config, type=NodeConfig),
        SECRET.encode(),
        Path(model_dir),
        Path(model_dir),
        engine_command=[sys.executable, "-m", "tests.api.scripted_engine", journal],
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
