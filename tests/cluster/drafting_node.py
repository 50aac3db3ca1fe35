"""A node that drafts as much as it may, whatever that costs: ``python -m tests.cluster.drafting_node ROLE FLAGS``.

Whether drafts pay depends on the machine and on what else runs there. With ``engine`` in place of a role, this is the
engine of such a node. Before either, there may be the socket of ``tests.forks``, which then starts engine and ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.api.node.server import serve
from pdserve.config import NodeConfig
from pdserve.engine.process import main as serve_engine
from pdserve.process import die_with_parent
from pdserve.settings import cache_folder, load, resolve_secret, state_folder
from pdserve.wire.discovery import Role
from tests.cluster.forked_node import have_ranks_forked
from tests.forks import Forks

if TYPE_CHECKING:
    from pdserve.engine.launched_step import StepRunner

MODULE = "tests.cluster.drafting_node"


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    *socket, role = argv[: 2 if Path(argv[0]).is_absolute() else 1]
    flags = argv[len(socket) + 1 :]
    if role == "engine":
        if socket:
            have_ranks_forked(*socket)
        return serve_engine(drafting_always)
    die_with_parent(environ)
    config = load(NodeConfig, flags, environ, prog=MODULE)
    secret = resolve_secret(config.security, [config.http.host], state_folder(environ))
    command = Forks(*socket).command(MODULE, *socket, "engine") if socket else [sys.executable, "-m", MODULE, "engine"]
    return serve(Role(role), config, secret, Path(config.model.path), cache_folder(environ), engine_command=command)


def drafting_always(runner: StepRunner) -> StepRunner:
    """Returns ``runner``, and has the engine of this process draft as much as it may."""
    # Imported late: an engine imports torch by itself, and without a part of it.
    from pdserve.engine.speculation.speculation import Speculation

    Speculation._counts = lambda self, guessed, *_: [len(each.chances) for each in guessed]  # type: ignore[method-assign]
    Speculation._model_count = lambda self, requests: self._most_drafts  # type: ignore[method-assign]
    return runner


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
